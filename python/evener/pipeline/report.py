"""A pipeline's step as a page that needs no network: its stages, and the timeline of every rank,
predicted above measured.

    evener pipeline plan model.py:make --html plan.html        the prediction
    pipe.record("step.json")  ...  evener pipeline report step.json      with what was measured
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from evener.base.page import opening
from evener.errors import UsageError
from evener.pipeline.plan import Plan
from evener.pipeline.simulate import Mark

_COLOURS = {"F": "#1f5fa8", "B": "#2e7d4f", "I": "#2e7d4f", "W": "#8a6d00", "send": "#b3561e"}
_NAMES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights",
          "send": "transfer"}  # fmt: skip
_ROW = 22


def read(path: str | Path) -> dict[str, Any]:
    """A plan or a recording. Raises UsageError where it is none."""
    try:
        record: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        plan = record["plan"]
        _ = plan["stages"], plan["marks"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is no plan of a pipeline: {error}",
            "write one with `evener pipeline plan -o FILE`, or pipe.record(FILE)",
        ) from None
    return record


def headline(record: dict[str, Any]) -> str:
    """The page in a sentence."""
    predicted = record["plan"]["step_seconds"] * 1e3
    measured = record.get("measured")
    if not measured:
        return f"A step of {predicted:.1f} ms is expected"
    return (
        f"A step takes {measured['step_seconds'] * 1e3:.1f} ms, {predicted:.1f} ms were predicted"
    )


def page(record: dict[str, Any]) -> str:
    """The record as one HTML document."""
    import jinja2  # not at the top: a plan that is not shown needs no template

    plan = Plan.from_dict(record["plan"])
    measured = record.get("measured")
    lines = [("predicted", plan.marks)]
    if measured:
        lines.append(("measured", [Mark(*mark) for mark in measured["marks"]]))
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    text = resources.files("evener.pipeline").joinpath("page.html.j2").read_text(encoding="utf-8")
    stages = []
    for stage in plan.stages:
        took = measured["stages"].get(str(stage.index)) if measured else None
        stages.append({"plan": stage, "measured": took})
    return environment.from_string(text).render(
        opening=opening(headline(record), _STYLE),
        headline=headline(record),
        plan=plan,
        stages=stages,
        measured=measured,
        drawings=[_drawing(lines, plan.ranks, width) for width in ("wide", "narrow")],
        keys=[(kind, _COLOURS[kind], _NAMES[kind]) for kind in _used(lines)],
    )


_STYLE = """
td.name, th.name { text-align: left; }
.key { display: inline-block; width: 12px; height: 12px; margin: 0 5px 0 12px; }
.key:first-child { margin-left: 0; }
"""


def _used(lines: list[tuple[str, list[Mark]]]) -> list[str]:
    there = {mark.kind for _, marks in lines for mark in marks}
    return [kind for kind in _COLOURS if kind in there]


def _drawing(lines: list[tuple[str, list[Mark]]], ranks: int, page: str) -> dict[str, Any]:
    """Rows, bars and ticks of the timeline in pixels, for a wide page or a narrow one (there a
    row's name stands above it). One scale for all rows, so that lengths compare."""
    narrow = page == "narrow"
    width, left, above = (356, 0, 15) if narrow else (1140, 110, 0)
    row = _ROW + above
    end = max((mark.end for _, marks in lines for mark in marks), default=1.0)
    scale = (width - left) / end
    rows: list[dict[str, Any]] = []
    bars: list[dict[str, Any]] = []
    for rank in range(ranks):
        for name, marks in lines:
            y = len(rows) * row
            rows.append({"text": f"rank {rank}, {name}", "y": y + (12 if narrow else 15),
                         "line": y + row})  # fmt: skip
            bars += [_bar(m, left, y + above, scale, ranks) for m in marks if m.rank == rank]
    bottom, steps = len(rows) * row, 4 if narrow else 10
    ticks = [
        {
            "x": round(left + (width - left) * tick / steps),
            "text": f"{end * tick / steps * 1e3:.{1 if end < 0.1 else 0}f} ms",
            "anchor": "end" if tick == steps else "start",
        }
        for tick in range(0, steps + 1, 2)
    ]
    return {"page": page, "width": width, "left": left, "height": bottom + 26, "bottom": bottom,
            "rows": rows, "bars": bars, "ticks": ticks}  # fmt: skip


def _bar(mark: Mark, left: float, y: float, scale: float, ranks: int) -> dict[str, Any]:
    transfer = mark.kind == "send"
    took = (mark.end - mark.begin) * 1e3
    return {
        "x": round(left + mark.begin * scale, 1),
        "y": y + (_ROW - 5 if transfer else 3),
        "width": round(max(0.4, (mark.end - mark.begin) * scale), 1),
        "height": 3 if transfer else _ROW - 8,
        "colour": _COLOURS[mark.kind],
        "opacity": 0.95 if mark.stage // ranks % 2 == 0 else 0.55,
        "text": f"{_NAMES[mark.kind]} of microbatch {mark.microbatch}, stage {mark.stage}: "
        f"{took:.2f} ms",
    }


def write(plan: Plan, everyone: list[Any], path: str | Path) -> None:
    """Write what all ranks measured of a step, beside the plan. everyone: (marks, seconds, bytes
    of memory at the peak) of each rank; their clocks begin with the step."""
    marks = [mark for own, _, _ in everyone for mark in own]
    step = max(seconds for _, seconds, _ in everyone)
    stages: dict[str, dict[str, float]] = {}
    for stage in plan.stages:
        own = [mark for mark in marks if mark[2] == stage.index]
        took = {
            "forward": sum(m[5] - m[4] for m in own if m[0] == "F"),
            "backward": sum(m[5] - m[4] for m in own if m[0] != "F"),
        }
        stages[str(stage.index)] = {k: v / plan.microbatches for k, v in took.items()}
    busy = [sum(mark[5] - mark[4] for mark in own) for own, _, _ in everyone]
    mean = sum(busy) / len(busy)
    record = {
        "schema": "evener.pipeline/1",
        "fits": True,
        "plan": plan.to_dict(),
        "measured": {
            "step_seconds": step,
            "bubble": 1 - mean / step if step else 0.0,
            "imbalance": max(busy) / mean if mean else 1.0,
            "memory": [peak for _, _, peak in everyone],
            "stages": stages,
            "marks": marks,
        },
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
