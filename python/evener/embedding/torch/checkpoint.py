"""Tables in a folder, by the store's snapshots.

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
import uuid
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from torch import nn

from evener.base.given import given
from evener.embedding.torch.optimizer import tables
from evener.embedding.torch.state import fits, restore, shape
from evener.errors import UsageError

if TYPE_CHECKING:
    from evener.embedding.torch.table import Table

MANIFEST, FORMAT = "manifest.json", 1


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
    if keep < 1:
        raise UsageError(f"keep={keep} cannot be", "keep at least 1 checkpoint")
    step = max(table.step for table in found)
    root = Path(folder)
    lead = all(shape(table)[0] == 0 for table in found)
    number, again = 0, 0
    if lead:
        number = 1 + max((_number(path) for path in _whole(root)), default=0)
        again = int((root / f"step-{step:012d}" / MANIFEST).exists())
    # One number for all ranks: which save this is, and whether one of this step is there.
    number, again = divmod(int(_largest(found, 2 * number + again)), 2)
    # What is there stays until this one is whole.
    target = root / (f"step-{step:012d}" + (f"-save-{number}" if again else ""))
    for table in found:
        place, size = shape(table)
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
                table.name: {"options": table.options, "step": table.step, "size": shape(table)[1]}
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


@given
def load(model: nn.Module, folder: str | os.PathLike[str]) -> int:
    """Read what `save` wrote, the last whole checkpoint below `folder`; its step. Collective.

    The number of ranks may be another. Raises UsageError where there is none, or it does not fit.
    """
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
        fits(table, there[table.name]["options"], str(source))
    for table in found:
        entry = there[table.name]
        parts, size = source / quote(table.name, safe=""), int(entry["size"])
        restore(table, [parts / f"{place}-of-{size}" for place in range(size)])
        table.discard()
        table.step = int(entry["step"])
    _meet(found)
    return max(table.step for table in found) - 1


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
            return int(table.sharded.ranks.largest([float(number)])[0])
    return number


def _meet(found: list[Table]) -> None:
    """All ranks come here."""
    _largest(found, 0)
