"""Where the rings of jobs lie, and the removal of those whose job is gone.

A job's rings are removed with it. Where the launcher, its guard or the process on another host was
killed, or a rank began after they had gone, a folder stays. The next job removes it: a rank locks
its ring for as long as it lives, so a folder in which no ring is locked has no rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

PLACES = ("/dev/shm", "/tmp")
_NAME = "evener-watch-"
_AGE = 30.0
"""Seconds: a younger folder may be of a job that starts."""


def folder_of(job: str) -> str:
    """Where the rings of a job lie, on every host."""
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp"
    return f"{root}/{_NAME}{job}"


def jobs(places: Iterable[str] = PLACES) -> dict[str, Path]:
    """Name of each job that has rings on this host, and their folder."""
    found = [path for place in places for path in sorted(Path(place).glob(f"{_NAME}*"))]
    return {name_of(path): path for path in found}


def name_of(folder: Path) -> str:
    """The name of the job whose rings are in a folder."""
    return folder.name.removeprefix(_NAME)


def stale(folder: Path) -> bool:
    """Whether no rank of a folder lives. False where it cannot be known, or is too early to say."""
    with contextlib.suppress(OSError):
        newest = folder.stat().st_mtime
        for path in folder.glob("rank.*"):
            newest = max(newest, path.stat().st_mtime)
            if path.name[5:].isdecimal() and _locked(path):
                return False
        return time.time() - newest > _AGE
    return False


def sweep(places: Iterable[str] = PLACES) -> None:
    """Remove this user's folders in which no rank lives. Never raises."""
    for folder in jobs(places).values():
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.geteuid() and folder.is_dir() and stale(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
