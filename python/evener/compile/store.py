"""The records of shapes: a file per function in EVENER_COMPILE_DIR, replaced by rename.

Each holds what `Buckets.saved` gives, per signature of the other inputs. The compilers keep what
they compiled in folders beside them (`inductor`, `xla`).
"""

from __future__ import annotations

import json
import os
import re
import threading
import weakref
from pathlib import Path
from typing import Any

from evener.base import settings
from evener.base.log import logger
from evener.errors import UsageError

VERSION = 1

_CLAIMED: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_CLAIMING = threading.Lock()


def folder() -> Path:
    """EVENER_COMPILE_DIR."""
    return Path(settings.EVENER_COMPILE_DIR.get()).expanduser()


def claim(name: str, owner: Any) -> str:
    """A name for the record of `owner`: its own while it lives.

    Where another one has the name, it gets "-2", and so on: a program that makes its functions in
    the same order finds the same records again.
    """
    with _CLAIMING:
        found, number = name, 1
        while str(_path(found)) in _CLAIMED:
            number += 1
            found = f"{name}-{number}"
        _CLAIMED[str(_path(found))] = owner
        return found


def load(name: str, maker: str) -> dict[str, Any]:
    """The signatures of a function. maker: the framework and its version, as saved.

    Another version compiles in another way, so of its record the sizes alone are taken. A file that
    cannot be read is left alone, and said.
    """
    path = _path(name)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["version"] != VERSION:
            return {}
        signatures: dict[str, Any] = found["signatures"]
        if found["maker"] != maker:
            for each in signatures.values():
                each.update(plain={}, buckets=[], off="")
        return signatures
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("compile: the record %s is not used: %s", path, error)
        return {}


def save(name: str, maker: str, signatures: dict[str, Any]) -> None:
    """Replace the record."""
    path = _path(name)
    record = {"version": VERSION, "name": name, "maker": maker, "signatures": signatures}
    replace(path, record, "the record")


def replace(path: Path, content: Any, what: str) -> None:
    """Write a file as JSON, all or nothing. Where that fails, one line says it: nothing depends on
    it."""
    part = path.with_suffix(f".{os.getpid()}.part")  # several ranks have one file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(content) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        logger.warning("compile: %s %s cannot be written: %s", what, path, error)


def read(place: Path) -> list[dict[str, Any]]:
    """All records of a folder, by name. Raises UsageError where there is none."""
    found = []
    for path in sorted(place.glob("*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path}: {error}", "delete it: it is written again") from None
        if isinstance(record, dict) and record.get("version") == VERSION:
            found.append(record)
    if not found:
        raise UsageError(
            f"{place} has no record of compiled functions",
            "run a program that uses evener.compile, or name the folder: EVENER_COMPILE_DIR",
        )
    return found


def _path(name: str) -> Path:
    return folder() / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:120]}.json"
