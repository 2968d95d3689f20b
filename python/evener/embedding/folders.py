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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from evener.embedding.parts import Held
from evener.errors import UsageError

MANIFEST, FORMAT = "manifest.json", 1


def save(
    held: Sequence[Held],
    folder: str | os.PathLike[str],
    keep: int,
    beside: Callable[[Path], None] = lambda _: None,
) -> Path:
    """Write tables below `folder`; the path of what was written. Collective.

    The `keep` that were saved last stay. `beside` writes what belongs to it, on the first rank.
    """
    if keep < 1:
        raise UsageError(f"keep={keep} cannot be", "keep at least 1 checkpoint")
    step = max(each.step for each in held)
    root = Path(folder)
    lead = all(each.place == 0 for each in held)
    number, again = 0, 0
    if lead:
        number = 1 + max((_number(path) for path in _whole(root)), default=0)
        again = int((root / f"step-{step:012d}" / MANIFEST).exists())
    # One number for all ranks: which save this is, and whether one of this step is there.
    number, again = divmod(_largest(held, 2 * number + again), 2)
    # What is there stays until this one is whole.
    target = root / (f"step-{step:012d}" + (f"-save-{number}" if again else ""))
    for each in held:
        part = target / quote(each.name, safe="") / f"{each.place}-of-{each.size}"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        # Not the store's next snapshot: that is what its deltas follow.
        each.store.save(part / "full-000001.evs")
    if lead:
        beside(target)
    _largest(held, 0)
    if lead:
        manifest = {
            "format": FORMAT,
            "save": number,
            "tables": {
                each.name: {"options": each.options, "step": each.step, "size": each.size}
                for each in held
            },
        }
        unready = target / f".{MANIFEST}.{uuid.uuid4().hex}"
        with unready.open("w") as file:
            json.dump(manifest, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        unready.replace(target / MANIFEST)
        for old in _whole(root)[:-keep]:
            (old / MANIFEST).unlink()
            shutil.rmtree(old, ignore_errors=True)
    _largest(held, 0)
    return target


def find(names: Sequence[str], folder: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """The last whole checkpoint below `folder`, and what its manifest says of each table.

    Raises UsageError where there is none, or it has not all `names`.
    """
    root = Path(folder)
    whole = [root] if (root / MANIFEST).exists() else _whole(root)
    if not whole:
        raise UsageError(f"no whole checkpoint in {root}", "give the folder that save() was given")
    there = dict(json.loads((whole[-1] / MANIFEST).read_text())["tables"])
    for name in names:
        if name not in there:
            raise UsageError(
                f"{whole[-1]} has no embedding {name!r}: it has {', '.join(sorted(there))}",
                "give modules the names that they were saved with",
            )
    return whole[-1], there


def parts(source: Path, name: str, size: int) -> list[Path]:
    """Where the ranks that saved have put their rows."""
    return [source / quote(name, safe="") / f"{place}-of-{size}" for place in range(size)]


def _number(checkpoint: Path) -> int:
    """Which save it was; 0 for one of a version that did not say."""
    return int(json.loads((checkpoint / MANIFEST).read_text()).get("save", 0))


def _whole(root: Path) -> list[Path]:
    """The checkpoints that are whole, in the order in which they were saved."""
    found = [path.parent for path in root.glob(f"step-*/{MANIFEST}")]
    return sorted(found, key=lambda path: (_number(path), path.name))


def _largest(held: Sequence[Held], number: int) -> int:
    """The largest of all ranks' numbers: all ranks come here."""
    return next((each.largest(number) for each in held if each.size > 1), number)
