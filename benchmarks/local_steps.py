"""Tokens per second with and without local steps: a GPT on simulated nodes with a slow network.

    python benchmarks/local_steps.py [--ways none:ddp,100mbit:ddp,100mbit:16:exact,...]
        [--nodes 4] [--steps 128] [--repeats 2] [--step 0] [--speeds 1] [--json FILE]

Each way is the rate of a node's card (`wan`: 100 Mb/s, 80 ms there and back, 1% of packets lost;
`far`: 1 Gb/s, 80 ms), and what trains: DistributedDataParallel (`ddp`), or local
steps as `N:FORM`; `N+M:FORM` lets an exchange run behind the next M steps, `auto:FORM` chooses N
and M. The ways take turns. Reported: tokens per second of all ranks from the second half of a run
on, in which there are exchanges, and their median's ratio to the first way. All nodes share this
machine's cores, so the ratio is right and the rate is not one of a cluster. A step lasts `--step`
seconds, whatever its arithmetic takes: the rest is slept, as a host sleeps while its GPU computes.
Nodes have `--speeds` in turn: at 0.5 a step lasts twice as long.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from evener.ddp import accelerate
from evener.tools.bench.train.transformers import GPT, Shape

WAYS = (
    "none:ddp,none:16:exact,100mbit:ddp,100mbit:16:exact,100mbit:16+4:exact,100mbit:auto:exact,"
    "100mbit:16:int4"
)
SHAPE = Shape(layers=4, heads=4, width=128, symbols=256, context=64)
ROWS = 4
LINKS = {"wan": "100mbit,delay=40ms,loss=1%", "far": "1gbit,delay=40ms"}


def be_a_rank(given: argparse.Namespace) -> None:
    """Train on random symbols; rank 0 says how fast."""
    os.environ.update(EVENER_LOG="warning", LIGHT_TOPK_THRESHOLD="0")
    harness.join()
    torch.manual_seed(0)
    net = GPT(SHAPE)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model: Any = DistributedDataParallel(net)
    rounds, _, form = given.way.partition(":")
    if rounds != "ddp":
        every, _, overlap = rounds.partition("+")
        how = {"every": "auto"} if every == "auto" else {"every": int(every)}
        if overlap:
            how["overlap"] = int(overlap)
        model = accelerate(model, optimizer, mode=form, **how)
    torch.manual_seed(dist.get_rank())
    speeds = [float(speed) for speed in given.speeds.split(",")]
    lasts = given.step / speeds[dist.get_rank() % len(speeds)]
    first = given.steps // 2
    began = 0.0
    for step in range(given.steps):
        if step == first:
            dist.barrier()
            began = time.perf_counter()
        due = time.perf_counter() + lasts
        x = torch.randint(SHAPE.symbols, (ROWS, SHAPE.context))
        loss = cross_entropy(model(x).flatten(0, 1), x.flatten())
        optimizer.zero_grad()
        loss.backward()
        time.sleep(max(0.0, due - time.perf_counter()))
        optimizer.step()
    dist.barrier()
    if dist.get_rank() == 0:
        size = sum(p.numel() for p in net.parameters())
        taken = time.perf_counter() - began
        tokens = (given.steps - first) * ROWS * SHAPE.context * dist.get_world_size()
        chosen = [] if rounds == "ddp" else [model.evener.every, model.evener.overlap]
        harness.say(rate=tokens / taken, parameters=size, rounds=chosen)


def main() -> None:
    """Let the ways take turns, and show the table."""
    parser = harness.arguments(__doc__, json="local-steps.json")
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--step", type=float, default=0.0, help="seconds")
    parser.add_argument("--speeds", default="1", help="of the nodes, in turn; of their --step")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        be_a_rank(given)
        return
    ways = given.ways.split(",")
    rates: dict[str, list[float]] = {way: [] for way in ways}
    rounds: dict[str, list[list[int]]] = {way: [] for way in ways}
    for _ in range(given.repeats):
        for way in ways:
            link, _, what = way.partition(":")
            argv = [sys.executable, str(Path(__file__).resolve()), "--way", what]
            argv += harness.arguments_of(given, "steps", "step", "speeds")
            job = harness.in_lab(f"{given.nodes}x1@{LINKS.get(link, link)}", argv, limit=900)
            if job.failed:
                raise SystemExit(f"{way}: {job.failed}")
            rates[way].append(job.row["rate"])
            rounds[way].append(job.row["rounds"])
            print(way, job.row, flush=True)
            harness.keep(given, rates=rates, rounds=rounds, parameters=job.row["parameters"])
    middle = {way: statistics.median(found) for way, found in rates.items() if found}
    rows = [[way, f"{rate:.0f}", f"{rate / middle[ways[0]]:.2f}"] for way, rate in middle.items()]
    print(harness.show(["", "tokens/s", "of the first"], rows))


if __name__ == "__main__":
    main()
