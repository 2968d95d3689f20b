"""Statistics in Prometheus' text format 0.0.4.

The format is a few lines, and prometheus_client would be a dependency that keeps counters of its
own, in a process that has none: here they come out of files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from evener.net import stats

Labels = Mapping[str, object]
Sample = tuple[Labels, float]

_PATH = {
    "bytes_sent": ("evener_net_path_sent_bytes_total", "counter"),
    "bytes_received": ("evener_net_path_received_bytes_total", "counter"),
    "retransmits": ("evener_net_path_retransmits_total", "counter"),
    "heals": ("evener_net_path_heals_total", "counter"),
    "rate": ("evener_net_path_delivery_bytes_per_second", "gauge"),
    "rtt_us": ("evener_net_path_rtt_microseconds", "gauge"),
}
_NIC = {
    "bytes_sent": "evener_net_nic_sent_bytes_total",
    "bytes_received": "evener_net_nic_received_bytes_total",
}


def metric(name: str, kind: str, samples: Iterable[Sample]) -> list[str]:
    """The lines of one metric; none where there is no sample."""
    lines = [f"{name}{{{_labels(labels)}}} {value:.17g}" for labels, value in samples]
    return [f"# TYPE {name} {kind}", *lines] if lines else []


def text(records: list[dict[str, Any]]) -> str:
    """Paths and NICs of the plug-in's records."""
    return "\n".join(lines(records)) + "\n"


def lines(records: list[dict[str, Any]]) -> list[str]:
    """The same, as lines."""
    paths, found = stats.rows(records), []

    def path(row: dict[str, Any]) -> Labels:
        return {
            **process(row),
            "peer": row["peer"],
            "nic": row["nic"],
            "port": row["source_port"],
        }

    for field, (name, kind) in _PATH.items():
        found += metric(name, kind, ((path(row), row[field]) for row in paths))
    live = ((path(row), row["state"] == "live" and not stats.is_stale(row)) for row in paths)
    found += metric("evener_net_path_live", "gauge", live)
    for field, name in _NIC.items():
        nics = stats.nics(records)
        carried = (({**process(row), "nic": row["name"]}, row.get(field, 0)) for row in nics)
        found += metric(name, "counter", carried)
    return found


def process(row: Mapping[str, Any]) -> dict[str, object]:
    """The labels that every sample has."""
    return {"host": row["host"], "pid": row["pid"], "rank": row["rank"]}


def _labels(labels: Labels) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: object) -> str:
    return str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
