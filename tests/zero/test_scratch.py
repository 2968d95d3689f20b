"""What an update takes on the accelerator, and plans of models in which that is the most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from evener import zero
from evener.zero.rules import RULES, SGD, AdamW, Lion
from evener.zero.scratch import scratch_of
from evener.zero.store import Formats

MACHINE = zero.Machine(1e12, 1e10, 1e10, 1e9, 1e9)
FULL = Formats(torch.float32, torch.float32, torch.float32)
HALF = Formats(torch.bfloat16, torch.bfloat16, torch.bfloat16)


def test_an_update_takes_what_was_measured_of_its_rule() -> None:
    assert scratch_of(SGD(), FULL, cuda=False) == 12
    assert scratch_of(Lion(), FULL, cuda=False) == 16
    assert scratch_of(AdamW(), FULL, cuda=False) == 24
    assert scratch_of(Lion(), HALF, cuda=True) == 72, "stochastic rounding counts in 64 bits"
    assert scratch_of(AdamW(), HALF, cuda=True) == 0, "it has a kernel"
    for rule in RULES:  # a group may have weight decay where the rule's default has none
        given = {"weight_decay": 0.1} if "weight_decay" in rule.defaults else {}
        assert scratch_of(rule(**given), FULL, False) == scratch_of(rule(), FULL, False)


class Images(nn.Module):
    """Weights that are far larger than what is computed with them, as late layers of ResNet-18."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 64), (64, 64), (64, 128), (128, 128)]
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, padding=1, stride=2), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in sizes
            )
        )
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean((-1, -2))).square().mean()


def run(gpu: int, optimizer: str, own: Mapping[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16, 16)
    engine, *_ = zero.initialize(
        model=Images(),
        config={
            "optimizer": {"type": optimizer, "params": {"lr": 1e-3}},
            "zero_optimization": {"stage3_param_persistence_threshold": 500},
            "evener": {"device": "simulated", "budget": {"gpu": gpu, "host": 1 << 30}, **own},
        },
        machine=MACHINE,
        example=x,
    )
    try:
        for _ in range(3):
            engine.backward(engine(x))
            engine.step()
        return engine.memory()
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("optimizer", "own"),
    [
        ("SGD", {}),
        ("AdamW", {}),
        ("Lion", {"moments": "bf16"}),
        ("AdamW", {"moments": "bf16"}),
        ("AdamW", {"moments": "int8"}),
        ("Lion", {"moments": "int8"}),
    ],
)
def test_plans_of_models_whose_updates_are_their_peak(optimizer: str, own: dict[str, Any]) -> None:
    """Once 1.3 x the peak with SGD, and 0.5 x with Lion and bf16 moments."""
    whole = run(1 << 40, optimizer, own)
    assert 1.0 <= whole["gpu planned"] / whole["gpu peak"] < 1.05, whole
    part = run(int(0.75 * whole["gpu planned"]), optimizer, own)
    assert 0.99 < part["gpu planned"] / part["gpu peak"] < 1.05, part
    # An update is not run again: with no byte more than was planned it must go through.
    run(whole["gpu planned"], optimizer, own)
