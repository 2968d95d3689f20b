"""Tables of a model in a folder, from any number of ranks to any other: see `folders`."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from evener.base.given import given
from evener.embedding import folders
from evener.embedding.parts import fits
from evener.embedding.torch.optimizer import tables
from evener.embedding.torch.state import held, restore
from evener.errors import UsageError


@given
def save(model: nn.Module, folder: str | os.PathLike[str], keep: int = 2) -> Path:
    """Write the embeddings of `model` below `folder`; the path of what was written. Collective.

    The rest of the model is in its `state_dict()`. A checkpoint is whole or not there; of those in
    `folder` the `keep` that were saved last stay. The deltas of `store.delta()` go on as they were.
    Raises UsageError where the model has no embedding.
    """
    found = tables(model)
    if not found:
        raise UsageError("the model has no embedding", "save its state_dict()")
    return folders.save([held(table) for table in found], folder, keep)


@given
def load(model: nn.Module, folder: str | os.PathLike[str]) -> int:
    """Read what `save` wrote, the last whole checkpoint below `folder`; its step. Collective.

    The number of ranks may be another. Raises UsageError where there is none, or it does not fit.
    """
    found = tables(model)
    source, there = folders.find([table.name for table in found], folder)
    for table in found:
        fits(table.name, table.options, there[table.name]["options"], str(source))
    for table in found:
        entry = there[table.name]
        restore(table, folders.parts(source, table.name, int(entry["size"])))
        table.discard()
        table.step = int(entry["step"])
    for each in map(held, found):
        if each.size > 1:
            each.largest(0)  # all ranks come here
            break
    return max(table.step for table in found) - 1
