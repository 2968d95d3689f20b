"""Engines on the simulated device, and what they hold beside the plain loop of `models`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from evener import zero

from .models import Plain, batches, loss_of

HYPER = {"lr": 1e-2, "weight_decay": 0.1}


def configuration(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": HYPER},
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "evener": {"device": "cpu"},
    }
    own = {**base["evener"], **changes.pop("evener", {})}
    return {**base, **changes, "evener": own}


def start(model: nn.Module, resident: set[str] | None = None, **changes: Any) -> zero.Engine:
    engine, *_ = zero.initialize(
        model=model, config=configuration(**changes), resident=resident or set()
    )
    engine.threads = 1
    return engine


def weights(engine: zero.Engine) -> dict[str, torch.Tensor]:
    engine.drain()
    found = {}
    for chunk in engine.chunks():
        full = chunk.states.full()
        for piece in chunk.group.pieces:
            found[piece.name] = full[piece.offset : piece.offset + piece.numel].view(piece.shape)
    return found


def assert_same(engine: zero.Engine, plain: Plain) -> None:
    got = weights(engine)
    names = {id(p): name for name, p in plain.model.named_parameters()}
    for p, master in zip(plain.trained, plain.masters, strict=True):
        assert torch.equal(got[names[id(p)]].float(), master), names[id(p)]


def train_both(engine: zero.Engine, plain: Plain, steps: int) -> None:
    """The same steps, with each."""
    for tokens in batches(steps):
        engine.backward(loss_of(engine, tokens))
        engine.step()
        loss_of(plain.model, tokens).backward()
        plain.step()


class Branches(nn.Module):
    """Two experts in one chunk, of which a batch may use one; a third that can be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({n: nn.Linear(8, 8) for n in "abc"})])
        self.layers[0].forward = self.route  # type: ignore[method-assign]
        self.which = "ab"

    def route(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.which + "c":
            x = x + self.layers[0][name](x).tanh()
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x)
