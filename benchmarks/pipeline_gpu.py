"""GPT 1.3B in a pipeline over two GPUs, beside one GPU, DDP and FSDP2 at the same global batch.

    evener lab run --nodes 2 --slots 1 --link 25gbit -- python benchmarks/pipeline_gpu.py
    evener lab run --nodes 2 --slots 2 --link 1gbit -- python benchmarks/pipeline_gpu.py --size tiny

bf16, AdamW, the same microbatches in every column; columns run one after the other in one job. The
tokens per second of each, of one GPU's the multiple, and of the pipeline what was predicted: step,
bubble, imbalance. `one` is rank 0 alone, while the others wait. A step of the pipeline is recorded
in NAME-step.json beside the results.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import torch
import torch.distributed as dist
from gpt_block import Block
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from evener import pipeline

# Layers, width, heads, words, tokens of a row, rows of a step, microbatches.
SIZES = {
    "tiny": (4, 64, 4, 512, 32, 16, 8),
    "1.3b": (24, 2048, 16, 50257, 1024, 64, 16),
}
COLUMNS = ("one", "pipeline", "ddp", "fsdp2")


class GPT(nn.Module):
    """Returns the loss: the head's share of the work is cut and timed with the rest."""

    def __init__(self, layers: int, width: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def weights(name: str, tensor: torch.Tensor) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if name.endswith("bias"):
        return torch.zeros(tensor.shape, device=device)
    if "norm" in name:
        return torch.ones(tensor.shape, device=device)
    generator = torch.Generator(device).manual_seed(hash_of(name))
    return torch.randn(tensor.shape, device=device, generator=generator).mul_(0.02)


def hash_of(name: str) -> int:
    return sum(ord(letter) * 131**at for at, letter in enumerate(name)) % (1 << 31)


def batch(step: int, rows: int, length: int, words: int, device: torch.device) -> dict[str, Any]:
    drawn = torch.randint(0, words, (rows, length + 1),
                          generator=torch.Generator().manual_seed(step)).to(device)  # fmt: skip
    return {"tokens": drawn[:, :-1].contiguous(), "labels": drawn[:, 1:].contiguous()}


def timed(step: Callable[[int], float], args: argparse.Namespace) -> Any:
    took, losses = [], []
    for at in range(args.warmup + args.steps):
        harness.settle()
        begin = time.perf_counter()
        losses.append(step(at))
        harness.settle()
        took.append(time.perf_counter() - begin)
    return statistics.median(took[args.warmup :]), losses


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="1.3b")
    parser.add_argument("--columns", default=",".join(COLUMNS))
    parser.add_argument("--schedule", default="Eager1F1B")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--activations", default="exact", help="between nodes: bf16 or int8")
    args = parser.parse_args()
    layers, width, heads, words, length, rows, count = SIZES[args.size]
    device = harness.join()
    cuda, rank, world = device.type == "cuda", dist.get_rank(), dist.get_world_size()
    dtype = torch.bfloat16 if cuda else torch.float32
    tokens = rows * length

    def empty() -> GPT:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                return GPT(layers, width, heads, words, length)
        finally:
            torch.set_default_dtype(before)

    def whole() -> GPT:
        model = empty().to_empty(device=device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights(name, parameter))
        return model

    def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4, fused=cuda)

    def accumulate(model: nn.Module, own_rows: int, own_count: int, first: int) -> Any:
        optimizer = optimizer_of(model.parameters())

        def step(at: int) -> float:
            given = batch(at, rows, length, words, device)
            parts = {k: v[first : first + own_rows].chunk(own_count) for k, v in given.items()}
            total = torch.zeros((), device=device)
            for m in range(own_count):
                last = m == own_count - 1
                if isinstance(model, nn.parallel.DistributedDataParallel):
                    model.require_backward_grad_sync = last
                elif hasattr(model, "set_requires_gradient_sync"):
                    model.set_requires_gradient_sync(last)
                loss = model(**{k: v[m] for k, v in parts.items()}) / own_count
                loss.backward()
                total += loss.detach()
            optimizer.step()
            optimizer.zero_grad()
            return float(total)

        return step

    found: dict[str, Any] = {}
    for column in args.columns.split(","):
        begin = time.perf_counter()
        detail: dict[str, Any] = {}
        took, losses = 0.0, [0.0]
        if column == "one":
            if rank == 0:
                took, losses = timed(accumulate(whole(), rows, count, 0), args)
        elif column == "pipeline":
            example = batch(0, rows, length, words, torch.device("meta"))
            pipe = pipeline.auto(
                empty(), example, microbatches=count, schedule=args.schedule, weights=weights,
                memory=str(int(torch.cuda.get_device_properties(0).total_memory * 0.9)) + "B"
                if cuda else None,
                activations=args.activations,
            )  # fmt: skip
            planned = time.perf_counter() - begin
            optimizer = optimizer_of(pipe.parameters())
            inner: list[float] = []

            def step(at: int, pipe: Any = pipe, optimizer: Any = optimizer,
                     inner: list[float] = inner) -> float:  # fmt: skip
                loss = pipe.step(**batch(at, rows, length, words, device))
                inner.append(pipe.seconds)
                optimizer.step()
                optimizer.zero_grad()
                return float(loss)

            took, losses = timed(step, args)
            results = args.json or Path("pipeline.json")
            path = results.with_name(f"{results.stem}-step.json")
            path.parent.mkdir(parents=True, exist_ok=True)
            pipe.record(path)
            step(args.warmup + args.steps)
            pipe.close()
            plan = pipe.plan
            detail = {
                "planning_s": planned,
                "predicted_ms": plan.step_seconds * 1e3,
                "schedule_ms": statistics.median(inner[args.warmup : -1]) * 1e3,
                "predicted_bubble": plan.bubble,
                "predicted_imbalance": plan.imbalance,
                "predicted_over_measured": plan.step_seconds
                / statistics.median(inner[args.warmup : -1]),
                "theory_bubble": (plan.ranks - 1) / (plan.microbatches + plan.ranks - 1),
                "bound": plan.bound,
                "stages": [[s.blocks, s.seconds * 1e3] for s in plan.stages],
                "uniform_ms": plan.alternatives["uniform by block"].step_seconds * 1e3,
                "parameters_ms": plan.alternatives["parameter count"].step_seconds * 1e3,
            }
            if rank == 0:
                measured = json.loads(path.read_text())["measured"]
                detail |= {
                    "measured_bubble": measured["bubble"],
                    "measured_imbalance": measured["imbalance"],
                    "measured_stages": {
                        k: 1e3 * (v["forward"] + v["backward"])
                        for k, v in measured["stages"].items()
                    },
                }
            del pipe, optimizer, step
        else:
            model: nn.Module = whole()
            if column == "ddp":
                model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
            else:
                for layer in model.layers:
                    fully_shard(layer)
                fully_shard(model)
            own = rows // world
            took, losses = timed(accumulate(model, own, count // world, rank * own), args)
            del model
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
        dist.barrier(device_ids=[device.index] if cuda else None)
        if rank == 0:
            found[column] = {"step_ms": took * 1e3, "tokens_per_s": tokens / took,
                             "loss": losses, **detail}  # fmt: skip
            base = found.get("one", {}).get("tokens_per_s")
            times = f"{tokens / took / base:5.2f} x one" if base else ""
            said = f"loss {losses[-1]:.4f}  ({time.perf_counter() - begin:.0f} s)"
            print(
                f"{column:9} {took * 1e3:9.1f} ms {tokens / took:12,.0f} tokens/s {times}  {said}",
                flush=True,
            )
            for key, value in detail.items():
                print(f"          {key}: {value}", flush=True)
    if rank == 0:
        harness.keep(args, size=args.size, ranks=world, rows=rows, tokens=length,
                     microbatches=count, columns=found)  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
