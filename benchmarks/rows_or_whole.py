"""An embedding's gradient over a slow network: as rows, or whole as top-k.

    python benchmarks/rows_or_whole.py [--link 50mbit] [--words 33278] [--width 256] [--json FILE]

Two CPU processes as two nodes of a lab train an embedding and a small network with SGD, planned
with floor top-k. Each looks up 64 x 128 random words per step. `rows`: what was looked up crosses
as rows; `whole`: as `evener.comm.parts` decides; `ddp`: plain DDP. Reported: the median of the last
steps of the slower rank, once the planner has settled. Needs the rights that `evener lab` needs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

WAYS = ("ddp", "rows", "whole")
STEPS, MOST = 16, 400


def worker(way: str, words: int, width: int) -> None:
    """One rank; rank 0 prints the result."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import evener.ddp

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(words, width), nn.Linear(width, 64), nn.Tanh())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, planner = DistributedDataParallel(module), None
    if way != "ddp":
        model = evener.ddp.accelerate(model, optimizer, mode="auto", floor="topk")
        planner = model.evener_steps.planner
        if way == "rows":
            model.evener.parts.forms = ()
    drawn = torch.Generator().manual_seed(dist.get_rank())
    times: list[float] = []
    settled = 0
    while len(times) < settled + STEPS and len(times) < MOST:
        began = time.perf_counter()
        optimizer.zero_grad()
        model(torch.randint(words, (64, 128), generator=drawn)).square().mean().backward()
        optimizer.step()
        times.append(time.perf_counter() - began)
        if planner is not None and planner.kept is None:
            settled = len(times)
    slowest = torch.tensor(statistics.median(times[-STEPS // 2 :]))
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        found = {"way": way, "step_ms": 1e3 * slowest.item(), "settled_after": settled}
        print("RESULT " + json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # nothing is left to say


def main() -> int:
    """All ways, one after another."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--link", default="50mbit", help="of a node")
    parser.add_argument("--words", type=int, default=33_278)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/rows-or-whole.json"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.worker, given.words, given.width)
        return 0
    import torch

    from evener.tools.lab import Lab, Spec

    rows: list[dict[str, object]] = []

    def on_line(_rank: int, _node: str, _stream: str, line: str) -> None:
        if line.startswith("RESULT "):
            rows.append(json.loads(line.removeprefix("RESULT ")))
            print(rows[-1], flush=True)

    shape = ["--words", str(given.words), "--width", str(given.width)]
    for way in WAYS:
        with Lab(Spec.parse(f"2x1@{given.link},queue=20ms")) as lab:
            argv = [sys.executable, __file__, "--worker", way, *shape]
            status = lab.launch(argv, timeout=300, on_line=on_line).status
        if status:
            print(f"{way}: the job ended with status {status}")
            return 1
    record = {
        "command": " ".join(["python", "benchmarks/rows_or_whole.py", *sys.argv[1:]]),
        "machine": {"cpus": os.cpu_count(), "torch": torch.__version__},
        "rows": rows,
    }
    given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
