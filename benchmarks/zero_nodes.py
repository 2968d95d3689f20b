"""A model of transformers offloaded on several nodes, against one GPU.

    evener lab run --nodes 2 --slots 1 --link 25gbit -- python benchmarks/zero_nodes.py [options]

Each process is a node with one GPU (`--slots 1`), or one of several. First every process trains
alone, as if it were the only one; then all together, with one copy of the states per node
(`--nodes shard`: shared by all; `auto`: what the plan finds faster). Reported by rank 0: tokens/s
of both and their ratio, bytes that its node's cards sent per step (the kernel's counters) against
the plan's, and what the plan predicted. Llama 2.7B of zero_shapes.py, 8 x 1024 tokens per
micro-batch and GPU; gradients cross once per step of `--accumulation` micro-batches, in the forms
of `--crossing`, one after the other; after each come steps until the guard has looked once. --tiny:
a small model on CPUs.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from typing import Any

import harness
import torch
import torch.distributed as dist
import zero_shapes as shapes
from zero_models import GB, HYPER, planned, share_cores, value_of

from evener import zero
from evener.zero.form import names

MODEL = "llama 2.7B"
LOOKED = 6
"""The first step in which the guard looks (`evener.comm.guard`)."""


def equal(engine: zero.Engine) -> bool:
    """Whether all copies of the states have the same weights, bit for bit. Collective."""
    mine = [
        int(chunk.states.weights.view(torch.uint8).view(torch.int16).sum(dtype=torch.int64))
        for chunk in engine.chunks()
    ]
    every: list[list[int]] = [[] for _ in range(engine.ranks.replicas)]
    if engine.ranks.replicas > 1:
        dist.all_gather_object(every, mine, group=engine.ranks.between)
    return all(one == mine for one in every if one)


def train(
    given: argparse.Namespace, device: torch.device, label: str, crossing: str = "exact"
) -> dict[str, Any]:
    """Tokens/s of all ranks together, and what went over the cards."""
    together = dist.is_initialized()
    tiny = given.tiny
    model = shapes.model_of(MODEL, tiny)
    rows = 2 if tiny else 8
    batch = shapes.batch_of(MODEL, rows, model, device.type, tiny)
    own: dict[str, Any] = {
        "checkpointing": "auto",
        "device": device.type,
        "budget": {"gpu": 24 * GB, "host": 90 * GB},
        "nodes": given.nodes,
    }
    if together:
        own["crossing"] = crossing
    config = {
        "bf16": {"enabled": not tiny},
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": given.accumulation,
        "optimizer": {"type": "AdamW", "params": HYPER},
        "data_types": {"grad_accum_dtype": "bf16"},
        "evener": own,
    }
    engine, *_ = zero.initialize(model=model, config=config, example=batch, weights=value_of)
    plan = engine.plan
    assert plan is not None

    losses: list[torch.Tensor] = []

    def step() -> None:
        for _ in range(given.accumulation):
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
        losses.append(loss.detach())

    def idle() -> None:
        engine.drain()
        harness.settle()
        if together:
            dist.barrier()

    for _ in range(given.warmup):
        step()
    idle()
    before, crossed = harness.sent_bytes(), engine.memory()["gradients between nodes"]
    begun = time.perf_counter()
    for _ in range(given.steps):
        step()
    idle()
    seconds = (time.perf_counter() - begun) / given.steps
    wire = (harness.sent_bytes() - before) / given.steps
    mine = engine.memory()["gradients between nodes"] - crossed
    ranks = dist.get_world_size() if together else 1
    tokens = rows * (32 if tiny else shapes.MODELS[MODEL][2]) * given.accumulation * ranks
    found = {
        "label": label,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        **planned(engine),
        "copies": engine.ranks.replicas,
        "wire_per_step": wire,
        "payload_per_step": mine / given.steps,
        "planned_payload": plan.crossing_bytes,
        "gpu_peak": engine.memory()["gpu peak"],
        "ranks_per_node": engine.world,
        "made_room": engine.room.said,
        "crossing": crossing,
    }
    if device.type == "cuda":
        free, whole = torch.cuda.mem_get_info()
        found["gpu_driver"] = whole - free
    while crossing != "exact" and together and engine.global_steps < LOOKED:
        step()
    idle()
    found["fallen_back"] = engine.fallen_back()
    found["losses"] = [float(loss) for loss in losses]
    found["copies_equal"] = not together or equal(engine)
    engine.close()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def show(row: dict[str, Any]) -> None:
    """A line of the table."""
    line = (
        f"{row['label']:30} {row['seconds']:.3f} s {row['tokens_per_second']:9,.0f} tokens/s, "
        f"plan x {row['planned_seconds'] / row['seconds']:.2f} ({row['bound']})"
    )
    if planned := row["planned_payload"]:
        line += (
            f"; this node's cards sent {row['wire_per_step'] / GB:.3f} GB per step, "
            f"{row['wire_per_step'] / planned / row['ranks_per_node']:.3f} x the plan's; copies "
            f"{'equal' if row['copies_equal'] else 'DIFFER'}"
        )
    print(line, flush=True)


def main() -> None:
    """Alone, then together."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--crossing", default=["exact"], choices=names(), nargs="+")
    parser.add_argument("--nodes", default="replicate", choices=["auto", "replicate", "shard"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a small model on CPUs: a dry run")
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    # The lab and torchrun set the same variables.
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    logging.getLogger("evener.zero").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    share_cores(rank, size)
    device = harness.device(threads=torch.get_num_threads())
    rows = [train(given, device, "one GPU, all of them at once")]
    if size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        for form in given.crossing:
            rows.append(train(given, device, f"{size} GPUs, {form}", form))
        dist.destroy_process_group()
    if rank != 0:
        return
    for row in rows:
        show(row)
    for row in rows[1:]:
        ratio = row["tokens_per_second"] / rows[0]["tokens_per_second"]
        planned = size * rows[0]["planned_seconds"] / row["planned_seconds"]
        fallen = f"; {len(row['fallen_back'])} chunks fell back" if row["fallen_back"] else ""
        print(f"{row['label']} are {ratio:.2f} x one; {planned:.2f} x planned{fallen}", flush=True)
    harness.keep(given, ["transformers"], rows=rows)


if __name__ == "__main__":
    main()
