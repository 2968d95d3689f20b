"""What precision that follows the loss costs and gains: the digits CNN on a CPU, five seeds.

    python benchmarks/precision_digits.py [--seeds 5] [--epochs 30] [--dtype float16] [--json FILE]

The same start and the same batches four ways: float32; always half; half with a dynamic loss scale
(torch's GradScaler alone); adaptive (`evener.precision`). Then faults are injected into half
precision alone, and data are made to drift. Reported: accuracy on 360 held-out pictures and the
paired difference to float32 with its 95% interval; the share of half steps; after how many steps a
fault was noticed; switches that drifting data caused. With --json a run that was stopped goes on
where it was.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accuracy_digits as digits
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from evener import __version__, precision

LIMITS = precision.Limits(settle=60, hold=60, longest_hold=960)
WAYS = ("fp32", "half", "scaled", "adaptive")
FAULTS = ("spike", "underflow", "explode")


class Faulty(nn.Module):
    """A model that can be made to fail in half precision alone."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.fault = inner, ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        if out.dtype == torch.float32:
            return out
        if self.fault == "spike":
            out = out + 8 * torch.randn_like(out)
        if self.fault == "explode":
            out = (out * 1e6) / 1e6  # beyond float16 on its way
        return out.float()


class Step:
    """One way to train a model."""

    def __init__(self, way: str, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Faulty(digits.cnn())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.way, self.dtype = way, dtype
        self.scaler = torch.amp.GradScaler("cpu", enabled=way == "scaled")
        self.policy = None
        if way == "adaptive":
            self.policy = precision.follow(self.model, self.optimizer, dtype=dtype, limits=LIMITS)

    def __call__(self, x: torch.Tensor, y: torch.Tensor, weight: float = 1.0) -> None:
        def compute() -> torch.Tensor:
            return cross_entropy(self.model(x), y) * weight

        if self.policy is not None:
            self.policy.step(compute)
            return
        with torch.autocast("cpu", self.dtype, enabled=self.way != "fp32"):
            loss = compute()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def batches(seed: int, epochs: int, x: torch.Tensor, y: torch.Tensor) -> Any:
    """The same for every way."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=generator)
        for part in order.split(digits.BATCH):
            yield x[part], y[part]


def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """In float32."""
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


def train(way: str, dtype: torch.dtype, seed: int, epochs: int) -> dict[str, Any]:
    """One training."""
    images, labels = digits.data()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(100 + seed))
    test, rest = order[: digits.TEST], order[digits.TEST :]
    step = Step(way, dtype, seed)
    steps = 0
    for x, y in batches(seed, epochs, images[rest], labels[rest]):
        step(x, y)
        steps += 1
    half = float(way != "fp32")
    switches = 0
    if step.policy is not None:
        half = step.policy.machine.half_steps / steps
        switches = step.policy.machine.switches
    found = accuracy(step.model, images[test], labels[test])
    return {"way": way, "seed": seed, "accuracy": found, "half": half, "switches": switches}


def fault(kind: str, dtype: torch.dtype, seed: int) -> int | None:
    """Steps until a fault is noticed; None where it was not within 100."""
    images, labels = digits.data()
    step = Step("adaptive", dtype, seed)
    policy = step.policy
    assert policy is not None
    source = batches(seed, 40, images, labels)
    while not (policy.half and policy.machine.step > 2 * LIMITS.settle):
        step(*next(source))
    seen = len(policy.events)
    step.model.fault = kind
    if kind == "underflow":
        policy.scaler.update(new_scale=1.0)
    for after in range(1, 101):
        step(*next(source), weight=1e-6 if kind == "underflow" else 1.0)
        if len(policy.events) > seen:
            return after
    return None


def drift(dtype: torch.dtype, seed: int) -> int:
    """Switches away from half while the pictures turn darker and labels get mixed up."""
    images, labels = digits.data()
    step = Step("adaptive", dtype, seed)
    policy = step.policy
    assert policy is not None
    for number, (x, y) in enumerate(batches(seed, 30, images, labels)):
        level = number / 800
        swap = torch.rand(len(y), generator=torch.Generator().manual_seed(number)) < 0.3 * level
        step(x * (1 - 0.5 * level), torch.where(swap, (y + 1) % 10, y))
    return sum(event.before is precision.State.HALF for event in policy.events if event.switched)


class Results:
    """What was measured, by name; kept in a file after each part."""

    def __init__(self, path: Path | None, setting: dict[str, Any]) -> None:
        self._path = path
        self._document: dict[str, Any] = {**setting, "parts": {}}
        if path and path.exists():
            before = json.loads(path.read_text())
            if {key: before.get(key) for key in setting} == setting:
                self._document = before

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """The part of this name, measured where it is not there yet."""
        parts = self._document["parts"]
        if name not in parts:
            parts[name] = measure()
            print(f"{name}: {parts[name]}", file=sys.stderr, flush=True)
            if self._path:
                self._path.write_text(json.dumps(self._document, indent=1) + "\n")
        return parts[name]


def main() -> None:
    """Run all, print tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    setting = {
        "evener": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dtype": options.dtype,
        "epochs": options.epochs,
    }
    results = Results(options.json, setting)
    rows = [
        results.get(
            f"{way}, seed {seed}", functools.partial(train, way, dtype, seed, options.epochs)
        )
        for seed in range(options.seeds)
        for way in WAYS
    ]
    found = {
        kind: [
            results.get(f"{kind}, seed {seed}", functools.partial(fault, kind, torch.float16, seed))
            for seed in range(options.seeds)
        ]
        for kind in FAULTS
    }
    drifts = [
        results.get(f"drift, seed {seed}", functools.partial(drift, dtype, seed))
        for seed in range(options.seeds)
    ]
    show(rows, options)
    print("\n| fault (float16) | noticed after steps |\n|---|---|")
    for kind, steps in found.items():
        print(f"| {kind} | {', '.join(map(str, steps))} |")
    print(f"\nswitches by drifting data: {drifts}")


def show(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """The table of trainings."""
    base = [row["accuracy"] for row in rows if row["way"] == "fp32"]
    print(f"{options.dtype}, {options.seeds} seeds, {options.epochs} epochs\n")
    print("| way | accuracy | difference to fp32 | half steps | switches |")
    print("|---|---|---|---|---|")
    for way in WAYS:
        mine = [row for row in rows if row["way"] == way]
        gaps = [row["accuracy"] - other for row, other in zip(mine, base, strict=True)]
        width = 0.0
        if options.seeds > 1:
            spread = statistics.stdev(gaps) / math.sqrt(options.seeds)
            width = digits.STUDENT.get(options.seeds, 2.0) * spread
        mean = statistics.mean(row["accuracy"] for row in mine)
        share = statistics.mean(row["half"] for row in mine)
        count = statistics.mean(row["switches"] for row in mine)
        gap = 100 * statistics.mean(gaps)
        print(
            f"| {way} | {mean:.2%} | {gap:+.2f} ± {100 * width:.2f} | {share:.0%} | {count:.1f} |"
        )


if __name__ == "__main__":
    main()
