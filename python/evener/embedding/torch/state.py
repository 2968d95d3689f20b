"""A table's rows as part of a module's `state_dict()`: a snapshot of the store, per rank."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from evener.embedding import Options, Store, forget
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


def fits(table: Table, options: dict[str, Any], where: str) -> None:
    """Refuse rows that mean something else here."""
    mine, theirs = table.options, options
    for field in ("dim", "dtype", "keys"):
        if mine[field] != theirs[field]:
            raise UsageError(
                f"{where} has {field}={theirs[field]!r}, and embedding {table.name!r} has "
                f"{field}={mine[field]!r}",
                "make the module with the options that it was saved with",
            )
    if mine["optimizer"]["kind"] != theirs["optimizer"]["kind"]:
        raise UsageError(
            f"{where} has slots of {theirs['optimizer']['kind']}, and embedding {table.name!r} "
            f"steps {mine['optimizer']['kind']}",
            "make the module with the optimizer that it was saved with",
        )


def set_state(table: Table, found: dict[str, Any]) -> None:
    """The other way. Raises UsageError, which says what does not fit, with nothing changed."""
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise UsageError(
            f"the state of embedding {table.name!r} is of another version of Evener",
            "load it with the version that saved it, and save it to a folder",
        )
    where = f"the state of embedding {table.name!r}"
    fits(table, json.loads(found["options"]), where)
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
    place, now = shape(table)
    table.rows.forget()
    store = table._store
    if len(parts) == now:
        _read(store, parts[place])
        table.rows.reload()
        return

    # The first part brings the count of steps with it, which is the same on all ranks.
    _read(store, parts[0])
    _keep_own(table, store)
    for each in parts[1:]:
        with _aside(table, each) as other:
            for chunk in other.export_rows():
                store.put_rows(*chunk)
            store.set_counts(*other.counts())
            store.raise_counters(other.counters())
    table.rows.reload()


def own_rows(table: Table, rows: bytes | torch.Tensor) -> bytes:
    """What this rank owns of the rows that another wrote: a snapshot again."""
    with _aside(table, _bytes(rows)) as other:
        return other.save_bytes()


@contextmanager
def _aside(table: Table, part: Path | bytes) -> Iterator[Store]:
    """A store with those rows and counts of `part` that this rank owns."""
    options = Options.from_dict({**table.options, "tier": None})
    store = Store(f"part-{uuid.uuid4().hex}", options)
    try:
        _read(store, part)
        _keep_own(table, store)
        yield store
    finally:
        forget(store.name)


def _keep_own(table: Table, store: Store) -> None:
    """Take away what another rank owns."""
    sharded = table.sharded
    if sharded is None:
        return

    def other(keys: Any) -> Any:
        return (sharded.owner(torch.from_numpy(keys.copy())) != sharded.place).numpy()

    for chunk in list(store.export_rows()):
        store.remove(chunk.keys[other(chunk.keys)])
    keys, counts = store.counts()
    store.set_counts(keys, np.where(other(keys), 0, counts))


def _read(store: Store, part: Path | bytes) -> None:
    if isinstance(part, Path):
        store.restore(part)
    else:
        store.restore_bytes(part)
