"""Tokens per second with and without local steps: a GPT on simulated nodes with a slow network.

    python benchmarks/local_steps.py [--ways none:ddp,100mbit:ddp,100mbit:16:exact,...]
        [--nodes 4] [--steps 128] [--repeats 2] [--step 0] [--speeds 1] [--json FILE]
    python benchmarks/local_steps.py --size gpt2 --nodes 2 --json FILE \\
        --ways nvlink:ddp,1gbit:ddp@8,1gbit:ddp:int4@8,1gbit:64+16:int4    # on two GPUs

Each way is the rate of a node's card (`wan`: 100 Mb/s, 80 ms there and back, 1% of packets lost;
`far`: 1 Gb/s, 80 ms; `nvlink`: all ranks in one node), and what trains: DistributedDataParallel
(`ddp`), with its gradients in a form (`ddp:FORM`), or local steps as `N:FORM`; `N+M:FORM` lets an
exchange run behind the next M steps, `auto:FORM` chooses N and M. `@COUNT` behind a way replaces
`--steps`; of local steps that many are timed. The ways take turns. Reported: tokens per second of
all ranks from the second half of a run on, in which there are exchanges, and their median's ratio
to the first way. A run has at least three rounds, and whole rounds are timed. All nodes share this
machine's cores, so the ratio is right and the rate is not one of a cluster. A step lasts `--step`
seconds, whatever its arithmetic takes: the rest is slept, as a host sleeps while its GPU computes.
Nodes have `--speeds` in turn: at 0.5 a step lasts twice as long. GPUs train under autocast in
bfloat16.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
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
# Rows of a rank's batch.
SIZES = {
    "small": (Shape(layers=4, heads=4, width=128, symbols=256, context=64), 4),
    "gpt2": (Shape(layers=12, heads=12, width=768, symbols=50257, context=1024), 8),
}
LINKS = {"wan": "100mbit,delay=40ms,loss=1%", "far": "1gbit,delay=40ms"}


def be_a_rank(given: argparse.Namespace) -> None:
    """Train on random symbols; rank 0 says how fast."""
    os.environ.update(EVENER_LOG="warning", LIGHT_TOPK_THRESHOLD="0")
    device = harness.join()
    shape, batch = SIZES[given.size]
    torch.manual_seed(0)
    net = GPT(shape).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3 if given.size == "small" else 3e-4)
    model: Any = DistributedDataParallel(net)
    what, _, steps = given.way.partition("@")
    rounds, _, form = what.partition(":")
    every, _, overlap = rounds.partition("+")
    count = int(steps or given.steps)
    first = count // 2
    if every == "ddp":
        model = accelerate(model, optimizer, mode=form) if form else model
    else:
        how = {"every": every if every == "auto" else int(every)}
        if overlap:
            how["overlap"] = int(overlap)
        model = accelerate(model, optimizer, mode=form, **how)
    if every.isdecimal():
        timed = int(steps) if steps else max(count // 2, 2 * int(every))
        first = max(0 if steps else first, int(every) + int(overlap or 0) + 1)
        count = first + -(-timed // int(every)) * int(every)
    torch.manual_seed(dist.get_rank())
    speeds = [float(speed) for speed in given.speeds.split(",")]
    lasts = given.step / speeds[dist.get_rank() % len(speeds)]
    began, sent, ends = 0.0, 0, []
    for step in range(count):
        if step == first:
            harness.settle()
            dist.barrier()
            began, sent = time.perf_counter(), harness.sent_bytes()
        due = time.perf_counter() + lasts
        x = torch.randint(shape.symbols, (batch, shape.context), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = cross_entropy(model(x).flatten(0, 1), x.flatten())
        optimizer.zero_grad()
        loss.backward()
        time.sleep(max(0.0, due - time.perf_counter()))
        optimizer.step()
        ends.append(time.perf_counter())
    harness.settle()
    dist.barrier()
    taken = time.perf_counter() - began
    equal = every == "ddp" or _equal(model.evener.state_dict()["shared"])
    if dist.get_rank() == 0:
        size = sum(p.numel() for p in net.parameters())
        tokens = (count - first) * batch * shape.context * dist.get_world_size()
        chosen = [] if every == "ddp" else [model.evener.every, model.evener.overlap]
        each = sorted(b - a for a, b in itertools.pairwise(ends[first:]))
        harness.say(
            rate=tokens / taken,
            parameters=size,
            rounds=chosen,
            steps=count - first,
            step_ms=[1e3 * each[len(each) * p // 100] for p in (50, 90, 99)],
            longest_ms=1e3 * each[-1],
            node_sent_mb=(harness.sent_bytes() - sent) / (count - first) / 1e6,
            loss=loss.item(),
            shared_weights_equal=equal,
        )


def _equal(shared: dict[str, torch.Tensor]) -> bool:
    """Whether all ranks have the same bits. Collective."""
    mine, theirs = hashlib.sha256(), [b""] * dist.get_world_size()
    for weight in shared.values():
        mine.update(weight.contiguous().view(torch.uint8).numpy())
    dist.all_gather_object(theirs, mine.digest())
    return len(set(theirs)) == 1


def main() -> None:
    """Let the ways take turns, and show the table."""
    parser = harness.arguments(__doc__, json="local-steps.json")
    parser.add_argument("--ways", default=WAYS)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--step", type=float, default=0.0, help="seconds")
    parser.add_argument("--speeds", default="1", help="of the nodes, in turn; of their --step")
    parser.add_argument("--limit", type=float, default=900, help="seconds of a run")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        be_a_rank(given)
        return
    ways = given.ways.split(",")
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(given.repeats):
        for way in ways:
            link, _, what = way.partition(":")
            argv = ["--way", what, *harness.arguments_of(given, "size", "steps", "step", "speeds")]
            if link == "nvlink":
                one = {"NCCL_HOSTID": "one"}
                job = harness.ranks(*argv, count=given.nodes, env=one, limit=given.limit)
            else:
                argv = [sys.executable, str(Path(__file__).resolve()), *argv]
                spec = f"{given.nodes}x1@{LINKS.get(link, link)}"
                job = harness.in_lab(spec, argv, limit=given.limit)
            print(way, job.failed or job.row, flush=True)
            if not job.failed:
                found[way].append(job.row)
            harness.keep(given, ways=found)
    middle = {
        way: statistics.median(row["rate"] for row in rows) for way, rows in found.items() if rows
    }
    base = middle.get(ways[0], float("nan"))
    rows = [[way, f"{rate:.0f}", f"{rate / base:.2f}"] for way, rate in middle.items()]
    print(harness.show(["", "tokens/s", "of the first"], rows))


if __name__ == "__main__":
    main()
