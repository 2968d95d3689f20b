"""Read the statistics files of a job (docs/records.md), and show them."""

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
    now = time.time()
    return [
        {
            "host": record["host"],
            "pid": record["pid"],
            "rank": record["rank"],
            "age": max(0.0, now - record["time"]),
            **path,
        }
        for record in records
        for path in record["net"]["paths"]
    ]


def peers(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a peer of every process: connections, and what became of flows that were tried."""
    return [
        {"host": record["host"], "pid": record["pid"], "rank": record["rank"], **peer}
        for record in records
        for peer in record["net"]["peers"]
    ]


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


def prometheus(all_rows: list[dict[str, Any]]) -> str:
    """The rows in Prometheus' text format 0.0.4."""

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
    return "\n".join(lines) + "\n"
