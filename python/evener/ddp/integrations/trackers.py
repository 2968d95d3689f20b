"""What Evener sends and how long it shows, in Weights & Biases, TensorBoard or MLflow.

    track = trackers.wandb(model)           # or tensorboard(model, writer), mlflow(model)
    for step, batch in enumerate(loader):
        ...
        track(step)

Only rank 0 writes, every 50 steps. None of the three packages is imported before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from evener.base.given import given
from evener.errors import UsageError

PREFIX = "evener/"
Write = Callable[[dict[str, float], int], None]


@given
def figures(model: nn.Module) -> dict[str, float]:
    """What can be said of `model` now, by name; empty before Evener is under it.

    model: of `evener.ddp` or `evener.fsdp`, also where a launcher's option put Evener under it.

    evener/gradients_mb     of this rank's gradients, as they lie in buckets
    evener/sent_mb          of it, what this rank sends in a step (of local steps: the mean)
    evener/buckets_FORM     how many buckets go in that form (exact, int8, ...)
    evener/step_ms          mean of the last steps, where a planner measures
    evener/exposed_ms       of it, what computing does not hide
    """
    reducer = getattr(model, "evener", None)
    exchanges = list(getattr(reducer, "exchanges", ()))
    if not exchanges:
        return {}
    found = {
        "gradients_mb": sum(exchange.bytes for exchange in exchanges) / 1e6,
        "sent_mb": sum(exchange.sent_bytes for exchange in exchanges) / 1e6,
    }
    found["sent_mb"] /= getattr(reducer, "every", 1)
    for exchange in exchanges:
        name = f"buckets_{exchange.wire.name}"
        found[name] = found.get(name, 0.0) + 1.0
    planner = getattr(getattr(model, "evener_steps", None), "planner", None)
    if planner is not None and planner.decision is not None:
        made = planner.decision
        step = made.step_ms if planner.measured_ms is None else planner.measured_ms
        found["step_ms"] = step
        found["exposed_ms"] = max(0.0, step - made.compute_ms)
    return {PREFIX + name: float(value) for name, value in found.items()}


class Tracker:
    """Call it once per step: it writes `figures` of the model, on rank 0, every `every` steps."""

    @given
    def __init__(self, model: nn.Module, write: Write, every: int = 50) -> None:
        """write: takes figures by name, and the step. Raises UsageError where every is below 1."""
        if every < 1:
            raise UsageError(f"every={every}", "give 1 or more steps")
        self._model, self._write, self._every = model, write, every

    def __call__(self, step: int) -> None:
        """The `step`-th step has ended."""
        if step % self._every or (dist.is_initialized() and dist.get_rank() != 0):
            return
        if found := figures(self._model):
            self._write(found, step)


@given
def wandb(model: nn.Module, run: Any = None, every: int = 50) -> Tracker:
    """run: of `wandb.init()`; None: the one that is active where something is written.

    Steps are on an axis of their own, `evener/step`: your own calls of `log` keep theirs.
    """
    known: list[Any] = []

    def write(found: dict[str, float], step: int) -> None:
        import wandb as package

        active = run or package.run
        if active is None:
            raise UsageError("Weights & Biases has no run", "call wandb.init() on rank 0 first")
        if active not in known:
            known.append(active)
            active.define_metric(f"{PREFIX}step")
            active.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")
        active.log({**found, f"{PREFIX}step": step})

    return Tracker(model, write, every)


@given
def tensorboard(model: nn.Module, writer: Any, every: int = 50) -> Tracker:
    """writer: a `torch.utils.tensorboard.SummaryWriter`, or what has its `add_scalar`."""
    if not hasattr(writer, "add_scalar"):
        raise UsageError(
            f"tensorboard() was given a {type(writer).__name__}",
            "give a SummaryWriter of torch.utils.tensorboard",
        )

    def write(found: dict[str, float], step: int) -> None:
        for name, value in found.items():
            writer.add_scalar(name, value, step)

    return Tracker(model, write, every)


@given
def mlflow(model: nn.Module, every: int = 50) -> Tracker:
    """Into MLflow's active run; it begins one where there is none."""

    def write(found: dict[str, float], step: int) -> None:
        import mlflow as package

        package.log_metrics(found, step=step)

    return Tracker(model, write, every)
