"""A trace as one HTML page that needs no network: for each connection what was confirmed, what was
in flight, how long a packet took, and a row per path with its losses and silences.

Time is cut into columns. A path's column is blue, darker where more bytes were confirmed; a red
tick is a loss, and a black bar a silence.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from evener.base.page import opening
from evener.net.trace import pcapng
from evener.net.trace.pcapng import Event
from evener.net.trace.summary import Connection, Summary, percentile

MOST = 12
"""Connections that are drawn."""
_COLUMNS = 240
_ROW, _CHART = 14, 90


def page(summary: Summary) -> str:
    """The page. Connections that sent nothing worth drawing are only counted."""
    drawn = [one for one in summary.connections if any(r.acknowledged for r in one.routes.values())]
    lost = sum(r.lost + r.timed_out for one in drawn for r in one.routes.values())
    sent = sum(r.packets for one in drawn for r in one.routes.values())
    longest = max((one.longest for one in drawn), default=0.0)
    head = f"{sent:,} packets, {lost:,} lost, longest stall {longest:.1f} ms"
    parts = [
        opening(head, _STYLE),
        f"<header><p>evener net trace, {len(summary.connections)} connection(s)</p>"
        f"<h1>{escape(head)}</h1></header>",
    ]
    if summary.left_out:
        parts.append(
            f"<p><b>{summary.left_out:,} records were left out</b>: they came faster than they "
            "could be written. Counts are too small by them.</p>"
        )
    if drawn:
        parts.append(
            "<p>Blue: bytes of a path that were confirmed, darker where more. Red: a packet was "
            "lost. Black: the path was silent. Green: in flight; grey: the window.</p>"
        )
    parts += [_connection(one, sent > 0) for one in drawn[:MOST]]
    if len(drawn) > MOST:
        parts.append(f"<p>{len(drawn) - MOST} more connection(s) are in `--json`.</p>")
    if not drawn:
        parts.append("<p>No connection has sent anything that was acknowledged.</p>")
    return "\n".join([*parts, "</main></body></html>\n"])


def _connection(one: Connection, packets: bool) -> str:
    name = f"{one.process} to {one.peer or f'connection {one.number}'}"
    facts = [
        (f"{sum(r.sent for r in one.routes.values()) / 1e6:,.1f} MB sent in " if packets else "")
        + f"{one.seconds:.2f} s",
        f"round trip {percentile(one.trips, 0.5) / 1e3:.2f} ms, p99 "
        f"{percentile(one.trips, 0.99) / 1e3:.2f} ms",
        f"longest stall {one.longest:.1f} ms",
        f"{len(one.replaced)} path(s) replaced",
        ", ".join(f"{count} x {why}" for why, count in one.decisions.most_common()),
        "dropped: " + ", ".join(f"{n} x {why}" for why, n in one.dropped.most_common())
        if one.dropped
        else "",
        f"over: {one.over}" if one.over else "",
    ]
    return "\n".join(
        [
            f"<h2>{escape(name)}</h2>",
            f"<p>{escape('; '.join(fact for fact in facts if fact))}.</p>",
            *(_figure(one, width) for width in ("wide", "narrow")),
        ]
    )


class _Columns:
    """Time in columns, and what fell into each."""

    def __init__(self, one: Connection, count: int) -> None:
        self.count = count
        self.begin, self.length = one.begin, max(one.end - one.begin, 1)

    def of(self, event: Event) -> int:
        return min(int((event.at - self.begin) * self.count / self.length), self.count - 1)

    def seconds(self) -> float:
        return self.length / 1e9 / self.count


def _figure(one: Connection, page_width: str) -> str:
    narrow = page_width == "narrow"
    whole, left = (356, 44) if narrow else (1140, 110)
    columns = _Columns(one, _COLUMNS // 2 if narrow else _COLUMNS)
    step = (whole - left) / columns.count
    paths = sorted(
        path for path, route in one.routes.items() if route.acknowledged or route.silences
    )
    confirmed = [0.0] * columns.count
    flying = [0.0] * columns.count
    window = [0.0] * columns.count
    trip = [0.0] * columns.count
    cells = {path: [0] * columns.count for path in paths}
    marks: list[tuple[int, int, str, str]] = []
    for event in one.events:
        at = columns.of(event)
        if event.kind in (pcapng.ARRIVED, pcapng.LOST):
            flying[at] = max(flying[at], event.flying / 1e3)
            window[at] = max(window[at], event.window / 1e3)
        if event.kind == pcapng.ARRIVED:
            confirmed[at] += event.size
            trip[at] = max(trip[at], event.trip / 1e3)
            if event.path in cells:
                cells[event.path][at] += event.size
        elif event.kind in (pcapng.LOST, pcapng.SILENT) and event.path in cells:
            kind = "lost" if event.kind == pcapng.LOST else "silent"
            marks.append((event.path, at, kind, event.comment))
    rate = [bytes_ * 8e-6 / columns.seconds() for bytes_ in confirmed]
    height = 3 * (_CHART + 22) + len(paths) * _ROW + 30
    out = [
        f'<div class="{page_width}"><svg viewBox="0 0 {whole} {height}" role="img" '
        f'style="max-width:{whole}px" aria-label="{escape(one.peer)} over time">'
    ]
    y = 0.0
    for title, unit, lines in (
        ("confirmed", "Mb/s", [(rate, "rate")]),
        ("in flight, of the window", "kB", [(window, "window"), (flying, "flying")]),
        ("longest round trip", "ms", [(trip, "trip")]),
    ):
        out.append(_chart(title, unit, lines, y, left, step, whole))
        y += _CHART + 22
    most = max((max(row) for row in cells.values()), default=0) or 1
    rows = {path: y + place * _ROW for place, path in enumerate(paths)}
    for path, row in cells.items():
        top = rows[path]
        port = one.routes[path].port
        label = f"{path}" if narrow else f"path {path}" + (f" :{port}" if port else "")
        out.append(f'<text x="0" y="{top + 11}">{label}</text>')
        for at, size in enumerate(row):
            if size:
                shade = 0.15 + 0.85 * size / most
                out.append(
                    f'<rect x="{left + at * step:.1f}" y="{top + 2}" width="{step + 0.2:.1f}" '
                    f'height="{_ROW - 3}" class="sent" opacity="{shade:.2f}"/>'
                )
    seen: set[tuple[int, int, str]] = set()
    for path, at, kind, comment in marks:
        if (path, at, kind) in seen:  # the first of a column says enough
            continue
        seen.add((path, at, kind))
        out.append(
            f'<rect x="{left + at * step:.1f}" y="{rows[path] + 1}" '
            f'width="{max(step, 3) if kind == "silent" else 1.6:.1f}" height="{_ROW - 2}" '
            f'class="{kind}"><title>{escape(comment)}</title></rect>'
        )
    bottom = y + len(paths) * _ROW
    ticks = 4 if narrow else 10
    for tick in range(ticks + 1):
        x = left + (whole - left) * tick / ticks
        label = f"{columns.length / 1e9 * tick / ticks:.2f} s"
        anchor = "end" if tick == ticks else "middle"
        out.append(f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="{anchor}">{label}</text>')
    out.append("</svg></div>")
    return "".join(out)


def _chart(
    title: str,
    unit: str,
    lines: list[tuple[list[float], str]],
    top: float,
    left: float,
    step: float,
    whole: float,
) -> str:
    most = max((max(values) for values, _ in lines), default=0.0) or 1.0
    bottom = top + _CHART + 14
    scale: Callable[[float], float] = lambda value: bottom - value * _CHART / most  # noqa: E731
    out = [
        f'<text x="{left}" y="{top + 10}">{escape(title)}, {unit}</text>',
        f'<text x="{left - 6}" y="{top + 24}" text-anchor="end">{most:,.4g}</text>',
        f'<text x="{left - 6}" y="{bottom}" text-anchor="end">0</text>',
        f'<line x1="{left}" x2="{whole}" y1="{bottom}" y2="{bottom}"/>',
    ]
    for values, class_ in lines:
        points = " ".join(
            f"{left + (at + 0.5) * step:.1f},{scale(value):.1f}" for at, value in enumerate(values)
        )
        out.append(f'<polyline points="{points}" class="{class_}"/>')
    return "".join(out)


_STYLE = """
svg line { stroke: var(--rule); } polyline { fill: none; stroke-width: 1.5; }
.rate { stroke: #1f5fa8; } .window { stroke: #8c959f; } .flying { stroke: #2e7d4f; }
.trip { stroke: #d69400; } .sent { fill: #1f5fa8; } .lost { fill: #d1242f; }
.silent { fill: var(--ink); }
"""
