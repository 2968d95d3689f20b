"""What one call costs in Horovod's interfaces, two ranks on one machine.

    python benchmarks/horovod_calls.py torch --device cuda --json out.json   # 2 GPUs, NCCL
    python benchmarks/horovod_calls.py torch                                 # 2 processes, Gloo
    python benchmarks/horovod_calls.py tensorflow                  # its door beside torch's

torch: an allreduce of a small tensor. `torch` is dist.all_reduce, `frozen` hvd.allreduce_ in a
steady sequence, `negotiated` the same with more names in turn than a schedule may have. On a GPU
all three come back when the work is in the stream, so two figures are measured: where the host
waits for the device after every call (`waits`), and where it waits at the end of a block. Then a
training step of a model (ResNet-50, or a small one on the CPU) through hvd.DistributedOptimizer and
through DistributedDataParallel. Ratios are medians over the blocks of the same turn.

tensorflow: for each size a waiting all-reduce of `horovod.torch` and of `horovod.tensorflow`, eager
and in a tf.function. A job of each takes its turn, and figures are medians of the turns' medians.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import harness

SIZES = {4: 600, 4096: 600, 262144: 150, 4 << 20: 25}
"""tensorflow: bytes, and calls of each size."""

# --- torch ---


def small(device: Any, given: argparse.Namespace, elements: int, waits: bool) -> dict[str, Any]:
    """Microseconds a call, and ratios to torch.distributed's."""
    import torch
    import torch.distributed as dist

    import evener.horovod.torch as hvd
    from evener.horovod.state import STATE

    tensor = torch.ones(elements, device=device)
    group = STATE.engine.sets[0].cuda if device.type == "cuda" else STATE.engine.sets[0].cpu
    # More names in turn than a schedule may have steps: cached, and never frozen.
    names = itertools.cycle([f"one of many {number}" for number in range(97)])
    ways: dict[str, Callable[[], Any]] = {
        "torch": lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group),
        "frozen": lambda: hvd.allreduce_(tensor, name="small", op=hvd.Max),
        "negotiated": lambda: hvd.allreduce_(tensor, name=next(names), op=hvd.Max),
    }

    def waiting(way: Callable[[], Any]) -> None:
        way()
        torch.cuda.current_stream().synchronize()

    if waits and device.type == "cuda":
        ways = {name: functools.partial(waiting, way) for name, way in ways.items()}
    before = STATE.engine.frozen()[1]
    blocks = harness.turns(
        ways, given.turns, warmup=1, calls=given.calls, settle=harness.settle,
        lead=100,  # the steady state of a way
    )  # fmt: skip
    return {
        "elements": elements,
        "waits": waits,
        "calls": (100 + given.calls) * (1 + given.turns),
        "calls_frozen": STATE.engine.frozen()[1] - before,
        "us": {name: 1e6 * statistics.median(values) for name, values in blocks.items()},
        "ratio": {n: harness.ratio(blocks[n], blocks["torch"]) for n in ("frozen", "negotiated")},
        "blocks_us": {name: [1e6 * one for one in values] for name, values in blocks.items()},
    }


def model_of(device: Any) -> tuple[Any, Any, str]:
    """ResNet-50 and a batch on a GPU; a small net on a CPU."""
    import torch

    torch.manual_seed(0)
    if device.type == "cuda":
        from torchvision.models import resnet50

        return resnet50().to(device), torch.randn(64, 3, 224, 224, device=device), "resnet50"
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers), torch.randn(64, 512), "mlp 6 x 512"


