"""What the training scripts of these tests share: how they are made, what they do in each step, and
what they leave behind to compare; and what the log says meanwhile."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.comm import models


class Script:
    """One training. A subclass makes `model` of `module`, and says what the loss is.

    `changes`: what is special about it; "optimizer" names one of torch's, "options" are its own.
    """

    steps = 7
    model: Any

    def __init__(self, rank: int, module: nn.Module, changes: dict[str, Any]) -> None:
        self.rank, self.changes = rank, changes
        self.module: Any = module.to(models.device())
        kind = getattr(torch.optim, changes.get("optimizer", "SGD"))
        self.optimizer: Any = kind(module.parameters(), **changes.get("options", {"lr": 0.1}))
        # What it looks at on its way.
        self.log: list[torch.Tensor] = []

    def loss(self, step: int) -> torch.Tensor:
        """The loss of this rank's batch in that step."""
        raise NotImplementedError

    def step(self) -> None:
        self.optimizer.step()

    def result(self) -> dict[str, torch.Tensor]:
        """The log as log0, log1..., weights, and the optimizer's state."""
        found = {f"log{i}": value for i, value in enumerate(self.log)}
        found |= {k: v.clone() for k, v in self.model.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    found[f"{index}.{name}"] = value.clone()
        return found


def plain(s: Script) -> None:
    for step in range(s.steps):
        s.optimizer.zero_grad()
        s.loss(step).backward()
        s.step()


def keeps_zeros(s: Script) -> None:
    for step in range(s.steps):
        s.optimizer.zero_grad(set_to_none=False)
        s.loss(step).backward()
        s.step()


def clipping(s: Script) -> None:
    for step in range(s.steps):
        s.optimizer.zero_grad()
        s.loss(step).backward()
        s.log.append(nn.utils.clip_grad_norm_(s.model.parameters(), 0.2))
        s.step()


def accumulation(s: Script) -> None:
    for step in range(s.steps):
        s.optimizer.zero_grad()
        with s.model.no_sync():
            s.loss(100 + step).backward()
        s.loss(step).backward()
        s.step()


def two_backwards(s: Script) -> None:
    for step in range(s.steps):
        s.optimizer.zero_grad()
        loss = s.loss(step)
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        s.step()


class Heard(logging.Handler):
    """Keeps what is logged: `lines`, without the level, and `levels`."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.levels: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.levels.append(record.levelname)


@contextlib.contextmanager
def heard(name: str = "evener", level: int = logging.INFO) -> Iterator[Heard]:
    """What that logger and those below it say, from `level` on."""
    logger, handler = logging.getLogger(name), Heard()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
