"""Lookups of the store beside static tables and hash tables, in turns, in one process.

    python benchmarks/embedding_store.py --json benchmarks/results/embedding-store.json

For each row count, dim and skew: batches of 65,536 ids through every peer that is installed, one
batch each in turn, so that what else runs on the machine meets all of them. Ids are given as each
peer wants them (numpy, torch, TensorFlow), outside of the time; outputs are allocated inside. A
ratio is the median over batches of a peer's time by Evener's. While the store is filled, each
insert of 131,072 keys is timed, and bytes per row are those that the store counts.

DenseHashTable takes up to 284 bytes per row: it is left out above 4M rows.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import harness
import numpy as np
import torch

from evener.embedding import Options, Sgd, Store, forget
from evener.tools.bench.embedding.command import draw

BATCH, INSERT, BATCHES, ROUNDS, HASH_ROWS = 65_536, 131_072, 16, 5, 4_000_000
SPREAD = -7046029254386353131  # odd: a permutation of int64

Lookup = Callable[[Any], Any]


def keys_of(numbers: np.ndarray) -> np.ndarray:
    """A key for each number of a row."""
    return numbers * SPREAD


def fill(rows: int, dim: int) -> tuple[Store, dict[str, float]]:
    """A store without slots that holds all rows; how its inserts went."""
    forget("store")
    store = Store("store", Options(dim, optimizer=Sgd()))
    out, took = np.empty((INSERT, dim), np.float32), []
    for start in range(0, rows, INSERT):
        keys = keys_of(np.arange(start, min(rows, start + INSERT)))
        began = time.perf_counter()
        store.lookup(keys, 0, out=out[: len(keys)])
        took.append((time.perf_counter() - began) * 1e3)
    stats = store.stats()
    return store, {
        "bytes_per_row": stats["bytes"] / rows,
        "insert_ms_median": statistics.median(took),
        "insert_ms_worst": max(took),
    }


def with_torch(rows: int, dim: int) -> dict[str, Lookup]:
    table = torch.randn(rows, dim)
    bag = torch.nn.EmbeddingBag.from_pretrained(table, mode="sum")
    starts = torch.arange(BATCH)
    return {
        "torch.index_select": lambda ids: torch.index_select(table, 0, ids),
        "nn.EmbeddingBag": lambda ids: bag(ids, starts),
    }


def with_fbgemm(rows: int, dim: int) -> Lookup:
    """The table that torchrec uses on the CPU."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation  # optional
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)]
    )
    ends = torch.arange(BATCH + 1)
    return lambda ids: table(ids, ends)


def with_tensorflow(rows: int, dim: int, hashes: bool) -> dict[str, Lookup]:
    import tensorflow as tf  # optional

    table = tf.random.normal((rows, dim))
    found: dict[str, Lookup] = {"tf.gather": lambda ids: tf.gather(table, ids)}
    if hashes:
        dense = tf.lookup.experimental.DenseHashTable(
            tf.int64, tf.float32, tf.zeros(dim), empty_key=2**62 + 1, deleted_key=2**62 + 3
        )
        for start in range(0, rows, 1 << 18):
            numbers = np.arange(start, min(rows, start + (1 << 18)))
            dense.insert(keys_of(numbers), table[start : start + len(numbers)])
        found["DenseHashTable"] = dense.lookup
    return found


def with_tfra(rows: int, dim: int) -> Lookup:
    import tensorflow as tf  # optional
    import tensorflow_recommenders_addons.dynamic_embedding as tfra

    table = tfra.get_variable(f"tfra-{rows}-{dim}", dim=dim, init_size=rows)
    for start in range(0, rows, 1 << 18):
        numbers = np.arange(start, min(rows, start + (1 << 18)))
        table.upsert(tf.constant(keys_of(numbers)), tf.random.normal((len(numbers), dim)))
    return table.lookup


