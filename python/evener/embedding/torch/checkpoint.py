"""A table's rows as part of `state_dict()`, or in a folder, by the store's snapshot.

A folder is for tables that are large, and for jobs that come back with another number of ranks:

    FOLDER/step-000000000420/manifest.json      written last: what has none is not there
    FOLDER/step-000000000420/NAME/0-of-2/       a snapshot of the rows of one rank

The manifest says which save it was. The last one counts, and not the one of the largest step: a
program may go back to an older checkpoint and on from there.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import torch
import torch.distributed as dist

from evener.embedding import Options, Store, forget
from evener.errors import UsageError

if TYPE_CHECKING:
    from torch import nn

    from evener.embedding.torch.table import Table

FORMAT = 1
MANIFEST = "manifest.json"


def _shape(table: Table) -> tuple[int, int]:
    sharded = table.sharded
    return (0, 1) if sharded is None else (sharded.place, sharded.size)


def state(table: Table, rows: bool) -> dict[str, Any]:
    """Plain values and tensors only, so that `torch.load(weights_only=True)` takes it."""
    place, size = _shape(table)
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


def _fits(table: Table, options: dict[str, Any], where: str) -> None:
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
    _fits(table, json.loads(found["options"]), where)
    place, size = _shape(table)
    snapshot = found["snapshot"]
    if snapshot is None:
        return
    if isinstance(snapshot, dict):  # of all ranks: from torch.distributed.checkpoint
        parts = [_bytes(snapshot[f"{each}-of-{len(snapshot)}"]) for each in range(len(snapshot))]
        _restore(table, parts)
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


def save(model: nn.Module, folder: str | os.PathLike[str], keep: int = 2) -> Path:
    """Write the embeddings of `model` below `folder`; the path of what was written. Collective.

    The rest of the model is in its `state_dict()`. A checkpoint is whole or not there; of those in
    `folder` the `keep` that were saved last stay. The deltas of `store.delta()` go on as they were.
    Raises UsageError where the model has no embedding.
    """
    from evener.embedding.torch.optimizer import tables

    found = tables(model)
    if not found:
        raise UsageError("the model has no embedding", "save its state_dict()")
    if keep < 1:
        raise UsageError(f"keep={keep} cannot be", "keep at least 1 checkpoint")
    step = max(table.step for table in found)
    root = Path(folder)
    lead = all(_shape(table)[0] == 0 for table in found)
    number, again = 0, False
    if lead:
        number = 1 + max((_number(path) for path in _whole(root)), default=0)
        again = (root / f"step-{step:012d}" / MANIFEST).exists()
    # One number for all ranks: which save this is, and whether one of this step is there.
    number, again = divmod(int(_largest(found, 2 * number + again)), 2)
    # What is there stays until this one is whole.
    target = root / (f"step-{step:012d}" + (f"-save-{number}" if again else ""))
    for table in found:
        place, size = _shape(table)
        part = target / quote(table.name, safe="") / f"{place}-of-{size}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        # Not the store's next snapshot: that is what its deltas follow.
        table.store.save(part / "full-000001.evs")
    _meet(found)
    if lead:
        manifest = {
            "format": FORMAT,
            "save": number,
            "tables": {
                table.name: {"options": table.options, "step": table.step, "size": _shape(table)[1]}
                for table in found
            },
        }
        beside = target / f".{MANIFEST}.{uuid.uuid4().hex}"
        with beside.open("w") as file:
            json.dump(manifest, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target / MANIFEST)
        for old in _whole(root)[:-keep]:
            (old / MANIFEST).unlink()
            shutil.rmtree(old, ignore_errors=True)
    _meet(found)
    return target


def load(model: nn.Module, folder: str | os.PathLike[str]) -> int:
    """Read what `save` wrote, the last whole checkpoint below `folder`; its step. Collective.

    The number of ranks may be another. Raises UsageError where there is none, or it does not fit.
    """
    from evener.embedding.torch.optimizer import tables

    found, root = tables(model), Path(folder)
    whole = [root] if (root / MANIFEST).exists() else _whole(root)
    if not whole:
        raise UsageError(f"no whole checkpoint in {root}", "give the folder that save() was given")
    source = whole[-1]
    manifest = json.loads((source / MANIFEST).read_text())
    there = manifest["tables"]
    for table in found:
        if table.name not in there:
            raise UsageError(
                f"{source} has no embedding {table.name!r}: it has {', '.join(sorted(there))}",
                "give modules the names that they were saved with",
            )
        _fits(table, there[table.name]["options"], str(source))
    for table in found:
        entry = there[table.name]
        parts, size = source / quote(table.name, safe=""), int(entry["size"])
        _restore(table, [parts / f"{place}-of-{size}" for place in range(size)])
        table.discard()
        table.step = int(entry["step"])
    _meet(found)
    return max(table.step for table in found) - 1


def _restore(table: Table, parts: Sequence[Path | bytes]) -> None:
    """Rows and counts of admission, which lie in a part for each rank that saved."""
    place, now = _shape(table)
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


def _number(checkpoint: Path) -> int:
    """Which save it was; 0 for one of a version that did not say."""
    return int(json.loads((checkpoint / MANIFEST).read_text()).get("save", 0))


def _whole(root: Path) -> list[Path]:
    """The checkpoints that are whole, in the order in which they were saved."""
    found = [path.parent for path in root.glob(f"step-*/{MANIFEST}")]
    return sorted(found, key=lambda path: (_number(path), path.name))


def _largest(found: list[Table], number: int) -> int:
    """The largest of all ranks' numbers: all ranks come here."""
    for table in found:
        if table.sharded is not None:
            return int(table.sharded.largest(float(number)))
    return number


def _meet(found: list[Table]) -> None:
    """All ranks come here."""
    _largest(found, 0)
