"""FSDP2 alone beside Evener's forms: HSDP, or with --sharded sharded over all ranks.

    evener lab run --nodes 2 --slots 2 --link 100mbit -- python benchmarks/hsdp.py --size wide
    evener lab run --nodes 2 --slots 1 --link 10gbit -- python benchmarks/hsdp.py --size 350m
    evener lab run --nodes 2 --slots 1 --link 25gbit -- python benchmarks/hsdp.py --sharded \
        --size 0.7b --columns fsdp2,exact,int8

Every column trains a GPT of its own from the same weights on the same batches, in one job; steps of
the columns are timed in turn, `--repeats` times, so that all meet the same machine. The JSON says
for each the median step, the share of FSDP2's own time, and the loss after all steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import harness
import torch
import torch.distributed as dist
from gpt_block import Block
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

import evener.fsdp

# Layers, width, heads, tokens of a row, rows of a rank, rows of the embedding.
SIZES = {
    "tiny": (4, 256, 4, 64, 2, 256),  # for a CPU
    "wide": (1, 256, 4, 32, 1, 40_000),  # much to send and little to compute, for a CPU
    "350m": (24, 1024, 16, 512, 4, 256),
    "0.7b": (14, 2048, 16, 1024, 8, 256),
}
COLUMNS = ("fsdp2", "exact", "fp16", "int8", "auto")


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Column:
    """One model with its optimizer, and what its steps took."""

    def __init__(self, name: str, args: argparse.Namespace, mesh: Any, device: torch.device):
        layers, width, heads, self.length, self.rows, words = SIZES[args.size]
        torch.manual_seed(0)
        model = GPT(layers, width, heads, words).to(device)
        self.parameters = sum(p.numel() for p in model.parameters())
        reduced = torch.bfloat16 if args.sharded else torch.float32
        bf16 = MixedPrecisionPolicy(torch.bfloat16, reduced)
        policy = {"mp_policy": bf16} if device.type == "cuda" or args.sharded else {}
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, **policy)
        fully_shard(model, mesh=mesh, **policy)
        if name != "fsdp2":
            more = {"floor": "int8"} if name == "auto" else {}
            if args.sharded:
                more["mirror"] = args.mirror
            evener.fsdp.accelerate(model, mode=name, **more)
        self.name, self.model, self.device = name, model, device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        self.took: list[float] = []
        self.sent: list[float] = []
        self.loss = 0.0
        self.steps, self.passes = 0, args.passes
        self.late = False  # gradients are reduced with the last micro-batch alone

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        for number in range(self.passes):
            if self.late:
                self.model.set_requires_gradient_sync(number == self.passes - 1)
            loss: torch.Tensor = self.model(self.batch(number)) / self.passes
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.steps += 1
        return loss.detach() * self.passes

    def batch(self, number: int) -> torch.Tensor:
        """This rank's tokens [rows, length] of a micro-batch: a walk, so that there is something to
        learn.
        """
        seed = 1000 * (self.passes * self.steps + number) + dist.get_rank()
        steps = torch.randint(0, 5, (self.rows, self.length), generator=_seeded(seed))
        return (steps.cumsum(1) % 256).to(self.device)

    def timed(self, steps: int) -> None:
        dist.barrier()
        harness.settle()
        begin, sent = time.perf_counter(), harness.sent_bytes()
        for _ in range(steps):
            loss = self.step()
        harness.settle()
        self.sent.append((harness.sent_bytes() - sent) / steps / 1e6)
        self.took.append((time.perf_counter() - begin) / steps * 1e3)
        dist.all_reduce(loss)
        self.loss = loss.item() / dist.get_world_size()


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--size", choices=SIZES, default="wide")
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--steps", type=int, default=4, help="steps timed at once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=14, help="`auto` has chosen and tried by 13")
    parser.add_argument("--sharded", action="store_true", help="over all ranks: no replicas")
    parser.add_argument("--mirror", default="host", help="with --sharded: host, gpu or off")
    parser.add_argument("--passes", type=int, default=1, help="micro-batches of a step")
    args = parser.parse_args()
    device, inside = harness.join(), int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = dist.get_world_size() // inside
    if args.sharded:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    else:
        mesh = init_device_mesh(device.type, (nodes, inside), mesh_dim_names=("replicate", "shard"))
    columns = [Column(name, args, mesh, device) for name in args.columns.split(",")]
    for column in columns:
        # The sixth step is one that the guard checks, by a second reduction.
        for _ in range(args.warmup):
            column.step()
    for _ in range(args.repeats):
        for column in columns:
            column.timed(args.steps)
    if dist.get_rank() == 0:
        report(args, columns, nodes, inside)
    dist.destroy_process_group()


def report(args: argparse.Namespace, columns: list[Column], nodes: int, inside: int) -> None:
    """The table, and the record."""
    base = statistics.median(columns[0].took)
    tokens = args.passes * columns[0].rows * columns[0].length
    found = {
        column.name: {
            "step_ms": column.took,
            "median_ms": (median := statistics.median(column.took)),
            "node_sent_mb": column.sent,
            "loss": column.loss,
            "tokens_per_second": tokens / median * 1e3,
        }
        for column in columns
    }
    print(f"{columns[0].parameters / 1e6:.1f}M parameters, {nodes} nodes x {inside}")
    heads = ["", "step ms", f"x {columns[0].name}", "MB sent", "loss", "tokens/s per rank"]
    print(harness.show(heads, (
        (name, one["median_ms"], base / one["median_ms"], statistics.median(one["node_sent_mb"]),
         one["loss"], one["tokens_per_second"]) for name, one in found.items()
    )))  # fmt: skip
    harness.keep(
        args, size=args.size, tokens_per_rank=tokens, nodes=nodes, ranks_per_node=inside,
        steps=columns[0].steps, columns=found,
    )  # fmt: skip


if __name__ == "__main__":
    main()