def measure(
    rows: int, dim: int, zipf: float, peers: dict[str, tuple[Lookup, str]]
) -> dict[str, Any]:
    numbers = draw(rows, BATCH, zipf, BATCHES)
    forms: dict[str, list[Any]] = {"keys": [keys_of(n) for n in numbers]}
    forms["rows"] = [torch.from_numpy(n) for n in numbers]
    if any(form.startswith("tf") for _, form in peers.values()):
        import tensorflow as tf  # optional

        forms["tf rows"] = [tf.constant(n) for n in numbers]
        forms["tf keys"] = [tf.constant(n) for n in forms["keys"]]
    took: dict[str, list[float]] = {name: [] for name in peers}
    for number in range(ROUNDS + 1):
        for at in range(BATCHES):
            for name, (lookup, form) in peers.items():
                ids = forms[form][at]
                began = time.perf_counter()
                lookup(ids)
                if number:  # the first round warms
                    took[name].append(time.perf_counter() - began)
    own = took["evener"]
    return {
        "rows": rows,
        "dim": dim,
        "zipf": zipf,
        "million_keys_per_s": {
            name: round(BATCH / statistics.median(each) / 1e6, 2) for name, each in took.items()
        },
        "evener_by_peer": {name: round(harness.ratio(each, own), 3) for name, each in took.items()},
    }


def main() -> None:
    """All sizes and skews."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["4000000x16", "16000000x32"])
    parser.add_argument("--zipf", nargs="+", type=float, default=[0.0, 1.05])
    parser.add_argument("--grow", default="", help="as 8000000x16: only inserts are timed")
    parser.add_argument("--add", action="store_true", help="add to the JSON that is there")
    given = parser.parse_args()
    torch.set_grad_enabled(False)
    result: dict[str, Any] = {"fills": [], "lookups": []}
    if given.add and given.json and given.json.exists():
        before = json.loads(given.json.read_text(encoding="utf-8"))
        result = {key: before[key] for key in ("fills", "lookups", "grown") if key in before}
    if given.grow:
        rows, dim = (int(part) for part in given.grow.split("x"))
        _, grown = fill(rows, dim)
        result["grown"] = {"rows": rows, "dim": dim, **grown}
        print("grown", given.grow, {name: round(value, 1) for name, value in grown.items()})
    for size in given.sizes:
        rows, dim = (int(part) for part in size.split("x"))
        store, filled = fill(rows, dim)
        result["fills"].append({"rows": rows, "dim": dim, **filled})
        print(size, {name: round(value, 1) for name, value in filled.items()}, flush=True)
        peers: dict[str, tuple[Lookup, str]] = {"evener": (store.lookup_infer, "keys")}
        peers |= {name: (lookup, "rows") for name, lookup in with_torch(rows, dim).items()}
        for name, form, make in (("fbgemm", "rows", with_fbgemm), ("TFRA", "tf keys", with_tfra)):
            try:
                peers[name] = (make(rows, dim), form)
            except ImportError as error:
                print(f"left out: {name}: {error}")
        try:
            made = with_tensorflow(rows, dim, rows <= HASH_ROWS)
            for name, lookup in made.items():
                peers[name] = (lookup, "tf rows" if name == "tf.gather" else "tf keys")
        except ImportError:
            print("left out: TensorFlow is not installed")
        for zipf in given.zipf:
            found = measure(rows, dim, zipf, peers)
            result["lookups"].append(found)
            for name, rate in found["million_keys_per_s"].items():
                ratio = found["evener_by_peer"][name]
                print(f"  zipf {zipf:4}  {name:20}{rate:7.1f} M keys/s  evener {ratio:5.2f} x")
        del peers, store
        what = f"lookups of {BATCH} ids; evener_by_peer: the peer's time by Evener's, median"
        packages = ["tensorflow", "numpy", "fbgemm-gpu"]
        harness.keep(given, packages, what=what, **result)


if __name__ == "__main__":
    main()
