"""Kernels of Triton that a model launches itself, under the engine: the interpreter's, on a CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import nn
from triton.runtime.interpreter import InterpretedFunction

from evener.zero import launches, tokenwise
from evener.zero.engine import Engine
from evener.zero.trace import timed_trace
from evener.zero.units import cut

from .engines import HYPER, assert_same, start, train_both
from .models import Model, Plain

CPU = torch.device("cpu")


def _double(x: Any, out: Any, count: tl.constexpr) -> None:
    at = tl.arange(0, count)
    tl.store(out + at, tl.load(x + at) * 2)


double = InterpretedFunction(_double)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x, out = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
        double[(1,)](x, out, x.numel())
        return out

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return Double.apply(gradient)  # type: ignore[no-any-return]


class Doubled(nn.Module):
    """A wide part of a token's own, but for its kernel."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(Double.apply(self.up(x)))
        return out


class Borrowed(nn.Module):
    """Gives a kernel a weight of a block that runs later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Doubled(16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, last = self.layers
        out: torch.Tensor = last(first(x) + Double.apply(last.up.weight).sum())  # type: ignore[union-attr, arg-type]
        return out


def doubled() -> Model:
    torch.manual_seed(0)
    model = Model()
    width = model.head.in_features
    model.head = nn.Sequential(Doubled(width), model.head)  # type: ignore[assignment]
    return model


def test_a_step_is_traced_past_them_and_says_so() -> None:
    model = Doubled(16)
    units = cut(model, {}, small=100)
    x = torch.randn(2, 8, 16)
    found, said = timed_trace(model, units, (x,), {}, device=CPU, dtype=torch.float32)
    assert found is not None
    assert "kernels of Triton count no time (2 x _double)" in said
    assert torch.equal(Double.apply(x), 2 * x)  # launched again


def test_a_weight_that_only_a_kernel_reads_is_seen() -> None:
    model = Borrowed()
    units = cut(model, {}, small=100)
    given = (torch.randn(2, 8, 16),)
    found, _ = timed_trace(model, units, given, {}, device=CPU, dtype=torch.float32)
    assert found is not None
    assert found.strays == {"layers.1.up.weight"}


def test_without_that_an_address_is_asked_for_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not a crash."""
    monkeypatch.setattr(launches, "FakeTensor", int)
    model = Doubled(16)
    given = (torch.randn(2, 8, 16),)
    units = cut(model, {}, small=100)
    found, said = timed_trace(model, units, given, {}, device=CPU, dtype=torch.float32)
    assert found is None
    assert "data pointer" in said


def test_what_has_one_is_not_token_wise() -> None:
    plain = Doubled(16)
    plain.forward = lambda x: plain.down(plain.up(x) * 2)  # type: ignore[method-assign]
    assert tokenwise.width_of(plain) == 16
    assert tokenwise.width_of(Doubled(16)) == 0


@pytest.mark.parametrize("tiles", [False, True])
def test_a_model_trains_as_without_the_engine(tiles: bool) -> None:
    model = doubled()
    copied = copy.deepcopy(model)
    plain = Plain(copied, HYPER["lr"], HYPER["weight_decay"], 0.5, torch.float32)
    engine: Engine = start(model, evener={"tiles": tiles})
    train_both(engine, plain, 3)
    assert_same(engine, plain)
    engine.close()
