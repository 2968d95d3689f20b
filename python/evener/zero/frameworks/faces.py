"""A model under the engine as a framework's loop wants it: called by itself, with real values in
`state_dict()`, and `load_state_dict()` that reaches the states.

While the engine runs, a model's own parameters hold values only while their unit runs. Values are
therefore taken from the states: in float32, exactly what the optimizer updates. A model that is
made in float32 and loads them goes on with the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from evener.errors import UsageError
from evener.zero.api import Batch, initialize
from evener.zero.config import Config
from evener.zero.engine import Engine
from evener.zero.optimizer import ZeroOptimizer
from evener.zero.ranks import world_size
from evener.zero.values import give_back, show, value_of

__all__ = ["accumulation", "give_back", "refuse_ranks", "show", "take_over", "value_of"]


def refuse_ranks(name: str) -> None:
    """Raises UsageError where there are several processes."""
    if world_size() > 1:
        raise UsageError(
            f"{name} runs in {world_size()} processes: its checkpoints hold whole weights, and "
            "each process has a share",
            "use one process here, or zero.initialize and zero.save_checkpoint in a loop of "
            "your own",
        )


def accumulation(settings: Config, steps: int, name: str) -> int:
    """Micro-batches of a step, by the configuration or the framework's own. Raises UsageError where
    both say a number, and not the same."""
    if steps > 1 and settings.accumulation not in (1, steps):
        raise UsageError(
            f"the configuration has gradient_accumulation_steps = {settings.accumulation}, and "
            f"{name} {steps}",
            "give one of them, or the same",
        )
    return max(settings.accumulation, steps)


def take_over(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: Config,
    *,
    root: nn.Module | None = None,
    example: Any = None,
    batch: Batch | None = None,
) -> tuple[Engine, ZeroOptimizer]:
    """The engine takes `root` (the model, or what holds it), and `optimizer` keeps its groups: a
    scheduler that was made for it steers the engine's. `model` gets the faces."""
    engine, front, _, _ = initialize(
        model=root or model, optimizer=optimizer, config=settings, example=example, batch=batch
    )
    if root is not None and root is not model:
        show(model, engine)
    return engine, front
