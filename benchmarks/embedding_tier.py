"""A second tier for cold rows: lookups and training steps beside the same table all in memory.

    python benchmarks/embedding_tier.py --json benchmarks/results/embedding-tier.json

Ids follow Zipf's law; `--share` of the rows fit in memory. Each round gives every table the same
batch in turn; a ratio is the median over batches of the time in memory by the time with the tier.
A step is a lookup, its gradients, and Adagrad. With `--device` the file's pages are dropped before
each batch, so that cold rows come from the device and not from the system's cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from evener.embedding import Adagrad, Options, SsdTier, Store, forget
from evener.tools.bench.embedding.command import draw

SPREAD = -7046029254386353131  # odd: a permutation of int64


def drop(folder: str) -> None:
    """Forget what the system keeps of files that this process has open in `folder`."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            if str(link.readlink()).startswith(folder):
                os.fsync(int(link.name))
                os.posix_fadvise(int(link.name), 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            continue


def main() -> None:
    """Fill, warm, measure."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=65_536)
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument("--share", type=float, default=0.2)
    parser.add_argument("--warm", type=int, default=40, help="steps before the first figure")
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--device", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    folder = str(Path(given.folder).resolve())
    tables: dict[str, Store] = {}
    for name, tier in (
        ("memory", None),
        ("tier", SsdTier(folder, int(given.rows * given.share))),
    ):
        forget(name)
        tables[name] = Store(name, Options(given.dim, optimizer=Adagrad(lr=0.01), tier=tier))
        for start in range(0, given.rows, 1 << 18):
            numbers = np.arange(start, min(given.rows, start + (1 << 18)))
            tables[name].lookup(numbers * SPREAD, 0)
    gradients = np.random.default_rng(2).normal(size=(given.batch, given.dim))
    gradients = (gradients * 1e-3).astype(np.float32)
    # One draw: the ranks of ids must be the same in all batches.
    drawn = draw(given.rows, given.batch, given.zipf, given.warm + 2 * given.batches)
    batches = [numbers * SPREAD for numbers in drawn]
    state = {"step": 0}

    def step(store: Store, keys: np.ndarray) -> None:
        store.lookup(keys, state["step"])
        store.apply(keys, gradients, state["step"])

    def timed(call: Callable[[Store, np.ndarray], Any], each: list[np.ndarray]) -> dict[str, Any]:
        took: dict[str, list[float]] = {name: [] for name in tables}
        for keys in each:
            state["step"] += 1
            for name, store in tables.items():
                if given.device:
                    drop(folder)
                began = time.perf_counter()
                call(store, keys)
                took[name].append(time.perf_counter() - began)
        ratios = [a / b for a, b in zip(took["memory"], took["tier"], strict=True)]
        return {
            "ms": {name: round(statistics.median(t) * 1e3, 3) for name, t in took.items()},
            "tier_speed_by_memory": round(statistics.median(ratios), 3),
        }

    timed(step, batches[: given.warm])
    before = tables["tier"].stats()
    found: dict[str, Any] = {
        "step": timed(step, batches[given.warm : given.warm + given.batches]),
    }
    after = tables["tier"].stats()
    found["cold_rows_per_step"] = (after["warmed"] - before["warmed"]) / given.batches
    found["lookup_infer"] = timed(
        lambda store, keys: store.lookup_infer(keys), batches[given.warm + given.batches :]
    )
    memory = tables["memory"].stats()
    found["bytes"] = {"memory": memory["bytes"], "tier": after["bytes"]}
    found["file_bytes"], found["cold_rows"] = after["cold_bytes"], after["cold_rows"]
    probe = np.arange(0, given.rows, 7) * SPREAD
    same = [table.lookup_infer(probe) for table in tables.values()]
    found["bytes_equal"] = bool(np.array_equal(*same))
    for name, value in found.items():
        print(f"{name:20} {value}", flush=True)
    if given.json:
        result: list[Any] = json.loads(given.json.read_text()) if given.json.exists() else []
        result.append(
            {
                "arguments": {n: v for n, v in vars(given).items() if n not in ("json", "folder")},
                "machine": {"cpus": len(os.sched_getaffinity(0)), "arch": platform.machine()},
                **found,
            }
        )
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
