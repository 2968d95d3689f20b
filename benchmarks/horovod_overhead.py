"""What Horovod's interface costs on top of torch.distributed: two figures, one JSON.

    python benchmarks/horovod_overhead.py --device cuda --json out.json     # 2 GPUs, NCCL
    python benchmarks/horovod_overhead.py --device cpu                      # 2 processes, Gloo

small: one allreduce of a small tensor. `torch` is dist.all_reduce, `frozen` hvd.allreduce_ in a
steady sequence, `negotiated` the same with more names in turn than a schedule may have. On a GPU
all three come back when the work is in the stream, so two figures are measured, each the same for
all three: `us`, where the host waits for the device after every call, and `us_enqueued`, where it
waits at the end of a block. All take turns in one run, a block of calls each, so that a noisy
machine is noisy for all; the ratios are medians over blocks of the same turn.

step: a training step of a model (ResNet-50, or a small one on the CPU) through
hvd.DistributedOptimizer and through DistributedDataParallel, in turns likewise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import evener.horovod.torch as hvd
from evener.horovod.state import STATE


def small(
    device: torch.device, turns: int, calls: int, elements: int, waits: bool
) -> dict[str, Any]:
    """Microseconds a call, and ratios to torch.distributed's. waits: for the device, each call."""
    tensor = torch.ones(elements, device=device)
    cuda = device.type == "cuda"
    group = STATE.engine.sets[0].cuda if cuda else STATE.engine.sets[0].cpu

    def plain() -> None:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)

    def frozen() -> None:
        hvd.allreduce_(tensor, name="small", op=hvd.Max)

    # More names in turn than a schedule may have steps: cached, and never frozen.
    names = itertools.cycle([f"one of many {number}" for number in range(97)])

    def negotiated() -> None:
        hvd.allreduce_(tensor, name=next(names), op=hvd.Max)

    ways: dict[str, Callable[[], None]] = {
        "torch": plain,
        "frozen": frozen,
        "negotiated": negotiated,
    }
    blocks: dict[str, list[float]] = {name: [] for name in ways}
    frozen_calls = 0
    for turn in range(turns + 1):
        for name, way in ways.items():
            for _ in range(100):  # reach the steady state of this way
                way()
            _settle(device)
            frozen_before = STATE.engine.frozen()[1]
            start = time.perf_counter()
            for _ in range(calls):
                way()
                if cuda and waits:
                    torch.cuda.current_stream().synchronize()
            _settle(device)
            spent = (time.perf_counter() - start) / calls * 1e6
            if name == "frozen" and turn:
                frozen_calls += STATE.engine.frozen()[1] - frozen_before
            if turn:
                blocks[name].append(spent)
    torch_us = blocks["torch"]
    us = "us" if waits else "us_enqueued"
    ratio = "ratio" if waits else "ratio_enqueued"
    return {
        "elements": elements,
        "calls": calls * turns,
        "calls_frozen": frozen_calls,
        us: {name: statistics.median(values) for name, values in blocks.items()},
        ratio: {
            name: statistics.median(v / t for v, t in zip(blocks[name], torch_us, strict=True))
            for name in ("frozen", "negotiated")
        },
    }


def model_of(device: torch.device) -> tuple[torch.nn.Module, torch.Tensor, str]:
    """ResNet-50 and a batch on a GPU; a small net on a CPU."""
    torch.manual_seed(0)
    if device.type == "cuda":
        from torchvision.models import resnet50

        return resnet50().to(device), torch.randn(64, 3, 224, 224, device=device), "resnet50"
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers), torch.randn(64, 512), "mlp 6 x 512"


def step(device: torch.device, turns: int, steps: int) -> dict[str, Any]:
    """Milliseconds a step, and the ratio to DDP's."""
    model, batch, name = model_of(device)
    ours: Any = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    ours = hvd.DistributedOptimizer(ours, model.named_parameters())
    theirs, _, _ = model_of(device)
    ids = [device] if device.type == "cuda" else None
    ddp = torch.nn.parallel.DistributedDataParallel(
        theirs, device_ids=ids, gradient_as_bucket_view=True
    )
    plain = torch.optim.SGD(ddp.parameters(), lr=1e-4, momentum=0.9)
    ways: dict[str, tuple[Any, Any]] = {"ddp": (ddp, plain), "horovod": (model, ours)}
    blocks: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(turns + 1):
        for way, (net, optimizer) in ways.items():
            for number in range(steps + 2):
                if number == 2:
                    _settle(device)
                    start = time.perf_counter()
                optimizer.zero_grad()
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                    loss = net(batch).square().mean()
                loss.backward()
                optimizer.step()
            _settle(device)
            if turn:
                blocks[way].append((time.perf_counter() - start) / steps * 1e3)
    ratios = [h / d for h, d in zip(blocks["horovod"], blocks["ddp"], strict=True)]
    return {
        "model": name,
        "ms": {way: statistics.median(values) for way, values in blocks.items()},
        "ratio": statistics.median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
    }


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def rank_main(rank: int, arguments: argparse.Namespace, port: int) -> None:
    """One process."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    hvd.init()
    report: dict[str, Any] = {
        "what": "horovod_overhead",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor(),
        "backend": "nccl" if device.type == "cuda" else "gloo",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "small": [
            small(device, arguments.turns, arguments.calls, elements, waits)
            for elements in (1, 4096)
            for waits in ((True, False) if device.type == "cuda" else (True,))
        ],
    }
    if not arguments.no_step:
        report["step"] = step(device, arguments.turns, arguments.steps)
    if rank == 0:
        text = json.dumps(report, indent=1)
        print(text)
        if arguments.json:
            arguments.json.write_text(text + "\n", encoding="utf-8")
    hvd.barrier()
    hvd.shutdown()


def main() -> None:
    """Run both ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-step", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # this process holds the store
    multiprocessing.spawn(rank_main, (arguments, store.port), nprocs=2)


if __name__ == "__main__":
    main()
