"""Training with states in host memory, on one GPU, beside FSDP2 with CPU offload; JSON and a table.

    python benchmarks/zero_gpu.py [--quick] [--json FILE] [--no-peers]

A Llama-shaped model (2.69B parameters: 32 layers, width 2560), 8 x 1024 tokens, checkpointing,
clipping at 1.0; --quick: 8 layers, so that all variants run within four minutes. Each variant runs
in a process of its own (a peer that runs out of memory takes nobody with it), one after the other.
Reported: median seconds a step, tokens/s, peak GPU memory (allocator and driver), peak host memory,
and the plan's prediction beside the measurement.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY = 32000


class Block(nn.Module):
    """A pre-norm Llama block."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(rows, length, width))
        h = self.norm2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """`recompute`: checkpoint each block (the engine does it by itself)."""

    def __init__(self, layers: int, width: int, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCABULARY, width)
        inner = -(-8 * width // 3 // 256) * 256
        self.layers = nn.ModuleList(Block(width, width // 128, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    out = model(tokens)
    return functional.cross_entropy(out[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def timed(
    step: Callable[[torch.Tensor], float], tokens: torch.Tensor, steps: int
) -> dict[str, Any]:
    times, losses = [], []
    for number in range(steps + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(step(tokens))
        if number >= 3:
            times.append(time.perf_counter() - start)
    free, total = torch.cuda.mem_get_info()
    return {
        "seconds": statistics.median(times),
        "spread": [min(times), max(times)],
        "tokens_per_second": tokens.numel() / statistics.median(times),
        "gpu_allocated": torch.cuda.max_memory_allocated(),
        "gpu_reserved": torch.cuda.max_memory_reserved(),
        "gpu_driver_now": total - free,
        "host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "losses": losses,
    }


def evener(layers: int, width: int, batch: int, steps: int, **own: Any) -> dict[str, Any]:
    from evener import zero

    torch.manual_seed(0)
    model = Llama(layers, width, recompute=False)
    config = {
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
        "evener": {"checkpointing": True, "device": "cuda", **own},
    }
    machine = zero.probe(torch.device("cuda"), moments=own_moments(own)).machine
    settings = zero.config.read(config)
    made = zero.plan(
        model,
        config=settings,
        budget=own.get("budget", "auto"),
        batch=(batch, 1024),
        machine=machine,
    )
    engine, *_ = zero.initialize(model=model, config=config, batch=(batch, 1024), machine=machine)
    tokens = torch.randint(0, VOCABULARY, (batch, 1024), device="cuda")
    torch.cuda.reset_peak_memory_stats()

    def step(tokens: torch.Tensor) -> float:
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        return float(loss)

    found = timed(step, tokens, steps)
    engine.close()
    predicted = {
        "seconds": made.step_seconds,
        "bound": made.bound,
        "gpu_bytes": made.gpu_bytes,
        "host_bytes": made.host_bytes,
        "times": made.times,
    }
    host = engine.store.host
    return {**found, "plan": predicted, "machine": vars(machine), "pinned": host.pinned}


def own_moments(own: dict[str, Any]) -> torch.dtype:
    return torch.bfloat16 if own.get("moments") == "bf16" else torch.float32


def resident(layers: int, width: int, batch: int, steps: int) -> dict[str, Any]:
    """All on the GPU, all bf16: the speed of a model that fits."""
    torch.manual_seed(0)
    model = Llama(layers, width, recompute=True).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    return timed(plain(model, optimizer), torch.randint(0, VOCABULARY, (batch, 1024)).cuda(), steps)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], float]:
    def step(tokens: torch.Tensor) -> float:
        loss = loss_of(model, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def fsdp(layers: int, width: int, batch: int, steps: int) -> dict[str, Any]:
    """FSDP2 with CPUOffloadPolicy and torch's fused CPU AdamW."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.manual_seed(0)
    model = Llama(layers, width, recompute=True)
    how: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        "offload_policy": CPUOffloadPolicy(),
    }
    for layer in model.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    tokens = torch.randint(0, VOCABULARY, (batch, 1024)).cuda()
    found = timed(plain(model, optimizer), tokens, steps)
    dist.destroy_process_group()
    return found


VARIANTS: dict[str, Callable[..., dict[str, Any]]] = {
    "resident all-bf16 (the bound)": resident,
    "FSDP2 CPU offload": fsdp,
    "evener, all offloaded, 8 GB": lambda *a: evener(*a, budget={"gpu": "8GB"}),
    "evener, bf16 moments, 8 GB": lambda *a: evener(*a, budget={"gpu": "8GB"}, moments="bf16"),
    "evener, 24 GB": lambda *a: evener(*a, budget={"gpu": "24GB"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="8 layers, 5 steps")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int, default=2560)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/zero_gpu.json"))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    layers = arguments.layers or (8 if arguments.quick else 32)
    steps = arguments.steps or (5 if arguments.quick else 8)
    if arguments.one:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
        found = VARIANTS[arguments.one](layers, arguments.width, arguments.batch, steps)
        print("RESULT " + json.dumps(found, default=str))
        return
    if not torch.cuda.is_available():
        sys.exit("no GPU here: this benchmark needs one")
    rows: dict[str, Any] = {}
    for name in VARIANTS:
        if arguments.no_peers and not name.startswith("evener"):
            continue
        command = [sys.executable, __file__, "--one", name, "--layers", str(layers)]
        command += ["--width", str(arguments.width), "--batch", str(arguments.batch)]
        command += ["--steps", str(steps)]
        try:
            run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600)
        except subprocess.TimeoutExpired:
            rows[name] = {"failed": "ran past 600 s"}
            continue
        lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
        rows[name] = json.loads(lines[-1][7:]) if lines else {"failed": f"exit {run.returncode}"}
        show(name, rows[name])
    record = {
        "command": "python " + " ".join(["benchmarks/zero_gpu.py", *sys.argv[1:]]),
        "gpu": torch.cuda.get_device_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "layers": layers,
        "width": arguments.width,
        "batch": arguments.batch,
        "rows": rows,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def show(name: str, row: dict[str, Any]) -> None:
    if "failed" in row:
        print(f"{name:32} failed: {row['failed']}", flush=True)
        return
    plan = row.get("plan")
    said = f"  plan {plan['seconds']:.3f} s ({plan['bound']})" if plan else ""
    print(
        f"{name:32} {row['seconds']:.3f} s  {row['tokens_per_second']:9,.0f} tokens/s  "
        f"GPU {row['gpu_reserved'] / 1e9:.1f} GB  host {row['host_peak'] / 1e9:.1f} GB{said}",
        flush=True,
    )


if __name__ == "__main__":
    main()
