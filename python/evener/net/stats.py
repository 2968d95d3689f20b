"""Read the statistics files of a job (docs/reference/records.md), and show them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from evener.base import records

_STALE = 10.0  # seconds after which a file's process is taken for gone


def read(directory: Path) -> list[dict[str, Any]]:
    """All records of the plug-in in `directory`. Raises UsageError where there is none."""
    return records.read(directory, ["net"])


def rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per path of every process, with its process's host, pid, rank and age in seconds."""
    return [row for record in found for row in _of(record, "paths")]


def ended(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per path that has ended, of the last 64 of every process: `why`, and the `time`."""
    return [row for record in found for row in _of(record, "ended")]


def nics(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a NIC of every process, with the bytes of all its paths."""
    return [row for record in found for row in _of(record, "devices")]


def peers(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a peer of every process: connections, and what became of flows that were tried."""
    return [row for record in found for row in _of(record, "peers")]


def packets(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per process that has sent packets: what `net.packets` has, and packets per call."""
    rows = []
    for record in found:
        counts, workers = record["net"].get("packets", {}), record["net"].get("workers", [])
        if counts.get("sent"):
            calls = sum(one.get("writes", 0) for one in workers)
            process = {name: record[name] for name in ("host", "pid", "rank")}
            rows.append({**process, **counts, "per_call": counts["sent"] / max(1, calls)})
    return rows


def _of(record: dict[str, Any], part: str) -> list[dict[str, Any]]:
    process = {name: record[name] for name in ("host", "pid", "rank")}
    age = max(0.0, time.time() - record["time"])
    return [{**process, "age": age, **row} for row in record["net"].get(part, [])]


def is_stale(row: dict[str, Any]) -> bool:
    """Whether the file of this row was not written for a while."""
    return float(row["age"]) > _STALE
