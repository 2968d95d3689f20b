"""What rows cost on this machine, read from small stores: bytes, lookups and steps per second."""

from __future__ import annotations

import functools
import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evener.embedding import files
from evener.embedding.options import Options, Sgd, SsdTier
from evener.embedding.store import Store, forget

SHARDS = Options(1).shards
_ROWS = 1 << 18  # of a store whose index is read
_BEYOND = 128 << 20  # bytes of a store whose speed is read: more than the CPU's cache
_BATCH, _CACHED = 16_384, 256  # rows
_NUMBERS = itertools.count()


@contextmanager
def _store(options: Options) -> Iterator[Store]:
    name = f"evener-measure-{next(_NUMBERS)}"
    try:
        yield Store(name, options)
    finally:
        forget(name)


@dataclass(frozen=True)
class Row:
    """Bytes of a row: in memory, in the file of an SSD tier, and that tier's buffers per shard."""

    host: float
    file: int
    buffer: float


@functools.cache
def row(options: Options) -> Row:
    """Measure what one row takes in a store with these options, without the index and gaps."""
    with tempfile.TemporaryDirectory() as folder:
        # One shard that keeps few rows: others go to its file.
        tier = SsdTier(folder, rows=1)
        small = Options(options.dim, options.dtype, 1, options.optimizer, tier=tier)
        few = max(1, min(256, (1 << 18) // options.dim))
        with _store(small) as store:
            for keys in np.arange(16 * few).reshape(16, few):
                store.lookup(keys, 1)
            found = store.stats()
            store.save(Path(folder) / "rows.evs")
            record = files.header(Path(folder) / "rows.evs")["record"]
    taken = found["rows"] - found["cold_rows"] + found["free_rows"]
    return Row(found["row_bytes"] / taken, record, found["cold_buffer_bytes"])


@functools.cache
def index(rows: int) -> tuple[float, float]:
    """Measure a store of `rows` rows: how many places for rows are free, and the index's bytes.

    Both grow in steps, shard by shard, and are the same for rows of any width: read from one of
    narrow rows, with fewer shards where that leaves as many rows in each.
    """
    shards = SHARDS
    while shards > 8 and rows * shards > SHARDS * _ROWS:
        shards //= 2
    held = min(rows * shards // SHARDS, _ROWS) or 1
    with _store(Options(1, optimizer=Sgd(), shards=shards)) as store:
        store.lookup(np.arange(held), 1)
        found = store.stats()
    return found["free_rows"] * SHARDS / shards, found["index_bytes"] * rows / held


@functools.cache
def cached(options: Options) -> float:
    """Bytes of device memory that a row of a GPU cache keeps. Imports torch.

    Raises UsageError for an optimizer that the cache does not step.
    """
    import torch

    from evener.embedding.torch.cache import CachedRows

    with _store(options) as store:
        rows = CachedRows(store, torch.device("cpu"), _CACHED)
        rows.read(torch.arange(_CACHED), 1)
        tensors = [each for each in vars(rows).values() if isinstance(each, torch.Tensor)]
        return sum(each.numel() * each.element_size() for each in tensors) / _CACHED


@functools.cache
def speed(options: Options) -> tuple[float, float]:
    """Rows per second that a store looks up, and that it steps, with all threads of this process.

    Keys are different ones of a store beyond the CPU's cache; the best of eight batches.
    """
    rows = 1 + int(_BEYOND / row(options).host)
    with _store(options) as store:
        keys = np.random.default_rng(0).permutation(rows)
        for start in range(0, rows, 1 << 16):
            store.lookup(keys[start : start + (1 << 16)], 1)
        gradients = np.full((min(_BATCH, rows), options.dim), 1e-3, np.float32)
        looked, stepped = [], []
        for number in range(2, 10):
            batch = keys[np.random.default_rng(number).permutation(rows)[: len(gradients)]]
            began = time.perf_counter()
            store.lookup(batch, number)
            middle = time.perf_counter()
            store.apply(batch, gradients, number)
            looked.append(middle - began)
            stepped.append(time.perf_counter() - middle)
    return len(gradients) / min(looked), len(gradients) / min(stepped)
