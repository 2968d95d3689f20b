"""Results on disk: read, write; a file is there whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from evener.errors import EvenerError, UsageError
from evener.tools.bench.train.results import Results


def read(path: str | Path) -> Results:
    """The results in the JSON file at `path`. Raises UsageError that names what is wrong."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", "give another file") from error
    except ValueError as error:
        raise UsageError(
            f"{path} is no JSON: {error}", "give a file that --json of `evener bench train` wrote"
        ) from error
    return Results.from_json(raw)


def write(path: str | Path, text: str) -> None:
    """Put `text` at `path` by rename; makes missing folders. Raises EvenerError."""
    target = Path(path)
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise EvenerError(
            f"{path} cannot be written: {error.strerror}", "give a path that can be"
        ) from error


def require_writable(path: str | Path) -> None:
    """Raise EvenerError now where `write` would raise it after minutes of work."""
    target = Path(path)
    if target.is_dir():
        raise UsageError(f"{path} is a folder", "give the path of a file")
    probe = target.with_name(f".{target.name}.{os.getpid()}")
    write(probe, "")
    probe.unlink()
