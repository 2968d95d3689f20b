"""What a step of `evener.precision` takes while it is half, beside a loop that is always half.

    python benchmarks/precision_step.py [--models gpt2,resnet50] [--turns 12] [--steps 15]
        [--tiny] [--json FILE]

On one GPU (about a minute on an H200), or on the CPU with --tiny. Ways:

    half     the usual loop under autocast; in float16 with GradScaler
    step     `policy.step(lambda: ...)`
    follow   the usual loop after `precision.follow(model, optimizer)`; bfloat16 only. The loss is
             outside of autocast, so the outputs are made float32 for it
    around   the same, with the model and the loss under `policy.autocast()`

All ways of a model and type take turns in one process, with models of the same start and the same
batches; who begins changes with each turn. A turn's ratio is its time over that of `half` in the
same turn. Reported: the median ratio, its quartiles, and the ratio of all turns' times. A turn in
which a policy was not half throughout is dropped, and counted. Wanted: at most 1.02.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpt_block import Block
from torch import nn
from torch.nn.functional import cross_entropy

from evener import __version__, precision

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# Half soon, and soon again: such steps are not measured.
LIMITS = precision.Limits(settle=5, hold=5, longest_hold=5)


class Gpt(nn.Module):
    """GPT-2 small's sizes; logits [rows, length, words] of ids [rows, length]."""

    def __init__(self, width: int, layers: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(length, width)
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        place = self.place(torch.arange(ids.shape[1], device=ids.device))
        out: torch.Tensor = self.head(self.norm(self.blocks(self.embed(ids) + place)))
        return out


class Task:
    """A model of a name, its optimizer and its batches, on a device."""

    def __init__(self, name: str, tiny: bool, device: str) -> None:
        torch.manual_seed(0)
        if name == "gpt2":
            rows, length, words = (2, 32, 100) if tiny else (8, 1024, 50257)
            sizes = (32, 2, 2) if tiny else (768, 12, 12)
            self.model: nn.Module = Gpt(*sizes, words, length).to(device)
            self.x = torch.randint(words, (4, rows, length), device=device)
            self.y = torch.randint(words, (4, rows, length), device=device)
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        else:
            self.model, rows, side = picture_model(tiny)
            self.model.to(device, memory_format=torch.channels_last)
            self.x = torch.randn(4, rows, 3, side, side, device=device)
            self.y = torch.randint(10, (4, rows), device=device)
            self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)

    def loss(self, step: int) -> torch.Tensor:
        """The loss of one of four batches."""
        out = self.model(self.x[step % 4])
        return cross_entropy(out.flatten(0, -2), self.y[step % 4].flatten())


def picture_model(tiny: bool) -> tuple[nn.Module, int, int]:
    """ResNet-50, or a few layers like it; rows and side of its batches."""
    if tiny:
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 10)), 4, 16
    import torchvision

    return torchvision.models.resnet50(), 128, 224


def way_of(
    way: str, task: Task, dtype: torch.dtype, device: str
) -> tuple[Callable[[int], Any], Any]:
    """One step of a way, and its policy."""
    model, optimizer = task.model, task.optimizer
    if way == "step":
        policy = precision.follow(model, optimizer, dtype=dtype, limits=LIMITS)
        policy.detach()
        return lambda step: policy.step(lambda: task.loss(step)), policy
    if way in ("follow", "around"):
        policy = precision.follow(model, optimizer, dtype=dtype, limits=LIMITS)

        def followed(step: int) -> None:
            with policy.autocast() if way == "around" else contextlib.nullcontext():
                loss = task.loss(step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return followed, policy
    scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

    def usual(step: int) -> None:
        with torch.autocast(device, dtype):
            loss = task.loss(step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return usual, None


def wait(device: str) -> None:
    """Until the GPU has done what it has."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(name: str, dtype: str, options: argparse.Namespace, device: str) -> dict[str, Any]:
    """Seconds per step of each way, a number per turn."""
    ways = ["half", "step"] + (["follow", "around"] if dtype == "bfloat16" else [])
    made = {
        way: way_of(way, Task(name, options.tiny, device), DTYPES[dtype], device) for way in ways
    }
    for step, policy in made.values():
        for number in range(100):
            step(number)
            if number >= 20 and (policy is None or policy.half):
                break
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    dropped = 0
    for turn in range(options.turns):
        first = turn % len(ways)
        times, all_half = {}, True
        for way in ways[first:] + ways[:first]:
            step, policy = made[way]
            before = policy.machine.half_steps if policy else 0
            wait(device)
            begun = time.perf_counter()
            for number in range(options.steps):
                step(number)
            wait(device)
            times[way] = (time.perf_counter() - begun) / options.steps
            all_half &= policy is None or policy.machine.half_steps == before + options.steps
        dropped += not all_half
        for way in ways if all_half else []:
            seconds[way].append(times[way])
    if dropped > options.turns // 3:
        said = [str(policy) for _, policy in made.values() if policy]
        sys.exit(f"error: {name}, {dtype}: half precision was left in {dropped} turns\n{said}")
    found: dict[str, Any] = {"seconds": seconds, "ratios": {}, "events": {}, "dropped": dropped}
    for way in ways[1:]:
        pairs = zip(seconds[way], seconds["half"], strict=True)
        ratios = [mine / half for mine, half in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        whole = sum(seconds[way]) / sum(seconds["half"])
        found["ratios"][way] = {"median": middle, "low": low, "high": high, "of the sums": whole}
        policy = made[way][1]
        found["events"][way] = [event.cause for event in policy.events]
        policy.detach()
    return found


def main() -> None:
    """Run all, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default="gpt2,resnet50")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--steps", type=int, default=15, help="of each way in a turn")
    parser.add_argument("--tiny", action="store_true", help="small models; on the CPU too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        parser.error("there is no GPU; --tiny tries the script on the CPU")
    document: dict[str, Any] = {
        "evener": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "tiny": options.tiny,
        "turns": options.turns,
        "steps": options.steps,
        "runs": {},
    }
    print("| model, type | way | ms per step | over half: median | quartiles | of all turns |")
    print("|---|---|---:|---:|---:|---:|")
    for name in options.models.split(","):
        for dtype in options.dtypes.split(","):
            found = measure(name, dtype, options, device)
            document["runs"][f"{name}, {dtype}"] = found
            for way, times in found["seconds"].items():
                ms = 1000 * statistics.median(times)
                said = found["ratios"].get(way)
                rest = (
                    "| | |"
                    if said is None
                    else (
                        f"{said['median']:.3f} | {said['low']:.3f} to {said['high']:.3f} | "
                        f"{said['of the sums']:.3f} |"
                    )
                )
                print(f"| {name}, {dtype} | {way} | {ms:.2f} | {rest}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
