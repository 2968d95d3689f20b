"""What was once wrong with embeddings, put back."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from evener.embedding import (
    Adagrad,
    Adam,
    LazyAdam,
    Options,
    RowWiseAdagrad,
    Store,
    folders,
    parts,
)
from evener.embedding import store as store_module
from evener.embedding.torch import (
    dcp,
    inputs,
)
from evener.embedding.torch import state as table_state
from evener.embedding.torch.lookups import _Backward, _Pass
from evener.embedding.torch.modules import DynamicEmbeddingBag as Bag
from evener.embedding.torch.table import Table
from tests.twins._embedding_reference import DIM

_NUMBERS = itertools.count()


def _options(of: type, **options: Any) -> Any:
    """Options of a kind of optimizer are others than the program says."""
    plain = of.to_dict

    def to_dict(self: Any) -> dict[str, Any]:
        return {**plain(self), **options}

    return mock.patch.object(of, "to_dict", to_dict)


def _old_pass() -> Any:
    """What a pass touched stays where it ended with an error, and no later one ends."""
    left: list[_Pass] = []

    def current(_self: _Backward) -> _Pass:
        if not left:
            left.append(_Pass())
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(lambda: left.pop().end())
        return left[0]

    return mock.patch.object(_Backward, "current", current)


@contextlib.contextmanager
def _one_chain() -> Iterator[None]:
    """A checkpoint is the store's last file, and a delta follows that file alone."""
    last: dict[str, Path] = {}

    def writes(call: Any, place: Any) -> Any:
        def write(self: Store, path: Path) -> Any:
            folder = place(Path(path))
            if call is delta and last.get(self.name, folder) != folder:
                raise ValueError(f"the last file of {self.name} is not in {folder}")
            last[self.name] = folder
            return call(self, path)

        return write

    delta = Store.delta
    with (
        mock.patch.object(Store, "save", writes(Store.save, lambda path: path.parent)),
        mock.patch.object(Store, "snapshot", writes(Store.snapshot, lambda path: path)),
        mock.patch.object(Store, "delta", writes(delta, lambda path: path)),
    ):
        yield


def _own_counts() -> Any:
    """Keys that this store has not counted itself are not counted when other ranks' come."""
    plain = Store.set_counts

    def set_counts(self: Store, keys: Any, counts: Any) -> None:
        at = np.isin(keys, self.counts()[0])
        plain(self, keys[at], counts[at])

    return mock.patch.object(Store, "set_counts", set_counts)


def _old_pool(self: Any, values: torch.Tensor, inverse: Any, of: Any) -> torch.Tensor:
    if inverse is None and of.length:
        rows = values.view(of.count, of.length, -1)
        return rows.sum(1) if self.mode == "sum" else rows.mean(1)
    return _POOL(self, values, inverse, of)


def _dividing(given: Any, features: int) -> None:
    """Bags that divide by the number of features are as many of each."""
    if (given.offsets().numel() - 1) % features:
        _ONE_BATCH(given, features)


def _old_output(out: Any, shape: Any, dtype: Any, _what: str) -> Any:
    return np.empty(shape, dtype) if out is None else np.asarray(out)


def _by_step(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob(f"step-*/{folders.MANIFEST}"))


def _values_alone(table: Table, rows: Any) -> bytes:
    """What another rank wrote, without slots."""
    with parts.aside(table_state.held(table), table_state._bytes(rows)) as other:
        for chunk in list(other.export_rows()):
            values = chunk.values.copy()
            values[:, DIM:] = 0
            other.put_rows(chunk.keys, values, chunk.frequencies, chunk.versions)
        return other.save_bytes()


def _own_table(cls: Any, options: Options, name: str | None, **how: Any) -> Table:
    return Table(next(_NUMBERS), Store(name or f"own-{next(_NUMBERS)}", options), **how)


_POOL, _ONE_BATCH = Bag._pool, inputs._one_batch
FAULTS: dict[str, Any] = {
    "checkpoints are in the order of their steps": lambda: mock.patch.object(
        folders, "_whole", _by_step
    ),
    "checkpoints are in the chain of deltas": _one_chain,
    "torch.distributed.checkpoint keeps one rank's rows": lambda: mock.patch.object(
        table_state, "part", lambda *_: "0-of-1"
    ),
    "slots do not go to other ranks": lambda: mock.patch.object(dcp, "own_rows", _values_alone),
    "rows of other owners stay": lambda: mock.patch.object(parts, "keep_own", lambda *_: None),
    "a failed backward pass stays": _old_pass,
    "modules of one name step each": lambda: mock.patch.object(
        Table, "named", classmethod(_own_table)
    ),
    "LazyAdam adds epsilon after the correction": lambda: _options(
        LazyAdam, kind="adam_w", weight_decay=0.0
    ),
    "Adagrad has no weight decay": lambda: _options(Adagrad, weight_decay=0.0),
    "Adam has no weight decay": lambda: _options(Adam, weight_decay=0.0),
    "row-wise Adagrad always decays decoupled": lambda: _options(RowWiseAdagrad, decoupled=True),
    "batches without rows fail": lambda: mock.patch.object(Bag, "_pool", _old_pool),
    "features with batches of their own are pooled": lambda: mock.patch.object(
        inputs, "_one_batch", _dividing
    ),
    "read-only memory is written": lambda: mock.patch.object(store_module, "_output", _old_output),
    "counts are lost on other ranks": _own_counts,
}
# What once raised, and is right.
ENDS = {
    "checkpoints are in the chain of deltas": "ValueError: the last file of",
    "batches without rows fail": "RuntimeError: cannot reshape tensor of 0 elements",
}
