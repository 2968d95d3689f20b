"""Tables of a model in a folder, from any number of ranks to any other: see `folders`."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist
from torch import nn

from evener.base.given import given
from evener.embedding import folders
from evener.embedding.parts import fits
from evener.embedding.torch.optimizer import tables
from evener.embedding.torch.state import held, restore, shape
from evener.embedding.torch.table import Table
from evener.errors import UsageError


@given
def save(model: nn.Module, folder: str | os.PathLike[str], keep: int = 2) -> Path:
    """Write the embeddings of `model` below `folder`; the path of what was written. Collective.

    The rest of the model is in its `state_dict()`. A checkpoint is whole or not there; of those in
    `folder` the `keep` that were saved last stay. The deltas of `store.delta()` go on as they were.
    Raises UsageError where the model has no embedding, and where ranks would overwrite each
    other's: tables of `shard=False` want a folder for each rank.
    """
    found = tables(model)
    if not found:
        raise UsageError("the model has no embedding", "save its state_dict()")
    if dist.is_initialized() and dist.get_world_size() > 1:
        _alone(found, Path(folder))
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


def _alone(found: list[Table], folder: Path) -> None:
    """Refuse a folder in which the tables of several ranks would have one name."""
    whole = [table.name for table in found if shape(table)[1] == 1]
    if not whole:
        return
    fix = "save it into a folder for each rank, or make it with shard=True"
    if len(whole) < len(found):
        raise UsageError(
            f"embedding {whole[0]!r} is another one on each rank, and others are spread over them",
            fix,
        )
    # Each leaves its mark first and looks then: of two at the same time at least one sees it.
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f"of-rank-{dist.get_rank()}"
    mine.touch()
    for other in folder.glob("of-rank-*"):
        if other != mine:
            mine.unlink(missing_ok=True)
            raise UsageError(
                f"embedding {whole[0]!r} is another one on each rank, and rank "
                f"{other.name.rpartition('-')[2]} saves its own to {folder}",
                fix,
            )
