"""Where a recorded step was longer than its plan: its own stage times and transfers, simulated.

    python benchmarks/pipeline_again.py benchmarks/results/pipeline-*-probed-*-step.json

For each record (`pipe.record`, the -step.json of pipeline_gpu.py): the step as it was planned; with
the stage times of the passes that no transfer ran beside (each stage's first); with the median
stage times of the step; and with transfers longer by a factor. The error is that to the measured
step.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from evener.pipeline.simulate import Link, Network, StageCost, simulate

Passes = list[tuple[float, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--factors", default="1,1.25,1.5", help="of the planned transfers")
    args = parser.parse_args()
    for path in args.files:
        record = json.loads(path.read_text(encoding="utf-8"))
        plan, measured = record["plan"], record["measured"]
        step = measured["step_seconds"]
        sends = [mark[5] - mark[4] for mark in plan["marks"] if mark[0] == "send"]
        print(f"{path.name}: {plan['schedule']}, measured {step * 1e3:.0f} ms")
        print(f"  bubble {measured['bubble']:.1%}, transfers planned as {max(sends) * 1e3:.1f} ms")
        for name, passes in sources(plan, measured["marks"]).items():
            times = ", ".join(f"{f * 1e3:.1f} + {b * 1e3:.1f}" for f, b in passes)
            print(f"  {name}: {times} ms")
            for factor in map(float, args.factors.split(",")):
                size = plan["stages"][0]["sent"]
                link = Link(size / (max(sends) * factor), 0.0)
                stages = [StageCost(f, b / 2, b / 2, size, size) for f, b in passes]
                made = simulate(plan["schedule"], stages, plan["ranks"], plan["microbatches"],
                                Network(link, link))  # fmt: skip
                print(f"    transfers x {factor:<5g} {made.step * 1e3:6.0f} ms "
                      f"{made.step / step - 1:+6.1%}   bubble {made.bubble:.1%}")  # fmt: skip


def sources(plan: dict[str, Any], marks: list[list[Any]]) -> dict[str, Passes]:
    """(forward, backward) seconds of each stage, by where they come from."""

    def took(stage: int, forward: bool) -> list[float]:
        own = [m for m in marks if m[2] == stage and (m[0] == "F") == forward]
        return [m[5] - m[4] for m in sorted(own, key=lambda m: m[3])]

    stages = range(len(plan["stages"]))
    return {
        "planned": [(s["forward"], s["input"] + s["weight"]) for s in plan["stages"]],
        "first passes": [(took(s, True)[0], took(s, False)[0]) for s in stages],
        "medians": [
            (statistics.median(took(s, True)), statistics.median(took(s, False))) for s in stages
        ],
    }


if __name__ == "__main__":
    main()
