"""A table that grows to many rows with an SSD tier, while keys arrive and expire.

    python benchmarks/embedding_growth.py --rows 100000000 --folder /mnt/nvme --json FILE

First `--rows` rows of `--dim` values with row-wise Adagrad are trained once each, in batches of
131,072. Then come `--steps` steps as in a stream: 65,536 ids, of which 5% are new and the others
by a power law over the rows, the newest first (density 1/age). A batch names an id once. Each step
is a lookup and an update. Every `--every` steps what rested for `--rest` steps expires. Both phases
say ids per second, processor time, what was read from the device (and not from the system's cache),
and what a row costs in memory (of the process, less what it had before) and in the file.

`--peer`: TFRA's table instead (TensorFlow 2.16.2, tensorflow-recommenders-addons 0.8.1). It has no
second tier, no expiry by age and no row-wise Adagrad, so all rows are in memory, and a step looks
up and writes the same rows back, without an optimizer.
"""

from __future__ import annotations

import resource
import statistics
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np

from evener.embedding import Options, RowWiseAdagrad, SsdTier, Store, Ttl

FILL, BATCH, NEW = 131_072, 65_536, 0.05


def memory() -> int:
    """Bytes of this process in memory."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


def from_device() -> int:
    """Bytes that this process has made the system read from a device."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def scattered(numbers: np.ndarray) -> np.ndarray:
    """Keys all over int64, one for each number."""
    return (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


class Tfra:
    """As much of a store as the peer has."""

    def __init__(self, dim: int) -> None:
        import tensorflow as tf  # optional
        import tensorflow_recommenders_addons.dynamic_embedding as tfra

        self._tf, self._table = tf, tfra.get_variable("growth", dim=dim, devices=["/CPU:0"])

    def lookup(self, keys: np.ndarray, step: int, out: np.ndarray) -> None:
        """Rows of keys; such that are not there have initial values, and stay absent."""
        del step
        out[...] = self._table.lookup(self._tf.constant(keys)).numpy()

    def apply(self, keys: np.ndarray, gradients: np.ndarray, step: int) -> None:
        """Write rows."""
        del step
        self._table.upsert(self._tf.constant(keys), self._tf.constant(gradients))

    def evict(self, step: int) -> int:
        """It has none by age."""
        del step
        return 0

    def stats(self) -> dict[str, int]:
        """Rows."""
        return {"rows": int(self._table.size()), "cold_rows": 0, "cold_bytes": 0, "evicted": 0}


def state(store: Store | Tfra, before: int) -> dict[str, Any]:
    """What the rows cost now."""
    found = store.stats()
    rows = found["rows"]
    return {
        "rows": rows,
        "cold_rows": found["cold_rows"],
        "memory_bytes_per_row": round((memory() - before) / rows, 1),
        "file_bytes_per_row": round(found["cold_bytes"] / max(1, found["cold_rows"]), 1),
        "evicted": found["evicted"],
    }


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--warm", type=int, default=4_000_000, help="rows in memory")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--peer", action="store_true", help="TFRA's table")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rest", type=int, default=0, help="steps (default: those of the fill)")
    parser.add_argument("--every", type=int, default=40)
    given = parser.parse_args()
    fills = -(-given.rows // FILL)
    dim = given.dim
    options = Options(
        dim,
        optimizer=RowWiseAdagrad(lr=0.02),
        eviction=Ttl(given.rest or fills),
        tier=SsdTier(str(given.folder), rows=given.warm),
    )
    if given.peer:
        Tfra(dim).lookup(np.zeros(1, np.int64), 0, np.empty((1, dim), np.float32))  # it imports
    before = memory()
    store: Store | Tfra = Tfra(dim) if given.peer else Store("growth", options)
    out = np.empty((FILL, dim), np.float32)
    gradients = np.full((FILL, dim), 0.01, np.float32)
    took = []
    busy = time.process_time()
    for step in range(fills):
        keys = scattered(np.arange(step * FILL, (step + 1) * FILL))
        began = time.perf_counter()
        store.lookup(keys, step, out=out)
        store.apply(keys, gradients, step)
        took.append(time.perf_counter() - began)
        if step % 50 == 49:
            print(f"{(step + 1) * FILL:,} rows, {FILL / took[-1] / 1e6:.2f} M/s", flush=True)
    filled = {
        "ids_per_s": round(FILL * fills / sum(took)),
        "processor_us_per_id": round(1e6 * (time.process_time() - busy) / (FILL * fills), 2),
        "worst_batch_ms": round(1e3 * max(took), 1),
        **state(store, before),
    }
    print(harness.show(["filled", ""], filled.items()), flush=True)
    random = np.random.default_rng(0)
    newest, looked, stepped, expired = fills * FILL, [], [], []
    new, ids, busy, read = int(BATCH * NEW), 0, 0.0, from_device()
    for step in range(fills, fills + given.steps):
        ages = newest ** random.random(BATCH - new)  # of exponent near 1: the newest most
        numbers = np.concatenate((np.arange(newest, newest + new), newest - ages.astype(np.int64)))
        newest += new
        keys = scattered(np.unique(numbers))
        ids += len(keys)
        began, before_step = time.perf_counter(), time.process_time()
        store.lookup(keys, step, out=out[: len(keys)])
        middle = time.perf_counter()
        store.apply(keys, gradients[: len(keys)], step)
        looked.append((middle - began) / len(keys))
        stepped.append((time.perf_counter() - began) / len(keys))
        busy += time.process_time() - before_step
        if (step - fills) % given.every == given.every - 1:
            began = time.perf_counter()
            gone = store.evict(step)
            expired.append((gone, time.perf_counter() - began))
    stream = {
        "lookups_per_s": round(1 / statistics.median(looked)),
        "steps_ids_per_s": round(1 / statistics.median(stepped)),
        "processor_us_per_id": round(1e6 * busy / ids, 2),
        "read_from_device_mb": round((from_device() - read) / 1e6, 1),
        "ids_per_step": round(ids / given.steps),
        "expired_rows": sum(gone for gone, _ in expired),
        "expiry_s": round(sum(seconds for _, seconds in expired), 2),
        **state(store, before),
    }
    print(harness.show(["stream", ""], stream.items()), flush=True)
    harness.keep(given, filled=filled, stream=stream)


if __name__ == "__main__":
    main()
