"""HSDP (FSDP2 in the node, replicas between nodes): FSDP2 alone beside Evener's forms.

    evener lab run --nodes 2 --slots 2 --link 100mbit -- python benchmarks/hsdp.py --size tiny
    evener lab run --nodes 2 --slots 1 --link 10gbit -- python benchmarks/hsdp.py --size 350m

Every column trains a GPT of its own from the same weights on the same batches, in one job; steps of
the columns are timed in turn, `--repeats` times, so that all meet the same machine. The JSON says
for each the median step, the share of FSDP2's own time, and the loss after all steps.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

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
    "tiny": (4, 256, 4, 64, 2, 256),
    "wide": (1, 256, 4, 32, 1, 40_000),  # much to send and little to compute, for a CPU
    "350m": (24, 1024, 16, 512, 4, 256),
    "1b": (22, 2048, 16, 512, 4, 256),
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
        bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        policy = {"mp_policy": bf16} if device.type == "cuda" else {}
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, **policy)
        fully_shard(model, mesh=mesh, **policy)
        if name != "fsdp2":
            more = {"floor": "int8"} if name == "auto" else {}
            evener.fsdp.accelerate(model, mode=name, **more)
        self.name, self.model, self.device = name, model, device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        self.took: list[float] = []
        self.sent: list[float] = []
        self.loss = 0.0
        self.steps = 0

    def step(self) -> torch.Tensor:
        seed = 1000 * self.steps + dist.get_rank()
        # Text with structure: a walk, so that there is something to learn.
        steps = torch.randint(0, 5, (self.rows, self.length), generator=_seeded(seed))
        tokens = (steps.cumsum(1) % 256).to(self.device)
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.steps += 1
        return loss.detach()

    def timed(self, steps: int) -> None:
        dist.barrier()
        self._wait()
        begin, sent = time.perf_counter(), sent_bytes()
        for _ in range(steps):
            loss = self.step()
        self._wait()
        self.sent.append((sent_bytes() - sent) / steps / 1e6)
        self.took.append((time.perf_counter() - begin) / steps * 1e3)
        dist.all_reduce(loss)
        self.loss = loss.item() / dist.get_world_size()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def sent_bytes() -> int:
    """What this node's cards have sent, headers included."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()[2:]
    rows = (line.replace(":", " ").split() for line in lines)
    return sum(int(row[9]) for row in rows if row[0] != "lo")


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--steps", type=int, default=4, help="steps timed at once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=14, help="`auto` has chosen and tried by 13")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    local, inside = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if gpu:
        if torch.cuda.device_count() > 1:
            local = int(os.environ["RANK"]) % torch.cuda.device_count()
        torch.cuda.set_device(local)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    nodes = dist.get_world_size() // inside
    mesh = init_device_mesh(device.type, (nodes, inside), mesh_dim_names=("replicate", "shard"))
    columns = [Column(name, args, mesh, device) for name in args.columns.split(",")]
    for column in columns:
        # The sixth step is one that the guard checks, by a second reduction.
        for _ in range(args.warmup):
            column.step()
        for column in columns:
            column.timed(args.steps)
    if dist.get_rank() == 0:
        report(args, columns, nodes, inside, device)
    dist.destroy_process_group()


def report(
    args: argparse.Namespace, columns: list[Column], nodes: int, inside: int, device: torch.device
) -> None:
    found: dict[str, Any] = {}
    base = statistics.median(columns[0].took)
    print(f"{columns[0].parameters / 1e6:.1f}M parameters, {nodes} nodes x {inside}")
    print(f"{'':8} {'step ms':>9} {'x ' + columns[0].name:>9} {'MB sent':>8} {'loss':>8}")
    for column in columns:
        median = statistics.median(column.took)
        sent = statistics.median(column.sent)
        found[column.name] = {
            "step_ms": column.took,
            "median_ms": median,
            "node_sent_mb": column.sent,
            "loss": column.loss,
        }
        print(f"{column.name:8} {median:9.1f} {base / median:9.2f} {sent:8.2f} {column.loss:8.4f}")
    if args.json:
        machine = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor()
        record = {
            "size": args.size,
            "nodes": nodes,
            "ranks_per_node": inside,
            "steps": columns[0].steps,
            "machine": machine or platform.machine(),
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else "",
            "columns": found,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
