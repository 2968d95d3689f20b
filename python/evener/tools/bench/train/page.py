"""One HTML page that needs nothing else: the chart as inline SVG, the table, what made it.

The bars are placed in per cent and their texts in pixels, so the page is as readable on a phone as
on paper without a script. The template is page.html.j2; all values are escaped by jinja2.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any

from evener.tools.bench.train.columns import PLAIN
from evener.tools.bench.train.plan import Row
from evener.tools.bench.train.progress import duration
from evener.tools.bench.train.results import Results
from evener.tools.bench.train.table import grid, number, share
from evener.tools.bench.train.verdict import verdict

_BAR_HEIGHT = 46


@dataclass(frozen=True)
class Bar:
    """One bar; widths and places in per cent of the chart."""

    title: str
    kind: str
    y: int
    value: str
    detail: str = ""
    spread: str = ""
    width: float = 0.0
    low: float | None = None
    high: float | None = None
    failed: bool = False


@dataclass(frozen=True)
class Chart:
    """The bars of one row."""

    label: str
    alt: str
    height: int
    bars: tuple[Bar, ...]
    reference: float | None


def render(results: Results) -> str:
    """The page."""
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=False
    )
    source = resources.files(__package__).joinpath("page.html.j2").read_text(encoding="utf-8")
    text: str = environment.from_string(source).render(
        results=results,
        grid=grid(results),
        verdict=verdict(results),
        charts=_charts(results),
        one=_one(results),
        took=duration(results.duration_s),
        facts=_facts(results),
    )
    return text


def _one(results: Results) -> dict[str, str] | None:
    rate = _alone(results)
    label = next((row.title for row in results.rows if row.ranks == 1), "")
    return {"label": label, "text": number(rate)} if rate else None


def _alone(results: Results) -> float | None:
    for row in results.rows:
        if row.ranks == 1:
            cell = results.cell(row, PLAIN.name)
            return cell.rate.median if cell and cell.rate else None
    return None


def _charts(results: Results) -> list[Chart]:
    """A chart for every row of more than one rank, the whole cluster first; all on one scale."""
    alone = _alone(results)
    tops = [cell.rate.high for cell in results.cells() if cell.rate]
    scale = 100 / max([*tops, alone or 0]) if tops else 1.0
    rows = [row for row in reversed(results.rows) if row.ranks > 1]
    return [_chart(results, row, scale, alone) for row in rows]


def _chart(results: Results, row: Row, scale: float, alone: float | None) -> Chart:
    bars: list[Bar] = []
    for column in results.columns:
        y = len(bars) * _BAR_HEIGHT
        kind = "evener" if column.evener else "peer"
        cell = results.cell(row, column.name)
        if cell is None:
            continue
        if cell.reason or cell.rate is None:
            bars.append(Bar(column.title, kind, y, "failed", failed=True))
            continue
        rate = cell.rate
        several = rate.count > 1
        bars.append(
            Bar(
                title=column.title,
                kind=kind,
                y=y,
                value=number(rate.median),
                detail=share(cell.efficiency.median) if cell.efficiency else "",
                spread=f"{number(rate.low)} to {number(rate.high)}",
                width=round(rate.median * scale, 2),
                low=round(rate.low * scale, 2) if several else None,
                high=round(rate.high * scale, 2) if several else None,
            )
        )
    alt = f"{row.title}: " + ", ".join(f"{bar.title} {bar.value}" for bar in bars)
    reference = round(alone * scale, 2) if alone else None
    return Chart(row.title, alt, len(bars) * _BAR_HEIGHT, tuple(bars), reference)


def _facts(results: Results) -> list[tuple[str, str]]:
    facts = [(name, _value(value)) for name, value in results.machine.items()]
    facts += [(name, _value(value)) for name, value in results.versions.items()]
    facts += [(name, _value(value)) for name, value in results.settings.items()]
    facts += [(name, value) for name, value in results.environment.items()]
    return [(name, value) for name, value in facts if value]


def _value(value: Any) -> str:
    if isinstance(value, list):
        kinds = dict.fromkeys(map(str, value))
        return ", ".join(f"{value.count(kind)} x {kind}" for kind in kinds)
    return str(value)
