"""A table's rows as part of `state_dict()`, or in a folder, by the store's snapshot.

A folder is for tables that are large, and for jobs that come back with another number of ranks:

    FOLDER/step-000000000420/manifest.json      written last: what has none is not there
    FOLDER/step-000000000420/NAME/0-of-2/       a snapshot of the rows of one rank
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import torch

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
        data = bytearray(table.store.save_bytes())
        found["snapshot"] = torch.frombuffer(data, dtype=torch.uint8)
    return found


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
    if found["snapshot"] is None:
        return
    if (found["place"], found["size"]) != (place, size):
        raise UsageError(
            f"{where} is of rank {found['place']} of {found['size']}, and this is rank {place} of "
            f"{size}",
            "use evener.embedding.torch.save and load: they take any number of ranks",
        )
    table.rows.forget()
    table._store.restore_bytes(found["snapshot"].cpu().numpy().tobytes())
    table.rows.reload()
    table.discard()
    table.step = int(found["step"])


def save(model: nn.Module, folder: str | os.PathLike[str], keep: int = 2) -> Path:
    """Write the embeddings of `model` below `folder`; the path of what was written. Collective.

    The rest of the model is in its `state_dict()`. A checkpoint is whole or not there; `keep` of
    them stay, the newest. Raises UsageError where the model has no embedding.
    """
    from evener.embedding.torch.optimizer import tables

    found = tables(model)
    if not found:
        raise UsageError("the model has no embedding", "save its state_dict()")
    if keep < 1:
        raise UsageError(f"keep={keep} cannot be", "keep at least 1 checkpoint")
    step = max(table.step for table in found)
    root = Path(folder)
    target = root / f"step-{step:012d}"
    lead = all(_shape(table)[0] == 0 for table in found)
    if lead:
        (target / MANIFEST).unlink(missing_ok=True)
    _meet(found)
    for table in found:
        place, size = _shape(table)
        part = target / quote(table.name, safe="") / f"{place}-of-{size}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        table.store.snapshot(str(part))
    _meet(found)
    if lead:
        manifest = {
            "format": FORMAT,
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
    """Read what `save` wrote, the newest whole checkpoint below `folder`; its step. Collective.

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
        _restore(table, source / quote(table.name, safe=""), int(entry["size"]))
        table.discard()
        table.step = int(entry["step"])
    _meet(found)
    return max(table.step for table in found) - 1


def _restore(table: Table, parts: Path, size: int) -> None:
    place, now = _shape(table)
    table.rows.forget()
    store = table._store
    sharded = table.sharded
    if size == now:
        store.restore(str(parts / f"{place}-of-{size}"))
    else:
        # The first part brings the count of steps with it, which is the same on all ranks.
        store.restore(str(parts / f"0-of-{size}"))
        for each in range(size):
            other = store if each == 0 else _opened(parts / f"{each}-of-{size}", table.options)
            for chunk in list(other.export_rows()) if each == 0 else other.export_rows():
                keys = torch.from_numpy(chunk.keys.copy())
                mine = torch.ones_like(keys, dtype=torch.bool)
                if sharded is not None:
                    mine = sharded.owner(keys) == sharded.place
                if each == 0:
                    store.remove(keys[~mine])
                else:
                    at = mine.numpy()
                    store.put_rows(
                        chunk.keys[at],
                        chunk.values[at],
                        chunk.frequencies[at],
                        chunk.versions[at],
                    )
            if each:
                forget(other.name)
    table.rows.reload()


def _opened(folder: Path, options: dict[str, Any]) -> Store:
    store = Store(f"part-{uuid.uuid4().hex}", Options.from_dict({**options, "tier": None}))
    store.restore(str(folder))
    return store


def _whole(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob(f"step-*/{MANIFEST}"))


def _meet(found: list[Table]) -> None:
    """All ranks come here."""
    for table in found:
        if table.sharded is not None:
            table.sharded.largest(0.0)
            return
