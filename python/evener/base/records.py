"""Statistics files of a process: where they are, how they are called, how they are written.

With EVENER_STATS_DIR set, each pillar keeps `<pillar>-<host>-r<rank>-<pid>.json` there (several of
one process end in -2, -3). Nodes share the directory, and containers and labs repeat process ids:
so host and rank are in the name as in the record. What stands in the records is in
docs/reference/records.md; the NCCL plug-in writes its own (crates/engine/src/records.rs), by the
same rules.

A job does not end because its statistics cannot be written. That is said once, and each later
writing tries again.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from evener.base import settings
from evener.base.log import logger, once
from evener.errors import UsageError

VERSION = 1
EVERY = 1.0
"""Seconds between two writings of one file."""
# (pillar, number) of those of this process that write.
_TAKEN: set[tuple[str, int]] = set()


class StatsFile:
    """The file of one part of a process. `open()` gives None where nobody asked for it."""

    def __init__(self, directory: Path, pillar: str, rank: int) -> None:
        self.directory, self.pillar, self.rank = directory, pillar, rank
        self._number = next(i for i in itertools.count(1) if (pillar, i) not in _TAKEN)
        _TAKEN.add((pillar, self._number))
        host = re.sub(r"[^A-Za-z0-9-]", "_", socket.gethostname())
        self.owner = f"{host}-r{rank}-{os.getpid()}" + f"-{self._number}" * (self._number > 1)
        self._said = False
        self._last = -math.inf

    @classmethod
    def open(cls, pillar: str, rank: int) -> StatsFile | None:
        """By EVENER_STATS_DIR."""
        text = settings.EVENER_STATS_DIR.get()
        return cls(Path(text), pillar, rank) if text else None

    def close(self) -> None:
        """The name is free. May be called twice, but not to write on."""
        _TAKEN.discard((self.pillar, self._number))

    @property
    def due(self) -> bool:
        """Whether the last writing is long enough ago."""
        return time.monotonic() - self._last >= EVERY

    def write(self, content: dict[str, Any]) -> None:
        """Replace the file, by rename."""
        self._last = time.monotonic()
        record = {
            "version": VERSION,
            "pid": os.getpid(),
            "rank": self.rank,
            "host": socket.gethostname(),
            "time": time.time(),
            self.pillar: content,
        }
        text = json.dumps(record)
        part = self.directory / f".{self.pillar}-{self.owner}.json"

        def put() -> None:
            part.write_text(text, encoding="utf-8")
            part.replace(self.directory / f"{self.pillar}-{self.owner}.json")

        self.safely(put)

    def safely(self, put: Callable[[], None]) -> None:
        """Make the directory, and call what writes into it."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            put()
        except OSError as error:
            if not self._said:
                logger.warning("statistics cannot be written to %s: %s", self.directory, error)
            self._said = True


PILLARS = ("net", "comm", "local", "hub", "zero")
# What `evener embedding stats` reads, and `evener stats` does not.
ALL = (*PILLARS, "embedding")


def read(directory: Path, pillars: Sequence[str] = PILLARS) -> list[dict[str, Any]]:
    """The records of `pillars` in `directory`, by rank, host and process.

    A file that is not a record of version 1 is left out: others may keep files there too. Raises
    UsageError where there is no directory, and where it has no such record, saying what it has.
    """
    if not directory.is_dir():
        raise UsageError(
            f"{directory} is not a directory",
            f"start the job with {settings.EVENER_STATS_DIR.name} set, and give the same directory "
            "here",
        )
    found = [record for path in sorted(directory.glob("*.json")) if (record := _record(path))]
    wanted = [record for record in found if any(pillar in record for pillar in pillars)]
    if not wanted:
        others = sorted({pillar for record in found for pillar in PILLARS if pillar in record})
        missing = f"{directory} has no records of {', '.join(pillars)}"
        if others:
            raise UsageError(
                f"{missing}, only of {', '.join(others)}", f"`evener stats {directory}` shows those"
            )
        raise UsageError(
            missing,
            f"start the job with {settings.EVENER_STATS_DIR.name}={directory}; files come within a "
            "second of the first step",
        )
    return sorted(wanted, key=lambda r: (r["rank"] is None, r["rank"] or 0, r["host"], r["pid"]))


def _record(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict):
        return None
    if (version := record.get("version")) != VERSION:
        if {"pid", "host", "rank"} <= set(record):
            once(f"{path} is left out: a record of version {version}, and this reads {VERSION}")
        return None
    if not isinstance(record.get("host"), str) or not isinstance(record.get("rank"), int | None):
        return None
    if not isinstance(record.get("pid"), int) or not isinstance(record.get("time"), int | float):
        return None
    return record if any(isinstance(record.get(pillar), dict) for pillar in ALL) else None
