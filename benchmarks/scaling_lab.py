"""Does the planner's simulation tell how steps grow with the number of nodes? Labs of 2 to 8 nodes.

    python benchmarks/scaling_lab.py --json benchmarks/results/scaling-lab.json

Each lab is N simulated hosts of one process each on a slow link (`evener lab`). Arithmetic is
slept, not computed, so that a machine of few cores can play eight nodes: what is measured is
Evener's reduction, its overlap and the link. What is predicted comes from a profile of the step,
the link's rate and the cost model of `evener plan`, with nothing fitted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LAYERS, WIDTH = 8, 256
FORWARD_S, BACKWARD_S = 0.02, 0.04
MODES = ("exact", "exact+overlap", "fp16", "int8")
WARMUP, STEPS = 4, 5
MARK = "@scaling "


def worker(mode: str, profile: str) -> None:
    """One rank."""
    os.environ["EVENER_PROFILE"] = profile
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from evener.ddp import accelerate

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            time.sleep(FORWARD_S)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
            time.sleep(BACKWARD_S)
            return gradient.clone()

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(Slow.apply(x))

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    net = nn.Sequential(*[Layer(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    form, _, overlap = mode.partition("+")
    model = accelerate(
        DistributedDataParallel(net), optimizer if overlap else None, wire=form, bucket_bytes=0
    )
    x = torch.randn(2, WIDTH, requires_grad=True)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(WARMUP):
        step()
    # Nothing of the warm-up may be left for the first step, as the last leaves nothing behind.
    model.evener_steps.finish("")
    dist.barrier()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    model.evener_steps.finish("")
    took = (time.perf_counter() - began) / STEPS * 1e3
    print(f"{MARK}{json.dumps({'rank': dist.get_rank(), 'step_ms': took})}", flush=True)


def measure(nodes: int, mode: str, rate: str) -> tuple[float, dict[str, Any]]:
    """Milliseconds of a step (the slowest rank's) and the profile that rank 0 left."""
    with tempfile.TemporaryDirectory() as folder:
        profile = str(Path(folder) / "profile.json")
        command = [sys.executable, "-m", "evener", "lab", "run", "--nodes", str(nodes)]
        command += ["--slots", "1", "--link", rate, "--queue", "50ms", "--keep", folder, "--"]
        command += [sys.executable, __file__, "--worker", mode, "--profile", profile]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        found = [
            json.loads(line.partition(MARK)[2]) for line in done.stdout.splitlines() if MARK in line
        ]
        if len(found) != nodes:
            raise SystemExit(f"{nodes} nodes, {mode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return max(rank["step_ms"] for rank in found), json.loads(Path(profile).read_text())


def predict(nodes: int, mode: str, rate: str, raw: dict[str, Any]) -> float:
    """Milliseconds of a step by the cost model."""
    from evener.base.units import parse_rate
    from evener.comm import wires
    from evener.comm.planner.choose import choose
    from evener.comm.planner.costs import Link, of_network
    from evener.comm.profile import StepProfile

    between = Link.of_rate(parse_rate(rate), 100, 0.94)
    costs = of_network(nodes, 1, between, Link(0.01, 1e6), wires.papers(), 1e6)
    form, _, overlap = mode.partition("+")
    made = choose(StepProfile.from_json(raw), costs, [form], overlap=bool(overlap), algorithm="2d")
    return made.step_ms


def main() -> None:
    """All labs, one after another."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--worker", metavar="MODE", help=argparse.SUPPRESS)
    parser.add_argument("--profile", help=argparse.SUPPRESS)
    parser.add_argument("--nodes", default="2,4,8", help="numbers of nodes (default: %(default)s)")
    parser.add_argument("--rate", default="40mbit", help="of each node (default: %(default)s)")
    parser.add_argument("--modes", default=",".join(MODES), help="default: %(default)s")
    parser.add_argument("--json", metavar="PATH", help="write the figures")
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.profile)
        return
    rows = []
    for nodes in map(int, given.nodes.split(",")):
        for mode in given.modes.split(","):
            took, profile = measure(nodes, mode, given.rate)
            expected = predict(nodes, mode, given.rate, profile)
            rows.append(
                {"nodes": nodes, "mode": mode, "measured_ms": took, "predicted_ms": expected}
            )
            print(
                f"{nodes} nodes, {mode:14} measured {took:7.1f} ms, predicted {expected:7.1f} ms "
                f"({100 * expected / took - 100:+.1f}%)",
                flush=True,
            )
    errors = [abs(row["predicted_ms"] / row["measured_ms"] - 1) for row in rows]
    print(f"median error {100 * statistics.median(errors):.1f}%, most {100 * max(errors):.1f}%")
    if given.json:
        record = {
            "schema": "evener.scaling-lab/1",
            "command": "python " + " ".join(sys.argv),
            "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
            "load": os.getloadavg()[0],
            "rate": given.rate,
            "layers": LAYERS,
            "gradient_bytes": LAYERS * WIDTH * WIDTH * 4,
            "rows": rows,
        }
        Path(given.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
