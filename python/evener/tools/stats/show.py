"""The records of a job as tables: one for each pillar that wrote any."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from evener.net import stats as net

if TYPE_CHECKING:
    from rich.table import Table

STALE = 10.0
"""Seconds after which a file's process is taken for gone."""

Record = dict[str, Any]


def parts(records: list[Record], now: float | None = None) -> list[Table | str]:
    """What `evener stats` prints. now: seconds since 1970; default: now."""
    now = time.time() if now is None else now
    shown: list[Table | str] = [summary(records, now)]
    for pillar, make in _TABLES.items():
        mine = [record for record in records if pillar in record]
        if mine:
            shown += make(mine)
    return shown


def summary(records: list[Record], now: float) -> str:
    """Who wrote, and whether they still do."""
    processes = {(r["host"], r["pid"], r["rank"]): r["time"] for r in records}
    for record in records:
        key = record["host"], record["pid"], record["rank"]
        processes[key] = max(processes[key], record["time"])
    hosts = {host for host, _, _ in processes}
    ages = [now - at for at in processes.values()]
    gone = sum(age > STALE for age in ages)
    said = f"{len(processes)} processes on {len(hosts)} hosts; newest record {min(ages):.0f} s old"
    if gone == len(ages):
        return f"{said}: the job is over, or stands still"
    return f"{said}; {gone} write no longer" if gone else said


def _table(title: str, left: str, right: str) -> Table:
    from rich.table import Table

    table = Table("host", "rank", *left.split(), title=title, title_justify="left")
    for name in right.split():
        table.add_column(name.replace("_", " "), justify="right")
    return table


def _add(table: Table, record: Record, *cells: str) -> None:
    rank = record["rank"]
    table.add_row(record["host"], "" if rank is None else str(rank), *cells)


def _comm(records: list[Record]) -> list[Table | str]:
    table = _table(
        "comm: gradients", "forms", "steps step_ms MB_per_step sent_MB exchange_ms worst_cosine"
    )
    for record in records:
        comm = record["comm"]
        buckets = comm["buckets"]
        forms = Counter(f"{b['algorithm']} {b['compressor']}" for b in buckets)
        cosines = [b["cosine"] for b in buckets if b.get("cosine") is not None]
        times = [b["measured_ms"] for b in buckets if b.get("measured_ms") is not None]
        _add(
            table,
            record,
            ", ".join(f"{count} x {form}" for form, count in forms.items()),
            str(comm["steps"]),
            _number(comm["step_ms"], 1),
            f"{sum(b['bytes'] for b in buckets) / 1e6:.1f}",
            f"{sum(b['bytes_sent'] for b in buckets) / 1e6:.1f}",
            _number(sum(times) if times else None, 1),
            _number(min(cosines) if cosines else None, 4),
        )
    return [table]


def _local(records: list[Record]) -> list[Table | str]:
    table = _table(
        "local: steps between averages",
        "",
        "steps rounds every overlap step_ms waits_ms sent_MB drift",
    )
    for record in records:
        local = record["local"]
        _add(
            table,
            record,
            *(str(local[name]) for name in ("steps", "rounds", "every", "overlap")),
            _number(local["step_ms"], 1),
            _number(local["exchange_ms"], 1),
            _number(local["bytes_sent"] / 1e6, 2),
            _number(local["drift"], 2),
        )
    return [table]


def _hub(records: list[Record]) -> list[Table | str]:
    table = _table("hub: nodes that come and go", "node place", "share received_MB sent_MB")
    said = []
    for record in records:
        hub = record["hub"]
        moved = hub["bytes_received"] / 1e6, hub["bytes_sent"] / 1e6
        every, drift = hub.get("every"), hub.get("drift")
        said.append(
            f"round {hub['round']}, step {hub['steps']}, {hub['nodes']} nodes in"
            + (f", every {every} steps" if every else "")
            + (f", drift {drift:.2f}; " if drift is not None else "; ")
            + f"{moved[0]:.1f} MB received, {moved[1]:.1f} MB sent"
        )
        for member in hub["members"]:
            moved = member["bytes_received"] / 1e6, member["bytes_sent"] / 1e6
            cells = str(member["slot"]), f"{moved[0]:.1f}", f"{moved[1]:.1f}"
            _add(table, record, member["name"], member["place"], *cells)
    return [table, *said]


def _zero(records: list[Record]) -> list[Table | str]:
    table = _table("zero: memory", "", "steps skipped step_ms GPU_peak_GB host_used_GB host_GB")
    for record in records:
        zero = record["zero"]
        tiers = {tier["name"]: tier for tier in zero["tiers"]}
        _add(
            table,
            record,
            str(zero["steps"]),
            str(zero["skipped"]),
            _number(zero["step_ms"], 1),
            _number(tiers["gpu"]["peak"] / 1e9, 2),
            _number(tiers["host"]["used"] / 1e9, 2),
            _number(tiers["host"]["bytes"] / 1e9, 2),
        )
    return [table]


def _net(records: list[Record]) -> list[Table | str]:
    table = _table("net: the NCCL plug-in", "nic", "sent_MB received_MB paths live resent heals")
    for record in records:
        paths = net.rows([record])
        for nic in net.nics([record]):
            mine = [path for path in paths if path["nic"] == nic["name"]]
            live = sum(path["state"] == "live" and not net.is_stale(path) for path in mine)
            _add(
                table,
                record,
                nic["name"],
                f"{nic.get('bytes_sent', 0) / 1e6:.1f}",
                f"{nic.get('bytes_received', 0) / 1e6:.1f}",
                str(len(mine)),
                str(live),
                str(sum(path["retransmits"] for path in mine)),
                str(sum(path["heals"] for path in mine)),
            )
    return [table, "Each path: evener net stats"]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


_TABLES = {"comm": _comm, "local": _local, "hub": _hub, "zero": _zero, "net": _net}
