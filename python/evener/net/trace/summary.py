"""What a trace says of each connection and path: bytes, losses, times, stalls.

A stall is a time in which something was in flight and nothing was acknowledged. Two ways to see it:
something stayed in flight after the acknowledgement before it, or what is acknowledged now had been
sent so long ago.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evener.net.trace import pcapng
from evener.net.trace.pcapng import Event, File, Packet

LONG = 10.0
"""Milliseconds from which a stall is counted and listed."""


@dataclass
class Route:
    """One path of a connection: a source port."""

    port: int = 0
    packets: int = 0
    sent: int = 0
    acknowledged: int = 0
    acknowledged_bytes: int = 0
    lost: int = 0
    timed_out: int = 0
    late: int = 0
    silences: int = 0
    took: list[int] = field(default_factory=list)


@dataclass
class Connection:
    """One connection, from the side that wrote the trace."""

    process: str
    number: int
    peer: str = ""
    other: int | None = None
    """Its number at the peer."""
    over: str = ""
    received: int = 0
    """Bytes of datagrams."""
    routes: dict[int, Route] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)
    replaced: list[tuple[int, int]] = field(default_factory=list)
    trips: list[int] = field(default_factory=list)
    stalls: list[tuple[int, float]] = field(default_factory=list)
    """When they ended (ns since 1970), and milliseconds: those of `LONG` and more."""
    longest: float = 0.0
    events: list[Event] = field(default_factory=list)
    """The connection's events, in order of time."""
    begin: int = 0
    end: int = 0

    @property
    def seconds(self) -> float:
        """From its first record to its last."""
        return max(self.end - self.begin, 0) / 1e9

    def route(self, path: int) -> Route:
        """A path of it."""
        return self.routes.setdefault(path, Route())


@dataclass
class Summary:
    """The summary of all files."""

    connections: list[Connection]
    left_out: int
    cut: list[Path]


def summed_up(found: list[File]) -> Summary:
    """What these files say. Files of one process (its older one, its newer one) are one trace."""
    processes: dict[str, list[File]] = {}
    for file in found:
        processes.setdefault(_process(file), []).append(file)
    connections: list[Connection] = []
    for process, parts in processes.items():
        connections += _of_process(process, parts)
    # The one that carried most first.
    connections.sort(key=lambda one: -sum(r.sent for r in one.routes.values()) - one.received)
    return Summary(
        connections,
        # The newer file of a process counts what both left out.
        sum(max(file.left_out for file in parts) for parts in processes.values()),
        [file.path for file in found if file.cut],
    )


def _process(file: File) -> str:
    # A second engine of a process has the same name: its file tells it apart.
    return file.path.name.removesuffix(".pcapng").removesuffix(".old")


def _of_process(process: str, parts: list[File]) -> list[Connection]:
    known: dict[int, Connection] = {}

    def of(number: int) -> Connection:
        return known.setdefault(number, Connection(process, number))

    events = sorted((event for part in parts for event in part.events), key=lambda one: one.at)
    for event in events:
        of(event.connection).events.append(event)
    for connection in known.values():
        _tell(connection)
    # What goes out has the peer's number.
    outbound = {one.other: one for one in known.values() if one.other is not None}
    for part in parts:
        for packet in part.packets:
            if packet.inbound:
                _count(of(packet.connection), packet)
            elif packet.connection in outbound:
                _count(outbound[packet.connection], packet)
    # A greeting names no connection, or one that never was.
    return [one for number, one in known.items() if number and (one.events or one.routes)]


def _count(connection: Connection, packet: Packet) -> None:
    connection.begin = min(connection.begin or packet.at, packet.at)
    connection.end = max(connection.end, packet.at)
    if not packet.inbound:
        route = connection.route(packet.path)
        route.port = packet.port
        route.packets += 1
        route.sent += packet.size
    elif packet.comment:
        connection.dropped[packet.comment.removeprefix("dropped: ")] += 1
    else:
        connection.received += packet.size


def _tell(connection: Connection) -> None:
    events = connection.events
    connection.begin, connection.end = events[0].at, events[-1].at
    before: Event | None = None
    for event in events:
        if event.kind == pcapng.OPENED:
            connection.other = event.number
            connection.peer = event.comment.removeprefix("open: ")
        elif event.kind == pcapng.OVER:
            connection.over = event.comment.removeprefix("over: ")
        elif event.kind == pcapng.DECIDED:
            names = pcapng.DECISIONS
            connection.decisions[names[event.detail] if event.detail < len(names) else "?"] += 1
        elif event.kind == pcapng.REPLACED:
            connection.replaced.append((event.path, event.detail))
        elif event.kind == pcapng.SILENT:
            connection.route(event.path).silences += 1
        elif event.kind == pcapng.LOST:
            route = connection.route(event.path)
            route.lost += event.detail == 1
            route.timed_out += event.detail == 2
        elif event.kind == pcapng.ARRIVED:
            route = connection.route(event.path)
            route.acknowledged += 1
            route.acknowledged_bytes += event.size
            route.late += event.detail
            route.took.append(event.took)
            if event.trip:
                connection.trips.append(event.trip)
            _stall(connection, before, event)
            before = event


def _stall(connection: Connection, before: Event | None, event: Event) -> None:
    if before is None:
        return
    gap = (event.at - before.at) / 1e6
    if before.flying == 0:
        gap = min(gap, event.took / 1e3)
    connection.longest = max(connection.longest, gap)
    if gap >= LONG:
        connection.stalls.append((event.at, gap))


def percentile(values: list[int], share: float) -> float:
    """The value that this share of `values` does not exceed, in their unit; 0 of none."""
    ordered = sorted(values)
    return float(ordered[min(int(len(ordered) * share), len(ordered) - 1)]) if ordered else 0.0


def as_json(summary: Summary) -> dict[str, Any]:
    """For machines: times in milliseconds, sizes in bytes."""
    return {
        "version": pcapng.LAYOUT,
        "left_out": summary.left_out,
        "cut": [str(path) for path in summary.cut],
        "connections": [_connection(one) for one in summary.connections],
    }


def _times(values: list[int]) -> dict[str, float]:
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    return {name: percentile(values, share) / 1e3 for name, share in shares.items()}


def _connection(one: Connection) -> dict[str, Any]:
    return {
        "process": one.process,
        "number": one.number,
        "peer": one.peer,
        "over": one.over,
        "seconds": one.seconds,
        "bytes_sent": sum(route.sent for route in one.routes.values()),
        "bytes_received": one.received,
        "rtt_ms": _times(one.trips),
        "longest_stall_ms": one.longest,
        "stalls": [{"at": at / 1e9, "ms": length} for at, length in one.stalls],
        "dropped": dict(one.dropped),
        "decisions": dict(one.decisions),
        "replaced": [{"path": old, "by": new} for old, new in one.replaced],
        "paths": [
            {
                "path": path,
                "source_port": route.port,
                "packets_sent": route.packets,
                "bytes_sent": route.sent,
                "acknowledged": route.acknowledged,
                "acknowledged_bytes": route.acknowledged_bytes,
                "lost": route.lost,
                "timed_out": route.timed_out,
                "late": route.late,
                "silences": route.silences,
                "acknowledged_after_ms": _times(route.took),
            }
            for path, route in sorted(one.routes.items())
        ],
    }
