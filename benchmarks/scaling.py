r"""How a step grows with the number of nodes, by the planner's cost model; figures and a chart.

    python benchmarks/scaling.py --json benchmarks/results/scaling.json \
        --svg docs/images/scaling.svg

VGG16, batch 128 per GPU, TF32; the time of a step on one GPU is read from a measured result. The
rest is played in virtual time: docs/benchmarks/growth.md says what is assumed,
benchmarks/scaling_lab.py checks the model against labs of real processes.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from evener.comm import wires
from evener.comm.planner.choose import choose
from evener.comm.planner.costs import Link, of_network
from evener.comm.planner.forecast import profile_of
from evener.comm.profile import StepProfile
from evener.tools.bench.train import models

NODES = (2, 4, 8, 16, 64)
GPUS = 8
GBIT = 25
BATCH = 128
LADDER = wires.names()
WAYS: tuple[tuple[str, tuple[str, ...], bool, str], ...] = (
    ("flat ring, exact", ("exact",), False, "flat"),
    ("two levels, exact", ("exact",), False, "2d"),
    ("exact + overlap", ("exact",), True, "2d"),
    ("FP16 + overlap", ("fp16",), True, "2d"),
    ("INT8 + overlap", ("int8",), True, "2d"),
    ("top-k 1% + overlap", ("topk",), True, "2d"),
    ("auto, floor INT8, + overlap", wires.candidates("int8"), True, "auto"),
)
COLOURS = ("#9a9a9a", "#5b6b7a", "#3f7cac", "#2a9d8f", "#e9a23b", "#b5179e", "#d1495b")


def one_gpu_ms(result: Path) -> float:
    """Milliseconds of a step on one GPU, from a result of `evener bench train`."""
    raw = json.loads(result.read_text(encoding="utf-8"))
    rates = sorted(run["rate"] for run in raw["runs"] if run["row"] == "one" and run["rate"])
    return raw["settings"]["batch_size"] / rates[len(rates) // 2] * 1e3


def rows(profile: StepProfile) -> list[dict[str, Any]]:
    """A row a way and number of nodes."""
    found = []
    for nodes in NODES:
        costs = of_network(
            nodes,
            GPUS,
            Link.of_rate(GBIT * 1e9, 50, 0.94),
            Link.of_rate(1200e9, 5),
            wires.papers(),
            2e9,
        )
        for name, forms, overlap, algorithm in WAYS:
            made = choose(profile, costs, forms, overlap=overlap, algorithm=algorithm)
            found.append(
                {
                    "nodes": nodes,
                    "way": name,
                    "step_ms": made.step_ms,
                    "efficiency": made.compute_ms / made.step_ms,
                    "forms": [choice.form for choice in made.choices],
                }
            )
    return found


def chart(found: list[dict[str, Any]]) -> str:
    """Share of linear over nodes, as SVG."""
    width, height, left, top, right, bottom = 760, 420, 56, 40, 220, 46
    inner_w, inner_h = width - left - right, height - top - bottom

    def x(place: int) -> float:
        return left + inner_w * place / (len(NODES) - 1)

    def y(share: float) -> float:
        return top + inner_h * (1 - share)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{left}" y="22" font-size="15" font-weight="600">VGG16, {GPUS} GPUs a node, '
        f"{GBIT} Gb/s: share of linear (simulated)</text>",
    ]
    for tenth in range(0, 11, 2):
        at = y(tenth / 10)
        parts.append(
            f'<line x1="{left}" x2="{left + inner_w}" y1="{at:.1f}" y2="{at:.1f}" '
            f'stroke="#e4e4e4"/><text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">'
            f"{10 * tenth}%</text>"
        )
    for place, nodes in enumerate(NODES):
        parts.append(
            f'<text x="{x(place):.1f}" y="{height - bottom + 20}" text-anchor="middle">{nodes}'
            "</text>"
        )
    parts.append(
        f'<text x="{left + inner_w / 2}" y="{height - 8}" text-anchor="middle">nodes</text>'
    )
    ends = []
    for (name, *_), colour in zip(WAYS, COLOURS, strict=True):
        shares = [row["efficiency"] for row in found if row["way"] == name]
        points = " ".join(f"{x(i):.1f},{y(s):.1f}" for i, s in enumerate(shares))
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
        )
        ends.append((y(shares[-1]), name, colour))
    last = -1e9
    for at, name, colour in sorted(ends):
        last = max(at, last + 17)
        parts.append(
            f'<text x="{left + inner_w + 10}" y="{last + 4:.1f}" fill="{colour}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--result", default="benchmarks/results/vgg16-2x2-25gbit.json")
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--svg", metavar="PATH")
    given = parser.parse_args()
    compute = one_gpu_ms(Path(given.result))
    profile = profile_of(
        lambda: models.build("vgg16"), lambda: (torch.empty(BATCH, 3, 224, 224),), compute, 8 << 20
    )
    found = rows(profile)
    for row in found:
        print(
            f"{row['nodes']:3} nodes, {row['way']:30} {row['step_ms']:8.1f} ms "
            f"{100 * row['efficiency']:5.0f}%"
        )
    if given.json:
        record = {
            "schema": "evener.scaling/1",
            "command": "python " + " ".join(sys.argv),
            "model": "vgg16",
            "batch": BATCH,
            "gpus_a_node": GPUS,
            "network_gbit": GBIT,
            "compute_ms": compute,
            "compute_from": given.result,
            "rows": found,
        }
        Path(given.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if given.svg:
        Path(given.svg).write_text(chart(found), encoding="utf-8")


if __name__ == "__main__":
    main()
