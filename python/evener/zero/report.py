"""A step seen: what was recorded as JSON, and a page of it that needs no network.

    engine.record(); ...three steps...; zero.report.write(engine, engine.recorded(), "steps.json")
    evener zero report steps.json

The page has the timeline of the recorded steps (one row a stream and lane; a mark's tooltip names
the chunk), where each chunk lives, and what was predicted beside what was measured.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.base.page import opening
from evener.errors import UsageError
from evener.zero.spans import Span, summary

if TYPE_CHECKING:
    from evener.zero.engine import Engine
    from evener.zero.probe import Probe

VERSION = 1
# The timeline is drawn for both widths; the page shows one of them.
_WIDTHS = ("wide", "narrow")
_COLOURS = {
    "compute": "#1f5fa8",
    "copy": "#d69400",
    "optimizer": "#2e7d4f",
    "communication": "#7b4fa8",
    "wait": "#b3261e",
    "step": "#57606a",
}
_ROW = 22


def write(engine: Engine, spans: list[Span], path: str | Path, probe: Probe | None = None) -> Path:
    """Write a recording as JSON; returns its path."""
    places = []
    for chunk in engine.chunks():
        states = sum(t.numel() * t.element_size() for t in chunk.states.tensors().values())
        gradient = chunk.gradient
        if gradient is not None:
            states += gradient.numel() * gradient.element_size()
        where = "accelerator" if chunk.resident else "host"
        if chunk.away is not None:
            places.append({"name": chunk.group.name, "where": "ssd",
                           "bytes": chunk.away.layout.bytes, "parameters": 0})  # fmt: skip
        places.append({"name": chunk.group.name, "where": where, "bytes": states,
                       "parameters": chunk.group.numel})  # fmt: skip
    total, used, peak = engine.store.host.usage()
    record = {
        "version": VERSION,
        "device": str(engine.device.device),
        "ranks": engine.world,
        "places": places,
        "host_arena": {"bytes": total, "used": used, "peak": peak},
        "accelerator_peak": engine.device.peak_bytes(),
        "plan": engine.plan.to_dict() if engine.plan else None,
        "probe": asdict(probe) if probe else None,
        "updated": engine.updated,
        "summary": summary(spans),
        "spans": [[s.kind, s.track, s.name, round(s.begin, 6), round(s.end, 6)] for s in spans],
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return path


def read(path: str | Path) -> dict[str, Any]:
    """A recording. Raises UsageError where it is none."""
    try:
        record: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        version = record["version"]
        _ = record["spans"], record["summary"], record["places"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is no recording of steps: {error}", "write one with zero.report.write"
        ) from None
    if version != VERSION:
        raise UsageError(f"{path} is of version {version}", f"this Evener reads {VERSION}")
    return record


def page(record: dict[str, Any]) -> str:
    """The recording as one HTML document."""
    found = record["summary"]
    plan = record["plan"]
    head = f"A step takes {found['step'] * 1000:.1f} ms"
    if plan:
        head += f", {plan['step_seconds'] * 1000:.1f} ms were predicted (bound by {plan['bound']})"
    parts = [
        opening(head, _STYLE),
        f"<header><p>evener zero, {found['steps']} recorded steps on {escape(record['device'])}, "
        f"{record['ranks']} rank(s)</p><h1>{escape(head)}</h1></header>",
        "<h2>Timeline</h2>",
        _legend(),
        *(_timeline([Span(*span) for span in record["spans"]], width) for width in _WIDTHS),
        "<h2>Where the time goes</h2>",
        _table(("of a step", "ms"), _times(found)),
        f"<p>{found['transfers hidden']:.0%} of the copies' time is hidden behind computation or "
        f"the optimizer; {found['exposed optimizer'] * 1000:.1f} ms of the optimizer's "
        f"{found['optimizer'] * 1000:.1f} ms are exposed. {_shares(record['updated'])}</p>",
        "<h2>Predicted against measured</h2>",
        _predicted(record),
        "<h2>Where the chunks live</h2>",
        _residency(record),
        "</main></body></html>\n",
    ]
    return "\n".join(parts)


def _times(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("step", found["step"]), ("forward", found["forward"]), ("backward", found["backward"])]
    rows += sorted(found["busy"].items())
    rows += [(f"wait: {name}", seconds) for name, seconds in sorted(found["waits"].items())]
    return [(name, f"{seconds * 1000:.2f}") for name, seconds in rows]


def _shares(updated: dict[str, int]) -> str:
    total = sum(updated.values())
    if not total:
        return "All states are on the accelerator."
    return (
        f"The cores updated {updated['host'] / total:.0%} of the host's states, the streaming lane "
        f"{updated['stream'] / total:.0%}."
    )


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><tr>{top}</tr>{body}</table></div>'


def _predicted(record: dict[str, Any]) -> str:
    plan, found = record["plan"], record["summary"]
    if not plan:
        return "<p>The places of chunks were given, so nothing was predicted.</p>"
    busy = found["busy"]
    times = plan["times"]
    gpu = record["accelerator_peak"] + plan["gpu_reserve"]
    host = record["host_arena"]["peak"] + plan["host_reserve"] + plan["offloaded"]

    def row(name: str, predicted: float, measured: float, unit: str) -> tuple[str, ...]:
        scale = 1000 if unit == "ms" else 1e-9
        ratio = measured / predicted if predicted else None
        share = "-" if ratio is None else f"{ratio:.2f}" if ratio < 100 else f"{ratio:,.0f}"
        return name, f"{predicted * scale:.2f} {unit}", f"{measured * scale:.2f} {unit}", share

    rows = [
        row("step", plan["step_seconds"], found["step"], "ms"),
        row("forward", times["forward"], found["forward"], "ms"),
        row("backward", times["backward"], found["backward"], "ms"),
        row("weights in (twice)", 2 * times["weights in"], busy.get("h2d", 0.0), "ms"),
        row("gradients out", times["gradients out"], busy.get("d2h", 0.0), "ms"),
        row("optimizer", times["host optimizer"] + times["device optimizer"],
            found["optimizer"], "ms"),
        row("accelerator memory", plan["gpu_bytes"], gpu, "GB"),
        row("host memory", plan["host_bytes"], host, "GB"),
    ]  # fmt: skip
    return _table(("", "predicted", "measured", "ratio"), rows)


def _legend() -> str:
    return "<p>" + " ".join(
        f'<span class="kind"><span class="key" style="background:{colour}"></span>{kind}</span>'
        for kind, colour in _COLOURS.items()
    ) + "</p>"  # fmt: skip


def _timeline(spans: list[Span], page_width: str) -> str:
    """The figure for a wide page, or for a narrow one: there a row's name stands above it."""
    narrow = page_width == "narrow"
    whole, left, name_height, ticks = (356, 0, 16, 4) if narrow else (1140, 200, 0, 10)
    pitch = _ROW + name_height
    steps = [span for span in spans if span.kind == "step"]
    steps = steps[1:] or steps  # as in `summary`
    if not steps:
        return "<p>No whole step was recorded.</p>"
    begin, end = min(s.begin for s in steps), max(s.end for s in steps)
    order = {kind: place for place, kind in enumerate(_COLOURS)}
    tracks = sorted({(order.get(s.kind, 9), s.track, s.kind) for s in spans if s.kind != "step"})
    rows = [("step", "steps")] + [(kind, track) for _, track, kind in tracks]
    on = Counter(track for _, track in rows)
    scale = (whole - left) / max(end - begin, 1e-9)
    height = len(rows) * pitch + 30
    out = [f'<div class="{page_width}"><svg viewBox="0 0 {whole} {height}" role="img" '
           f'style="max-width:{whole}px" aria-label="timeline of the recorded steps">']  # fmt: skip
    for number, (kind, track) in enumerate(rows):
        y = number * pitch + name_height
        name = track if on[track] == 1 or kind == track else f"{kind} ({track})"
        out.append(f'<text x="0" y="{number * pitch + 15}">{escape(name)}</text>')
        out.append(f'<line x1="{left}" x2="{whole}" y1="{y + _ROW}" y2="{y + _ROW}"/>')
        for span in spans:
            if (span.kind, span.track) != (kind, track) or span.end < begin or span.begin > end:
                continue
            x = left + (max(span.begin, begin) - begin) * scale
            width = max(0.4, (min(span.end, end) - max(span.begin, begin)) * scale)
            opacity = 0.45 if span.name.startswith("forward") or kind == "step" else 0.9
            label = f"{span.name}: {(span.end - span.begin) * 1000:.2f} ms"
            out.append(
                f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 6}" '
                f'fill="{_COLOURS.get(kind, "#999")}" opacity="{opacity}">'
                f"<title>{escape(label)}</title></rect>"
            )
    bottom = len(rows) * pitch
    for tick in range(ticks + 1):
        x = left + (whole - left) * tick / ticks
        label = f"{(end - begin) * tick / ticks * 1000:.0f} ms"
        out.append(f'<line x1="{x:.0f}" x2="{x:.0f}" y1="0" y2="{bottom}"/>')
        if tick == ticks - 1:
            continue  # the last one's label stands to its left
        anchor = "end" if tick == ticks else "start"
        out.append(f'<text x="{x:.0f}" y="{bottom + 16}" text-anchor="{anchor}">{label}</text>')
    out.append("</svg></div>")
    return "".join(out)


