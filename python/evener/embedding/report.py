"""What `evener embedding stats` shows: of a server, of a folder of snapshots, of a running job."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from evener.base import records
from evener.embedding import files
from evener.errors import UsageError

_METRICS = {
    "rows": ("evener_embedding_rows", "gauge"),
    "bytes": ("evener_embedding_memory_bytes", "gauge"),
    "cold_rows": ("evener_embedding_cold_rows", "gauge"),
    "cold_bytes": ("evener_embedding_cold_file_bytes", "gauge"),
    "warmed": ("evener_embedding_warmed_total", "counter"),
    "lookups": ("evener_embedding_lookups_total", "counter"),
    "hit_rate": ("evener_embedding_hit_ratio", "gauge"),
    "inserted": ("evener_embedding_inserted_total", "counter"),
    "refused": ("evener_embedding_refused_total", "counter"),
    "evicted": ("evener_embedding_evicted_total", "counter"),
    "steps": ("evener_embedding_steps_total", "counter"),
}
_SERVED = {
    "requests": ("evener_embedding_serve_requests_total", "counter"),
    "keys": ("evener_embedding_serve_keys_total", "counter"),
    "found": ("evener_embedding_serve_found_total", "counter"),
    "refused": ("evener_embedding_serve_refused_total", "counter"),
    "deltas": ("evener_embedding_serve_deltas_total", "counter"),
    "snapshots": ("evener_embedding_serve_snapshots_total", "counter"),
}


def collect(source: str, token: str) -> list[dict[str, Any]]:
    """A table each: {"name", "dim", "store": {...}, and "served", "rank" or "files"}.

    source: http://host:port of a server, a folder of snapshots, or a folder of statistics. Raises
    UsageError where there is none of them.
    """
    if source.startswith(("http://", "https://")):
        return [_server(source.rstrip("/"), token)]
    folder = Path(source)
    if folder.is_dir() and files.numbered(folder):
        return [_folder(folder)]
    return [
        {**table, "rank": record["rank"], "host": record["host"]}
        for record in records.read(folder, ("embedding",))
        for table in record["embedding"]["tables"]
    ]


def _server(url: str, token: str) -> dict[str, Any]:
    request = urllib.request.Request(f"{url}/stats")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, Any] = json.loads(answer.read())
    except urllib.error.HTTPError as error:
        fix = "give --token" if error.code == 401 else "is it `evener embedding serve`?"
        raise UsageError(f"{url} answers {error.code}", fix) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{url} does not answer: {error}", "is the server running?") from None
    return found


def _folder(folder: Path) -> dict[str, Any]:
    """Heads only: a folder's rows may be more than this machine has memory for."""
    there = files.numbered(folder)
    head = files.header(there[-1][2])
    return {
        "name": str(folder),
        "dim": head["options"]["dim"],
        "store": {"step": head["step"], "steps": head["steps"]},
        "files": [
            {"file": path.name, "kind": kind, "bytes": path.stat().st_size}
            for _, kind, path in there
        ],
    }


def prometheus(tables: list[dict[str, Any]]) -> str:
    """Prometheus' text format."""
    lines: list[str] = []
    for part, metrics in (("store", _METRICS), ("served", _SERVED)):
        for field, (name, kind) in metrics.items():
            samples = [
                f"{name}{{{_labels(table)}}} {table[part][field]:.17g}"
                for table in tables
                if table.get(part, {}).get(field) is not None
            ]
            if samples:
                lines += [f"# TYPE {name} {kind}", *samples]
    return "\n".join(lines) + "\n"


def _labels(table: dict[str, Any]) -> str:
    pairs = {"embedding": table["name"]}
    pairs |= {name: table[name] for name in ("rank", "host") if name in table}
    quoted = {
        name: str(value).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        for name, value in pairs.items()
    }
    return ",".join(f'{name}="{value}"' for name, value in quoted.items())


def rows(tables: list[dict[str, Any]]) -> list[list[str]]:
    """A line per table: name, rank, dim, rows, memory, hit rate, evicted, step, and the rest."""
    found = []
    for table in tables:
        store = table["store"]
        more = ""
        if store.get("cold_rows"):
            more = f"{store['cold_rows']:,} rows in {store['cold_bytes'] / 1e6:,.1f} MB of file; "
        if "served" in table:
            served = table["served"]
            more += f"{served['requests']:,} requests, {served['deltas']:,} deltas"
            more += f", {served['refused']:,} refused" if served["refused"] else ""
            more += f"; {served['problem']}" if served["problem"] else ""
        elif "files" in table:
            size = sum(file["bytes"] for file in table["files"])
            more += f"{len(table['files'])} files, {size / 1e6:,.1f} MB"
        found.append(
            [
                table["name"],
                str(table.get("rank", "")),
                str(table["dim"]),
                f"{store['rows']:,}" if "rows" in store else "",
                f"{store['bytes'] / 1e6:,.1f} MB" if "bytes" in store else "",
                f"{store['hit_rate']:.1%}" if "hit_rate" in store else "",
                f"{store['evicted']:,}" if "evicted" in store else "",
                str(store.get("step", "")),
                more.removesuffix("; "),
            ]
        )
    return found
