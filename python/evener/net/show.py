"""The statistics of a job as tables: paths, NICs, and how flows were placed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from evener.net import stats

if TYPE_CHECKING:
    from rich.table import Table


def parts(records: list[dict[str, Any]], ended: bool) -> list[Table | str]:
    """What `evener net stats` prints. `ended`: paths that have ended as rows, not in one line."""
    gone = stats.ended(records)
    shown: list[Table | str] = [_paths(stats.rows(records) + (gone if ended else []))]
    if gone and not ended:
        reasons = Counter(row["why"] for row in gone).most_common()
        told = "; ".join(f"{count} x {why}" for why, count in reasons)
        shown.append(f"Paths that have ended: {told} (--ended shows them)")
    packets = _packets(records)
    return [*shown, _nics(records), *([packets] if packets else []), _peers(records)]


def _table(left: str, right: str) -> Table:
    from rich.table import Table

    table = Table("host", "rank", *left.split())
    for name in right.split():
        table.add_column(name, justify="right")
    return table


def _add(table: Table, row: dict[str, Any], *cells: str) -> None:
    table.add_row(row["host"], "" if row["rank"] is None else str(row["rank"]), *cells)


def _bytes(row: dict[str, Any]) -> tuple[str, str]:
    sent, received = row.get("bytes_sent", 0), row.get("bytes_received", 0)
    return f"{sent / 1e6:.1f} MB", f"{received / 1e6:.1f} MB"


def _rate(bytes_a_second: float) -> str:
    return f"{bytes_a_second * 8 / 1e9:.2f} Gb/s"


def _paths(rows: list[dict[str, Any]]) -> Table:
    table = _table("nic:port peer state", "sent received rate rtt resent heals")
    for row in rows:
        _add(
            table,
            row,
            f"{row['nic']}:{row['source_port']}",
            row["peer"],
            row.get("why") or ("gone?" if stats.is_stale(row) else row["state"]),
            *_bytes(row),
            _rate(row["rate"]),
            f"{row['rtt_us']} us",
            str(row["retransmits"]),
            str(row["heals"]),
        )
    return table


def _nics(records: list[dict[str, Any]]) -> Table:
    table = _table("nic address", "sent received")
    for nic in stats.nics(records):
        _add(table, nic, nic["name"], nic["address"], *_bytes(nic))
    return table


def _packets(records: list[dict[str, Any]]) -> Table | None:
    """What the UDP engine did, connections that are over included; None where it sent nothing."""
    table = _table("engine", "packets per-call lost silent late rtt-p50 rtt-p99")
    for row in stats.packets(records):
        counts = (str(row[name]) for name in ("lost", "timed_out", "late"))
        trips = (_trip(row["rtt_us_log2"], share) for share in (0.5, 0.99))
        _add(table, row, "udp", str(row["sent"]), f"{row['per_call']:.1f}", *counts, *trips)
    return table if table.row_count else None


def _trip(counts: list[int], share: float) -> str:
    """The bound below which this share of round trips is: powers of two are counted."""
    left = share * sum(counts)
    for power, count in enumerate(counts):
        left -= count
        if left <= 0 and count:
            return f"<{2**power} us"
    return "-"


def _peers(records: list[dict[str, Any]]) -> Table:
    table = _table("peer connections", "tried kept re-rolled late best")
    for peer in stats.peers(records):
        # Packets that are over: nothing was tried, as that is done with TCP's connections.
        if not any(peer.get(name, 0) for name in ("connections", "trials", "rerolls")):
            continue
        counts = ("trials", "gains", "rerolls", "late")
        _add(
            table,
            peer,
            peer["peer"],
            str(peer["connections"]),
            *(str(peer.get(name, 0)) for name in counts),
            _rate(peer.get("best_rate", 0)),
        )
    return table
