"""Snapshot files as a reader outside the store sees them: their order, and what their head says."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

from evener.errors import UsageError

MAGIC, VERSION = b"EVENEREM", 1
_NAME = re.compile(r"^(full|delta)-(\d+)\.evs$")


def numbered(folder: Path) -> list[tuple[int, str, Path]]:
    """(number, "full" or "delta", path) of a folder's files, in their order."""
    found = [
        (int(match[2]), match[1], path)
        for path in folder.iterdir()
        if (match := _NAME.match(path.name))
    ]
    return sorted(found)


def header(path: Path) -> dict[str, Any]:
    """What the head of a file says: options, step, kind. Raises UsageError for another file."""
    with path.open("rb") as file:
        start = file.read(16)
        if len(start) < 16 or start[:8] != MAGIC:
            raise UsageError(f"{path} is no snapshot of an embedding", "give a file named *.evs")
        version, length = struct.unpack("<II", start[8:])
        if version != VERSION:
            raise UsageError(
                f"{path} is of format {version}, and this Evener reads {VERSION}",
                "use the version of Evener that wrote it",
            )
        text = file.read(length)
    try:
        head: dict[str, Any] = json.loads(text)
    except ValueError:
        raise UsageError(f"{path} is not whole", "take the snapshot before it") from None
    return head