def step(device: Any, turns: int, steps: int) -> dict[str, Any]:
    """Milliseconds a step, and the ratio to DDP's."""
    import torch

    import evener.horovod.torch as hvd
    from evener.horovod.state import STATE

    model, batch, name = model_of(device)
    ours: Any = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    ours = hvd.DistributedOptimizer(ours, model.named_parameters())
    theirs, _, _ = model_of(device)
    cuda = device.type == "cuda"
    group = STATE.engine.sets[0].cuda if cuda else STATE.engine.sets[0].cpu
    ddp = torch.nn.parallel.DistributedDataParallel(
        theirs, device_ids=[device] if cuda else None, gradient_as_bucket_view=True,
        process_group=group,
    )  # fmt: skip
    plain = torch.optim.SGD(ddp.parameters(), lr=1e-4, momentum=0.9)

    def train(net: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
            loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()

    ways = {"ddp": lambda: train(ddp, plain), "horovod": lambda: train(model, ours)}
    blocks = harness.turns(ways, turns, warmup=1, calls=steps, lead=2, settle=harness.settle)
    ratios = [h / d for h, d in zip(blocks["horovod"], blocks["ddp"], strict=True)]
    return {
        "model": name,
        "ms": {way: 1e3 * statistics.median(values) for way, values in blocks.items()},
        "ratio": statistics.median(ratios),
        "ratio_spread": [min(ratios), max(ratios)],
    }


def in_torch(given: argparse.Namespace) -> None:
    """A rank of `torch`."""
    import torch

    import evener.horovod.torch as hvd

    rank = int(os.environ["RANK"])
    device = torch.device("cpu")
    if given.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    hvd.init()
    found: dict[str, Any] = {
        "small": [
            small(device, given, elements, waits)
            for elements in (1, 4096)
            for waits in ((True, False) if device.type == "cuda" else (True,))
        ]
    }
    if not given.no_step:
        found["step"] = step(device, given.turns, given.steps)
    if rank == 0:
        harness.say(**found)
    hvd.barrier()
    hvd.shutdown()


# --- tensorflow ---


def median_us(call: Callable[[], Any], calls: int) -> float:
    """The median call, after 20."""
    return statistics.median(harness.turns({"": call}, calls, warmup=20)[""]) * 1e6


def of_door(door: str) -> None:
    """A rank of `tensorflow`: microseconds by size."""
    found: dict[str, float] = {}
    if door == "torch":
        import torch

        import evener.horovod.torch as hvd

        torch.set_num_threads(1)
        hvd.init()
        for size, calls in SIZES.items():
            call = functools.partial(hvd.allreduce, torch.ones(size // 4), name="x", op=hvd.Sum)
            found[str(size)] = median_us(call, calls)
    else:
        import tensorflow as tf

        import evener.horovod.tensorflow as hvd

        hvd.init()
        for size, calls in SIZES.items():
            data = tf.ones([size // 4])
            graph = tf.function(lambda data: hvd.allreduce(data, op=hvd.Sum, name="y"))
            eager = functools.partial(hvd.allreduce, data, op=hvd.Sum)
            found[str(size)] = median_us(eager, calls)
            found[f"{size} graph"] = median_us(functools.partial(graph, data), calls)
    if hvd.rank() == 0:
        harness.say(**found)
    hvd.shutdown()


def main() -> None:
    """Parse, measure, print."""
    parser = harness.arguments(__doc__)
    parser.add_argument("what", choices=("torch", "tensorflow"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--calls", type=int, default=200, help="of each kind, in each turn")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--no-step", action="store_true")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        in_torch(given) if given.what == "torch" else of_door(given.rank)
        return
    if given.what == "torch":
        words = harness.arguments_of(given, "device", "turns", "calls", "steps", "no_step")
        job = harness.ranks("torch", "--rank", "torch", *words)
        if job.failed:
            sys.exit(f"error: {job.failed}")
        print(json.dumps(job.row, indent=1))
        harness.keep(given, ["torchvision"], **job.row)
        return
    turns: dict[str, list[dict[str, float]]] = {door: [] for door in ("torch", "tensorflow")}
    env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
    for _ in range(given.turns):
        for door, found in turns.items():
            found.append(harness.ranks("tensorflow", "--rank", door, env=env).row)
    cases = dict.fromkeys(case for rows in turns.values() for case in rows[0])
    medians = {
        name: {case: statistics.median(turn[case] for turn in rows) for case in rows[0]}
        for name, rows in turns.items()
    }
    table = ([case, *(each.get(case) for each in medians.values())] for case in cases)
    print(harness.show(["microseconds", *medians], table))
    harness.keep(given, ["tensorflow"], microseconds=medians, all_turns=turns)


if __name__ == "__main__":
    main()
