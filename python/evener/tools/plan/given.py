"""What all plans read from the options of `evener plan`, and how long a step takes."""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Any

import click
from rich.console import Console

from evener.base.units import parse_rate
from evener.comm.planner.costs import Link
from evener.errors import UsageError

_PIPE_WIDTH = 120


def console(as_json: bool) -> Console:
    """Where tables go. JSON has standard output for itself."""
    made = Console(stderr=as_json)
    return made if made.is_terminal else Console(stderr=as_json, width=_PIPE_WIDTH, highlight=False)


@dataclasses.dataclass(frozen=True)
class Links:
    """Between nodes, inside them, and the memory's rate in bytes per millisecond."""

    between: Link
    inside: Link
    memory: float

    @staticmethod
    def of(given: dict[str, Any]) -> Links:
        """From the options' values. Raises UsageError."""
        network = parse_rate(given["network"], "--network")
        return Links(
            Link.of_rate(network, given["latency_us"], given["goodput"]),
            Link.of_rate(parse_rate(given["inside"], "--inside"), 5.0),
            parse_rate(given["memory"], "--memory") / 8e3,
        )


def clusters(text: str) -> list[tuple[int, int]]:
    """Nodes and GPUs of each, from `2x8,4x8`. Raises UsageError."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:x(\d+))?", part.strip())
        if not match or not int(match[1]) or (match[2] and not int(match[2])):
            raise UsageError(
                f"--nodes {text!r}: {part.strip()!r} is not a cluster",
                "write NODESxGPUS, as 2x8, or several: 2x8,4x8",
            )
        found.append((int(match[1]), int(match[2] or 1)))
    return found


def compute_ms(said: float | None, name: str, batch: int) -> tuple[float, str]:
    """Milliseconds of a step on one GPU alone, as said or measured here; and which of both.

    `batch`: 0 where nothing of `name` can be run here. Raises UsageError.
    """
    if said is not None:
        return said, "as given"
    if not batch:
        raise UsageError(
            f"how long a step of {name} takes is not known, and it cannot be measured here",
            "give --compute-ms",
        )
    return _measure(name, batch), "measured here"


def _measure(name: str, batch: int) -> float:
    """Milliseconds of a training step of `name` on this machine's GPU (TF32)."""
    import torch

    from evener.tools.bench.train import models

    if not torch.cuda.is_available():
        raise UsageError(
            "how long a step takes is not known, and there is no GPU here to measure it on",
            "give --compute-ms (evener bench train --rows one measures it), or --profile",
        )
    click.echo(f"measuring {name} on {torch.cuda.get_device_name()}", err=True)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    model = models.build(name).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = models.data(name, batch, "cuda")
    best = float("inf")
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.zero_grad()
        models.criterion(model(inputs), targets).backward()
        optimizer.step()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) * 1e3)
    return best
