"""What the variants of zero_gpu.py share: the model, its loss, and the clock."""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from evener import zero

VOCABULARY = 32000
WARMUP = 3

Step = Callable[[torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """A pre-norm Llama block (no rotary embedding: it changes neither memory nor time much)."""

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
        out: torch.Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h))
        return out


class Llama(nn.Module):
    """`recompute`: checkpoint each block (the engine does it by itself)."""

    def __init__(self, layers: int, width: int, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCABULARY, width)
        inner = -(-8 * width // 3 // 256) * 256
        self.layers = nn.ModuleList(
            Block(width, max(1, width // 128), inner) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def on_meta(layers: int, width: int, recompute: bool = False) -> Llama:
    """The model without memory: its values come from `value_of`, so that no variant waits minutes
    for one core to draw random numbers."""
    with torch.device("meta"):
        return Llama(layers, width, recompute)


def value_of(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's initial value, drawn on the GPU; the same in every variant."""
    if parameter.dim() < 2:
        return torch.ones(parameter.shape, device="cuda")
    generator = torch.Generator("cuda").manual_seed(sum(name.encode()))
    return torch.randn(parameter.shape, device="cuda", generator=generator).mul_(0.02)


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The next token's loss. All variants use the one that does not widen all logits at once."""
    ends = tokens.new_full((tokens.shape[0], 1), -100)
    loss: torch.Tensor = zero.cross_entropy(model(tokens), torch.cat([tokens[:, 1:], ends], 1))
    return loss


def batch_of(rows: int, length: int = 1024, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Tokens [rows, length] of this rank."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator("cuda").manual_seed(100 + rank)
    return torch.randint(0, vocabulary, (rows, length), device="cuda", generator=generator)


def ran() -> dict[str, Any]:
    """What this ran as, and on."""
    gpu = torch.cuda.is_available()
    return {
        "command": " ".join(["python", "benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": {
            "gpu": torch.cuda.get_device_name() if gpu else None,
            "cpus": os.cpu_count(),
            "torch": torch.__version__,
        },
    }


def host_peak(process: str | int = "self") -> int:
    """The most host memory that a process had resident, pinned memory included, bytes."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def contexts() -> list[int]:
    """The GPUs on which this process has a CUDA context: its own, and none that is another's."""
    driver = ctypes.CDLL("libcuda.so.1")
    found = []
    for gpu in range(torch.cuda.device_count()):
        flags, active = ctypes.c_uint(), ctypes.c_int()
        driver.cuDevicePrimaryCtxGetState(gpu, ctypes.byref(flags), ctypes.byref(active))
        if active.value:
            found.append(gpu)
    return found


class Driver:
    """Samples the GPU memory that the driver has given to everybody."""

    def __init__(self) -> None:
        self.peak = 0
        self._gpu = torch.cuda.current_device()  # a thread's own would be GPU 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(0.1):
            free, total = torch.cuda.mem_get_info(self._gpu)
            self.peak = max(self.peak, total - free)

    def __enter__(self) -> Driver:
        torch.cuda.mem_get_info()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@contextlib.contextmanager
def timed_phase(into: dict[str, float], name: str) -> Iterator[None]:
    """How long a part of the preparation took."""
    start = time.perf_counter()
    yield
    into[name] = time.perf_counter() - start


def timed(
    step: Step, tokens: torch.Tensor, steps: int, finish: Callable[[], None] | None = None
) -> dict[str, Any]:
    """Seconds a step over `steps` steps in a row after the warm-up, from idle to idle: what a
    variant still does after its last step (`finish`) is in the time."""
    losses, each = [], []
    preparing = host_peak()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew

    def idle() -> None:
        if finish is not None:
            finish()
        torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()

    for _ in range(min(WARMUP, steps)):
        losses.append(step(tokens))
    idle()
    start = before = time.perf_counter()
    for _ in range(steps):
        losses.append(step(tokens))
        now = time.perf_counter()
        each.append(now - before)
        before = now
    idle()
    seconds = (time.perf_counter() - start) / steps
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return {
        "seconds": seconds,
        "median_on_the_host": statistics.median(each),
        "tokens_per_second": tokens.numel() * ranks / seconds,
        "ranks": ranks,
        "host_preparing": preparing,
        "losses": [float(loss) for loss in losses],
    }


def memory(driver: Driver, found: dict[str, Any]) -> dict[str, Any]:
    """Peaks in bytes, the largest of all ranks: of the GPU with preparation and probe; of the host
    with them ("host") and while training ("host_training"). "each": those of every rank."""
    training = host_peak()
    mine = {
        "gpu_allocated": torch.cuda.max_memory_allocated(),
        "gpu_reserved": torch.cuda.max_memory_reserved(),
        "gpu_driver": driver.peak,
        "host": max(training, found.get("host_preparing", 0)),
        "host_training": training,
    }
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine
    each: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(each, {**mine, "contexts on GPUs": contexts()})
    return {**{name: max(one[name] for one in each) for name in mine}, "each": each}


def bind() -> None:
    """Under torchrun: a GPU, and an equal part of the cores, for each rank."""
    if "LOCAL_RANK" not in os.environ:
        torch.cuda.set_device(0)
        return
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    cpus = sorted(os.sched_getaffinity(0))
    share = max(1, len(cpus) // ranks)
    os.sched_setaffinity(0, cpus[rank * share : (rank + 1) * share])
    torch.set_num_threads(share)
    torch.cuda.set_device(rank)
    # Without device_id: NCCL's communicator of the default group is then made only if it is used.
    dist.init_process_group("cpu:gloo,cuda:nccl")
