"""A table's rows as part of a module's `state_dict()`: a snapshot of the store, per rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from evener.embedding import parts as table_parts
from evener.embedding.parts import Held, fits
from evener.errors import UsageError

if TYPE_CHECKING:
    from evener.embedding.torch.table import Table

FORMAT = 2


def shape(table: Table) -> tuple[int, int]:
    sharded = table.sharded
    return (0, 1) if sharded is None else (sharded.place, sharded.size)


def part(place: int, size: int) -> str:
    """The name of a rank's rows."""
    return f"{place}-of-{size}"


def state(table: Table, rows: bool) -> dict[str, Any]:
    """Plain values and tensors only, so that `torch.load(weights_only=True)` takes it."""
    return {
        "format": FORMAT,
        "options": json.dumps(table.options),
        "step": table.step,
        "snapshot": {part(*shape(table)): RankRows(table)} if rows else None,
    }


class RankRows(bytes):
    """A rank's rows in a `state_dict()`: a snapshot file. `torch.save` writes a uint8 tensor of it.

    Their name in the state is that of the rank. So torch.distributed.checkpoint has each rank write
    its own, and the ranks need not meet for it: `async_save` works too.
    """

    table: Table
    step: int

    def __new__(cls, table: Table) -> RankRows:
        made = super().__new__(cls, table.store.save_bytes())
        made.table, made.step = table, table.step
        return made

    def __create_write_items__(self, name: str, value: Any) -> list[Any]:
        """What torch.distributed.checkpoint asks each rank for."""
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

        _, size = shape(self.table)
        world = dist.get_world_size() if dist.is_initialized() else size
        if size != world:
            raise UsageError(
                f"embedding {self.table.name!r} lies on {size} of {world} ranks, and "
                "torch.distributed.checkpoint would keep one of the tables of this name",
                "make it with in_state_dict=False, and let each rank save module.store itself",
            )
        return [WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)]

    def __deepcopy__(self, memo: Any) -> RankRows:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _tensor(self).__reduce_ex__(protocol)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(data: bytes | torch.Tensor) -> bytes:
    return data.cpu().numpy().tobytes() if isinstance(data, torch.Tensor) else bytes(data)


def held(table: Table) -> Held:
    """What this rank holds of a table, up to date."""
    sharded = table.sharded

    def owner(keys: np.ndarray) -> np.ndarray:
        assert sharded is not None
        found: np.ndarray = sharded.owner(torch.from_numpy(keys.copy())).numpy()
        return found

    def largest(number: int) -> int:
        return number if sharded is None else int(sharded.ranks.largest([float(number)])[0])

    place, size = shape(table)
    return Held(table.name, table.options, table.step, table.store, place, size, owner, largest)


def set_state(table: Table, found: dict[str, Any]) -> None:
    """The other way. Raises UsageError, which says what does not fit, with nothing changed."""
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UsageError(
            f"the state of embedding {table.name!r} is of another version of Evener",
            "load it with the version that saved it, and save it to a folder",
        )
    where = f"the state of embedding {table.name!r}"
    fits(table.name, table.options, json.loads(found["options"]), where)
    snapshot = found["snapshot"]
    if snapshot is None:
        return
    own = part(*shape(table))
    rows = snapshot.get(own)
    stale = isinstance(rows, RankRows) and rows.step != found["step"]  # allow_partial_load=True
    if rows is None or stale:
        raise UsageError(
            f"{where} has no rows of rank {own}",
            "use evener.embedding.torch.save and load, which take any number of ranks; of "
            "torch.distributed.checkpoint, load with planner=TableLoadPlanner()",
        )
    if isinstance(rows, dict):  # of another number of ranks: from TableLoadPlanner
        names = [part(place, len(rows)) for place in range(len(rows))]
        if not rows or set(names) != set(rows):
            raise UsageError(
                f"{where} has the rows of rank {', '.join(rows) or 'none'} alone",
                "load it again: the checkpoint was not read to its end",
            )
        restore(table, [rows[name] for name in names])
    else:
        table.rows.forget()
        table._store.restore_bytes(_bytes(rows))
        table.rows.reload()
    table.discard()
    table.step = int(found["step"])


def restore(table: Table, parts: Sequence[Path | bytes]) -> None:
    """Rows and counts of admission, which lie in a part for each rank that saved."""
    of = held(table)
    table.rows.forget()
    table_parts.restore(of, parts)
    table.rows.reload()


def own_rows(table: Table, part: bytes | torch.Tensor) -> bytes:
    """What this rank owns of the rows that another wrote: a snapshot again."""
    with table_parts.aside(held(table), _bytes(part)) as other:
        return other.save_bytes()