def _residency(record: dict[str, Any]) -> str:
    places = record["places"]
    total = max(1, sum(place["bytes"] for place in places))
    out = []
    for where in ("accelerator", "host", "ssd"):
        here = [place for place in places if place["where"] == where]
        size = sum(place["bytes"] for place in here)
        out.append(f"<h3>{where}: {len(here)} chunks, {size / 1e9:.2f} GB</h3><div class='bar'>")
        for place in here:
            label = f"{place['name']}: {place['parameters'] / 1e6:.1f} M parameters, " \
                    f"{place['bytes'] / 1e9:.3f} GB"  # fmt: skip
            share = 100 * place["bytes"] / total
            out.append(
                f'<i class="{where}" style="width:{share:.3f}%" title="{escape(label)}"></i>'
            )
        out.append("</div>")
    rows = [
        (p["name"], p["where"], f"{p['parameters'] / 1e6:.2f}", f"{p['bytes'] / 1e9:.3f}")
        for p in places
    ]
    table = _table(("chunk", "lives on", "M parameters", "GB"), rows)
    return "".join(out) + f"<details><summary>every chunk</summary>{table}</details>"


_STYLE = """
h3 { font-size: 1rem; margin: 10px 0 4px; }
.kind { white-space: nowrap; margin-right: 12px; }
.key { display: inline-block; width: 12px; height: 12px; margin-right: 5px; }
.bar { display: flex; height: 26px; overflow: hidden; }
.bar i { border-right: 1px solid var(--paper); min-width: 1px; }
.accelerator { background: #1f5fa8; } .host { background: #d69400; } .ssd { background: #7b4fa8; }
"""
