"""A model whose tables are spread over ranks, in a folder: see `evener.embedding.folders`.

Each rank writes the rows that it owns; the first writes what all ranks have alike: dense weights,
the optimizer's variables, and tables that lie whole on every rank. Another number of ranks may read
it, one process too, and so may `evener.embedding.torch` (the tables).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from evener.base.given import given
from evener.embedding import folders, parts
from evener.embedding.parts import Held
from evener.embedding.tensorflow._sharded import Ranks
from evener.embedding.tensorflow._variable import DynamicVariable, table_of
from evener.errors import UsageError

_DENSE = "dense.npz"


@given
def save(model: Any, folder: str | os.PathLike[str], keep: int = 2) -> Path:
    """Write `model` below `folder`; the path of what was written. Collective.

    `model`: of Keras, compiled or not, or a list of dynamic variables. A checkpoint is whole or not
    there; of those in `folder` the `keep` that were saved last stay. Raises UsageError where no
    table is spread over ranks: then `model.save()` holds all.
    """
    tables = _tables(model)
    ranks = _ranks(tables)
    held = [_held(table) for table in tables if table.ranks is not None or ranks.rank == 0]

    def beside(target: Path) -> None:
        np.savez(target / _DENSE, *[np.asarray(variable) for variable in _dense(model)])

    return folders.save(held, folder, keep, beside)


@given
def load(model: Any, folder: str | os.PathLike[str]) -> int:
    """Read what `save` wrote, the last whole checkpoint below `folder`; its step. Collective.

    The number of ranks may be another. `model` must be built, and compiled where the optimizer's
    variables are to come back. Raises UsageError where there is none, or it does not fit.
    """
    tables = _tables(model)
    ranks = _ranks(tables)
    source, there = folders.find([table.name for table in tables], folder)
    for table in tables:
        part, saved = table.parts[0], there[table.name]["options"]
        if part.store.stats()["steps"] == 0 and not table.fixed_optimizer:
            part.use_optimizer(saved["optimizer"])
        parts.fits(table.name, part.store.options.to_dict(), saved, str(source))
    dense = _dense(model)
    with np.load(source / _DENSE) as values:
        found = [values[f"arr_{i}"] for i in range(len(values.files))]
    if [v.shape for v in found] != [tuple(v.shape) for v in dense]:
        raise UsageError(
            f"{source} has {len(found)} dense variables of other shapes than these {len(dense)}",
            "build and compile the model as it was when it was saved",
        )
    for table in tables:
        files = folders.parts(source, table.name, int(there[table.name]["size"]))
        parts.restore(_held(table), files)
    for variable, value in zip(dense, found, strict=True):
        variable.assign(value)
    if ranks.size > 1:
        ranks.largest(0)  # all ranks come here
    return max(int(there[table.name]["step"]) for table in tables) - 1


def _tables(model: Any) -> list[DynamicVariable]:
    variables = model if isinstance(model, Iterable) else model.weights
    found = [each if isinstance(each, DynamicVariable) else table_of(each) for each in variables]
    tables = list({id(table): table for table in found if table is not None}.values())
    if split := [table.name for table in tables if len(table.parts) > 1]:
        raise UsageError(
            f"embedding {split[0]!r} lies on several devices", "use save_to_file_system of it"
        )
    return tables


def _ranks(tables: list[DynamicVariable]) -> Ranks:
    for table in tables:
        if table.ranks is not None:
            return table.ranks
    raise UsageError(
        "no embedding of the model is spread over ranks",
        "save it with model.save(), or make its embeddings with shard=True",
    )


def _dense(model: Any) -> list[Any]:
    """What all ranks have alike: weights but for tables, and the optimizer's variables."""
    if isinstance(model, Iterable):
        return []
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    weights = [variable for variable in model.weights if table_of(variable) is None]
    return [*weights, *(optimizer.variables if optimizer is not None else [])]


def _held(table: DynamicVariable) -> Held:
    store, ranks = table.parts[0].store, table.ranks or Ranks(0, 1)
    done = store.stats()
    step = int(done["step"]) + 1 if done["steps"] else 0
    options = store.options.to_dict()
    return Held(
        table.name, options, step, store, ranks.rank, ranks.size, ranks.owner, ranks.largest
    )
