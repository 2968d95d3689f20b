"""Weights that are read while their unit does not run, as trl's SFTTrainer reads the last layer's:
found by the trace of the call that does it, and then on the accelerator wherever the states are."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch.nn import functional

from evener import zero
from tests.zero.models import Model, batches

MACHINE = zero.Machine(1e12, 1e10, 1e10, 1e9, 1e9)


class Reads(Model):
    def forward(self, tokens: torch.Tensor, direct: bool = False) -> torch.Tensor:
        if not direct:
            return super().forward(tokens)
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.head.weight.t()


def losses(model: Any, steps: Any) -> list[float]:
    found = []
    for number, tokens in enumerate(batches(4)):
        out = model(tokens, direct=number > 0).float()
        loss = functional.cross_entropy(out.flatten(0, 1), tokens.flatten())
        steps(loss)
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("loss", ["plain", "fused"])
def test_a_call_that_reads_the_last_layer_itself(loss: str) -> None:
    torch.manual_seed(0)
    model = Reads()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def step(value: torch.Tensor) -> None:
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    want = losses(plain, step)
    engine, *_ = zero.initialize(
        model=model,
        config={
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage3_param_persistence_threshold": 100},
            "evener": {"device": "cpu", "loss": loss, "budget": {"gpu": "10MB", "host": "1GB"}},
        },
        example=batches(1)[0],
        machine=MACHINE,
    )
    assert "head/0" in engine.plan.resident

    def under(value: torch.Tensor) -> None:
        engine.backward(value)
        engine.step()
        engine.room._evict(1 << 30)  # all that may go to the host does

    try:
        assert list(inspect.signature(model.forward).parameters) == ["tokens", "direct"]
        assert losses(engine, under) == pytest.approx(want, rel=1e-6)
        head = next(c for c in engine.chunks() if c.group.name == "head/0")
        assert not head.resident and head.keeps
    finally:
        engine.close()
