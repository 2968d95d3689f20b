"""The bandwidth curve: bus bandwidth over size, with the line rate and one link's rate."""

from __future__ import annotations

from math import log2

from markupsafe import Markup

from evener.tools.analyze.picture import Picture
from evener.tools.analyze.report import svg
from evener.tools.analyze.words import size

_WIDE, _NARROW = (900.0, 360.0), (356.0, 300.0)
_LEFT, _RIGHT, _TOP, _BOTTOM = 56.0, 14.0, 20.0, 44.0


def curve(picture: Picture, *, narrow: bool = False) -> Markup | None:
    """The figure, None without a table of at least two sizes. `narrow`: for a phone."""
    width, height = _NARROW if narrow else _WIDE
    found = picture.bandwidth
    if found is None:
        return None
    rows = sorted((row for row, _ in found.table.rows), key=lambda row: row.size)
    rows = [row for row in rows if row.size > 0]
    if len(rows) < 2 or rows[0].size == rows[-1].size or found.peak <= 0:
        return None
    levels = _levels(picture)
    # A level far above everything measured would flatten the curve: it is named, not drawn.
    top = max([found.peak, *(value for value, _ in levels if value < 6 * found.peak)]) * 1.08
    low, high = log2(rows[0].size), log2(rows[-1].size)

    def x(bytes_: float) -> float:
        return _LEFT + (log2(bytes_) - low) / (high - low) * (width - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return height - _BOTTOM - value / top * (height - _TOP - _BOTTOM)

    parts = []
    for tick in _ticks(top):
        parts.append(svg.line(_LEFT, y(tick), width - _RIGHT, y(tick), "grid"))
        parts.append(svg.text(_LEFT - 8, y(tick) + 4, f"{tick:g}", "end", "small"))
    step = max(1, round((high - low) / (4 if narrow else 8)))
    for power in range(int(low), int(high) + 1, step):
        if power >= low:
            parts.append(
                svg.text(x(2**power), height - _BOTTOM + 18, size(2**power), class_="small")
            )
    parts.append(svg.text(_LEFT, 12, "bus bandwidth, GB/s", "start", "small"))
    parts.append(svg.text(width / 2, height - 6, "message size", class_="small"))
    for value, name in levels:
        if value <= top:
            parts.append(svg.line(_LEFT, y(value), width - _RIGHT, y(value), "level"))
            parts.append(
                svg.text(_LEFT + 8, y(value) - 5, f"{name}: {value:.4g}", "start", "small")
            )
    for name, class_ in (("out_of_place", "series out"), ("in_place", "series in")):
        points = [(row, getattr(row, name)) for row in rows if getattr(row, name)]
        if not points:
            continue
        d = "M" + " L".join(f"{x(row.size):.1f},{y(side.busbw):.1f}" for row, side in points)
        parts.append(svg.path(d, class_))
        for row, side in points:
            tip = f"{size(row.size)} {name.replace('_', ' ')}: {side.busbw:.4g} GB/s"
            px, py = x(row.size), y(side.busbw)
            if name == "out_of_place":
                parts.append(svg.tag("circle", svg.title(tip), cx=px, cy=py, r=3, class_="dot out"))
            else:
                parts.append(
                    svg.tag(
                        "rect",
                        svg.title(tip),
                        x=px - 2.5,
                        y=py - 2.5,
                        width=5,
                        height=5,
                        class_="dot in",
                    )
                )
    px, py = x(found.peak_row.size), y(found.peak)
    end = px > width * 0.75
    parts.append(
        svg.text(
            px, py - 9, f"peak {found.peak:.4g}", "end" if end else "middle", "small strong halo"
        )
    )
    label = f"Bus bandwidth over message size, peak {found.peak:.4g} GB/s"
    return svg.figure(width, height, label, parts)


def _levels(picture: Picture) -> list[tuple[float, str]]:
    levels = []
    if picture.line_rate:
        levels.append((picture.line_rate, "line rate of the cards"))
    if picture.traffic and picture.traffic.today.one_link < picture.traffic.today.bound:
        levels.append((picture.traffic.today.one_link / 1e9, "one inter-switch link"))
    return levels


def _ticks(top: float) -> list[float]:
    steps = (s * 10.0**e for e in range(-3, 300) for s in (1, 2, 5))
    step = next((step for step in steps if top / step <= 7), top)
    return [step * i for i in range(int(top / step) + 1)]
