"""What the benchmarks of the memory engine share: the own Llama, its loss, the clock, the peaks."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import settle
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from evener import zero

GB = 1_000_000_000
VOCABULARY = 32000
HYPER: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}


class Mlp(nn.Module):
    """The gated layers of a block."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    """A pre-norm Llama block (no rotary embedding: it changes neither memory nor time much).
    `pairs`: heads of keys and values."""

    def __init__(self, width: int, heads: int, inner: int, pairs: int) -> None:
        super().__init__()
        self.heads, self.pairs = heads, pairs
        self.norm1 = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, width + 2 * pairs * (width // heads), bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width)
        self.mlp = Mlp(width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        every = self.heads + 2 * self.pairs
        qkv = self.qkv(self.norm1(x)).view(rows, length, every, width // self.heads)
        q, k, v = qkv.transpose(1, 2).split([self.heads, self.pairs, self.pairs], 1)
        a = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.heads != self.pairs
        )
        x = x + self.out(a.transpose(1, 2).reshape(rows, length, width))
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class Llama(nn.Module):
    """`recompute`: checkpoint each block (the engine does it by itself). `shared`: heads of queries
    to each of keys and values. `inner`: width of the MLP; 0: 8/3 of the model's."""

    def __init__(
        self, layers: int, width: int, recompute: bool, shared: int = 1, inner: int = 0
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCABULARY, width)
        inner = inner or -(-8 * width // 3 // 256) * 256
        heads = max(1, width // 128)
        self.layers = nn.ModuleList(
            Block(width, heads, inner, heads // shared) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def on_meta(layers: int, width: int, recompute: bool = False, **shape: int) -> Llama:
    """The model without memory: its values come from `value_of`, so that no variant waits minutes
    for one core to draw random numbers."""
    with torch.device("meta"):
        return Llama(layers, width, recompute, **shape)


def place() -> str:
    """Where a model computes."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def value_of(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's initial value, drawn where the model computes; the same in every variant."""
    if parameter.dim() < 2:
        fill = torch.zeros if name.endswith("bias") else torch.ones
        return fill(parameter.shape, device=place())
    generator = torch.Generator(place()).manual_seed(sum(name.encode()))
    return torch.randn(parameter.shape, device=place(), generator=generator).mul_(0.02)


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The next token's loss. All variants use the one that does not widen all logits at once."""
    ends = tokens.new_full((tokens.shape[0], 1), -100)
    loss: torch.Tensor = zero.cross_entropy(model(tokens), torch.cat([tokens[:, 1:], ends], 1))
    return loss


def batch_of(rows: int, length: int = 1024) -> torch.Tensor:
    """Tokens [rows, length] of this rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator(place()).manual_seed(100 + rank)
    return torch.randint(0, VOCABULARY, (rows, length), device=place(), generator=generator)


def host_peak() -> int:
    """The most host memory that this process had resident since `forget_peaks`, pinned memory
    included, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def forget_peaks(gpu: bool = True) -> None:
    """Peaks begin anew: of the host, and where `gpu` those of torch's allocator."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    if gpu and torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def timed(
    step: Callable[[], torch.Tensor],
    tokens: int,
    steps: int,
    finish: Callable[[], None] | None = None,
    warmup: int = 3,
) -> dict[str, Any]:
    """Seconds a step over `steps` steps in a row after the warm-up, from idle to idle: what a
    variant still does after its last step (`finish`) is in the time. `tokens`: of a rank's step."""
    losses = []
    preparing = host_peak()
    forget_peaks(gpu=False)

    def idle() -> None:
        if finish is not None:
            finish()
        settle()
        if dist.is_initialized():
            dist.barrier()

    for _ in range(warmup):
        losses.append(step())
    idle()
    start = time.perf_counter()
    for _ in range(steps):
        losses.append(step())
    idle()
    seconds = (time.perf_counter() - start) / steps
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if not all(loss.isfinite() for loss in losses):  # steps that were skipped cost nothing
        raise RuntimeError(f"losses are {[float(loss) for loss in losses]}: nothing was measured")
    return {
        "seconds": seconds,
        "tokens_per_second": tokens * ranks / seconds,
        "ranks": ranks,
        "host_preparing": preparing,
        "losses": [float(loss) for loss in losses],
    }


def planned(engine: zero.Engine) -> dict[str, Any]:
    """What the plan said."""
    plan = engine.plan
    assert plan is not None
    return {
        "parameters": sum(place.numel for place in plan.places),
        "planned_seconds": plan.step_seconds,
        "bound": plan.bound,
        "times": plan.times,
        "gpu_planned": plan.gpu_bytes,
        "host_planned": plan.host_bytes,
        "checkpointing": plan.checkpointing,
        "recomputed": len(plan.recomputed),
        "resident": f"{len(plan.resident)}/{len(plan.places)}",
        "streaming": plan.streaming,
        "traced": plan.traced,
    }


class Driver:
    """Samples the GPU memory that the driver has given to everybody."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if torch.cuda.is_available():
            self._gpu = torch.cuda.current_device()  # a thread's own would be GPU 0

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            free, total = torch.cuda.mem_get_info(self._gpu)
            self.peak = max(self.peak, total - free)

    def __enter__(self) -> Driver:
        if torch.cuda.is_available():
            torch.cuda.mem_get_info()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()


def memory(driver: Driver, found: dict[str, Any]) -> dict[str, Any]:
    """Peaks in bytes, the largest of all ranks: of the GPU with preparation and probe; of the host
    with them ("host") and while training ("host_training"). "each": those of every rank."""
    training, cuda = host_peak(), torch.cuda.is_available()
    mine = {
        "gpu_allocated": torch.cuda.max_memory_allocated() if cuda else 0,
        "gpu_reserved": torch.cuda.max_memory_reserved() if cuda else 0,
        "gpu_driver": driver.peak,
        "host": max(training, found.get("host_preparing", 0)),
        "host_training": training,
    }
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, mine)
    return {**{name: max(one[name] for one in each) for name in mine}, "each": each}


def share_cores(rank: int, ranks: int) -> None:
    """An equal part of the cores for each rank: more threads than cores wait spinning."""
    cpus = sorted(os.sched_getaffinity(0))
    share = max(1, len(cpus) // ranks)
    if share > 1:
        os.sched_setaffinity(0, cpus[rank * share : (rank + 1) * share])
    torch.set_num_threads(share)
