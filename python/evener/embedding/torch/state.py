"""A table's rows as part of a module's `state_dict()`: a snapshot of the store, per rank."""

from __future__ import annotations

import json
import threading
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from evener.embedding import Options, Store, forget
from evener.errors import UsageError

if TYPE_CHECKING:
    from evener.embedding.torch.table import Table

FORMAT = 1


def shape(table: Table) -> tuple[int, int]:
    sharded = table.sharded
    return (0, 1) if sharded is None else (sharded.place, sharded.size)


def state(table: Table, rows: bool) -> dict[str, Any]:
    """Plain values and tensors only, so that `torch.load(weights_only=True)` takes it."""
    place, size = shape(table)
    found: dict[str, Any] = {
        "format": FORMAT,
        "options": json.dumps(table.options),
        "place": place,
        "size": size,
        "step": table.step,
        "snapshot": None,
    }
    if rows:
        found["snapshot"] = RankRows(table)
    return found


class RankRows(bytes):
    """A rank's rows in a `state_dict()`: a snapshot file. `torch.save` writes a uint8 tensor of it.

    torch.distributed.checkpoint keeps one rank's value of a name. So what it writes is the rows of
    all ranks, which makes any rank's value right, and any number of ranks may read it.
    """

    _table: Table
    _all: list[bytes] | None

    def __new__(cls, table: Table) -> RankRows:
        made = super().__new__(cls, table.store.save_bytes())
        made._table, made._all, made._thread = table, None, threading.get_ident()
        return made

    _thread: int

    def __create_write_items__(self, name: str, value: Any) -> list[Any]:
        """What torch.distributed.checkpoint asks all ranks for, in one order: collective."""
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

        table, sharded = self._table, self._table.sharded
        if sharded is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise UsageError(
                f"rows of embedding {table.name!r} are of this rank alone, and "
                "torch.distributed.checkpoint keeps those of one rank",
                "make it with in_state_dict=False, and let each rank save module.store itself",
            )
        if sharded is not None:
            if threading.get_ident() != self._thread:
                raise UsageError(
                    f"embedding {table.name!r} cannot be saved by another thread: its ranks meet "
                    "in the one that trains",
                    "use torch.distributed.checkpoint.save, or in_state_dict=False and "
                    "evener.embedding.torch.save",
                )
            self._all = sharded.gather(bytes(self))
        return [WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)]

    def __deepcopy__(self, memo: Any) -> RankRows:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._all is None:
            return _tensor(self).__reduce_ex__(protocol)
        size = len(self._all)
        parts = [(f"{place}-of-{size}", _tensor(data)) for place, data in enumerate(self._all)]
        return OrderedDict, (parts,)


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
    place, size = shape(table)
    snapshot = found["snapshot"]
    if snapshot is None:
        return
    if isinstance(snapshot, dict):  # of all ranks: from torch.distributed.checkpoint
        parts = [_bytes(snapshot[f"{each}-of-{len(snapshot)}"]) for each in range(len(snapshot))]
        restore(table, parts)
    elif (found["place"], found["size"]) != (place, size):
        raise UsageError(
            f"{where} is of rank {found['place']} of {found['size']}, and this is rank {place} of "
            f"{size}",
            "use evener.embedding.torch.save and load: they take any number of ranks",
        )
    else:
        table.rows.forget()
        table._store.restore_bytes(_bytes(snapshot))
        table.rows.reload()
    table.discard()
    table.step = int(found["step"])


def restore(table: Table, parts: Sequence[Path | bytes]) -> None:
    """Rows and counts of admission, which lie in a part for each rank that saved."""
    place, now = shape(table)
    table.rows.forget()
    store, sharded = table._store, table.sharded
    if len(parts) == now:
        _read(store, parts[place])
        table.rows.reload()
        return

    def mine(keys: Any) -> Any:
        if sharded is None:
            return np.ones(len(keys), bool)
        return (sharded.owner(torch.from_numpy(keys.copy())) == sharded.place).numpy()

    # The first part brings the count of steps with it, which is the same on all ranks.
    _read(store, parts[0])
    for chunk in list(store.export_rows()):
        store.remove(chunk.keys[~mine(chunk.keys)])
    keys, counts = store.counts()
    store.set_counts(keys, np.where(mine(keys), counts, 0))
    for part in parts[1:]:
        options = Options.from_dict({**table.options, "tier": None})
        other = Store(f"part-{uuid.uuid4().hex}", options)
        try:
            _read(other, part)
            for chunk in other.export_rows():
                at = mine(chunk.keys)
                store.put_rows(*(column[at] for column in chunk))
            keys, counts = other.counts()
            at = mine(keys)
            store.set_counts(keys[at], counts[at])
            store.raise_counters(other.counters())
        finally:
            forget(other.name)
    table.rows.reload()


def _read(store: Store, part: Path | bytes) -> None:
    if isinstance(part, Path):
        store.restore(part)
    else:
        store.restore_bytes(part)
