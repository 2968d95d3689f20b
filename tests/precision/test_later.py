"""What a step reads, and when: nothing that was queued after its forward pass."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from evener import precision
from evener.precision import State
from evener.precision import torch as policies
from tests.precision.test_torch import QUICK, Tower, train


class Watched(policies.Later):
    """Counts in which step it was made and read."""

    all: ClassVar[list[Watched]] = []

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__(value)
        self.reads = 0
        Watched.all.append(self)

    def read(self) -> float:
        self.reads += 1
        return super().read()


def test_only_the_loss_is_read_in_its_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float16, in a step that looks at the zeros too (every tenth does)."""
    monkeypatch.setattr(policies, "Later", Watched)
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = precision.follow(model, optimizer, dtype=torch.float16, limits=QUICK)
    train(policy, 60)
    assert policy.half and policy.machine.step % 10 == 0
    Watched.all.clear()
    train(policy, 1, 60)
    loss, *others = Watched.all
    assert loss.reads == 1
    assert [one.reads for one in others] == [0, 0]  # the zeros, whether the scale was halved
    train(policy, 1, 61)
    assert [one.reads for one in others] == [1, 1]


def test_a_scale_that_the_program_sets_is_no_halving() -> None:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = precision.follow(model, optimizer, dtype=torch.float16, limits=QUICK)
    train(policy, 60)
    for step in range(60, 70):
        policy.scaler.update(new_scale=policy.scaler.get_scale() / 2)
        train(policy, 1, step)
    assert policy.machine.state is State.HALF, policy.events
