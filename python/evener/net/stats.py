"""Read the statistics files of a job (docs/reference/records.md), and show them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from evener.net.plugin import PluginError

_STALE = 10.0  # seconds after which a file's process is taken for gone


def read(directory: Path) -> list[dict[str, Any]]:
    """All records in `directory`, by file name. Raises PluginError where there is no directory.

    A file that is not a record of version 1 is left out.
    """
    if not directory.is_dir():
        raise PluginError(
            f"{directory} is not a directory",
            "start the job with EVENER_STATS_DIR set, and give the same directory here",
        )
    records = []
    for path in sorted(directory.glob("net-*.json")):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(record, dict) and record.get("version") == 1 and "net" in record:
            records.append(record)
    return records


def rows(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a path of every process, with its process's host, pid, rank and age in seconds."""
    return [row for record in records for row in _of(record, "paths")]


def ended(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a path that has ended, of the last 64 of every process: `why`, and the `time`."""
    return [row for record in records for row in _of(record, "ended")]


def nics(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a NIC of every process, with the bytes of all its paths."""
    return [row for record in records for row in _of(record, "devices")]


def peers(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a peer of every process: connections, and what became of flows that were tried."""
    return [row for record in records for row in _of(record, "peers")]


def _of(record: dict[str, Any], part: str) -> list[dict[str, Any]]:
    process = {name: record[name] for name in ("host", "pid", "rank")}
    age = max(0.0, time.time() - record["time"])
    return [{**process, "age": age, **row} for row in record["net"].get(part, [])]


def is_stale(row: dict[str, Any]) -> bool:
    """Whether the file of this row was not written for a while."""
    return float(row["age"]) > _STALE


_METRICS = {
    "bytes_sent": ("evener_net_path_sent_bytes_total", "counter"),
    "bytes_received": ("evener_net_path_received_bytes_total", "counter"),
    "retransmits": ("evener_net_path_retransmits_total", "counter"),
    "heals": ("evener_net_path_heals_total", "counter"),
    "rate": ("evener_net_path_delivery_bytes_per_second", "gauge"),
    "rtt_us": ("evener_net_path_rtt_microseconds", "gauge"),
}


_NIC_METRICS = {
    "bytes_sent": "evener_net_nic_sent_bytes_total",
    "bytes_received": "evener_net_nic_received_bytes_total",
}


def prometheus(records: list[dict[str, Any]]) -> str:
    """Paths and NICs in Prometheus' text format 0.0.4."""
    all_rows = rows(records)

    def label(value: object) -> str:
        text = str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{text}"'

    lines = []
    for field, (name, kind) in _METRICS.items():
        lines.append(f"# TYPE {name} {kind}")
        for row in all_rows:
            labels = {
                "host": row["host"],
                "pid": row["pid"],
                "rank": row["rank"],
                "peer": row["peer"],
                "nic": row["nic"],
                "port": row["source_port"],
            }
            inside = ",".join(f"{key}={label(value)}" for key, value in labels.items())
            lines.append(f"{name}{{{inside}}} {row[field]}")
    lines.append("# TYPE evener_net_path_live gauge")
    for row in all_rows:
        live = int(row["state"] == "live" and not is_stale(row))
        inside = (
            f"host={label(row['host'])},pid={label(row['pid'])},port={label(row['source_port'])}"
        )
        lines.append(f"evener_net_path_live{{{inside}}} {live}")
    for field, name in _NIC_METRICS.items():
        lines.append(f"# TYPE {name} counter")
        for row in nics(records):
            labels = {key: row[key] for key in ("host", "pid", "rank")} | {"nic": row["name"]}
            inside = ",".join(f"{key}={label(value)}" for key, value in labels.items())
            lines.append(f"{name}{{{inside}}} {row.get(field, 0)}")
    return "\n".join(lines) + "\n"
