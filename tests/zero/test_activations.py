"""Activations that wait on the host come back as they left, and no bit changes."""

from __future__ import annotations

import copy
import functools
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from evener import zero
from evener.zero.activations import Offload
from evener.zero.device import SimulatedDevice
from evener.zero.host import HostMemory
from evener.zero.spans import Spans

from .engines import assert_same, configuration, train_both
from .models import Model, Plain, batches, loss_of


def offloaded(model: Model) -> zero.Engine:
    """Inputs of recomputed blocks go to the host."""
    evener = {"checkpointing": "offload", "budget": {"gpu": "1GB", "host": "4GB"}}
    machine = zero.Machine(1e12, 1e10, 1e10, 1e9, 1e9)
    config = configuration(evener=evener)
    engine, *_ = zero.initialize(model=model, config=config, machine=machine, batch=(4, 16))
    return engine


@pytest.mark.parametrize("tied", [False, True])
def test_activations_on_the_host_change_no_bit(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.zero.activations.SMALL", 1)
    torch.manual_seed(0)
    model = Model(tied=tied)
    plain = Plain(copy.deepcopy(model), 1e-2, 0.1, 0.5, torch.float32)
    engine = offloaded(model)
    assert engine.plan is not None and engine.plan.checkpointing == "offload"
    assert engine._passes.offload is not None
    train_both(engine, plain, 4)
    assert_same(engine, plain)
    # One place for each block, taken in every step again.
    assert [len(free) for free in engine._passes.offload._free.values()] == [4]
    engine.close()


class Biased(Model):
    """Its blocks share two inputs, as T5's do: one transposed, one that is no dense tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 32)
        self.seen: list[tuple[tuple[int, ...], ...]] = []
        for layer in self.layers:
            layer.forward = functools.partial(self.block, layer.forward)  # type: ignore[method-assign]

    def block(self, inner: Any, x: torch.Tensor, bias: torch.Tensor, wide: torch.Tensor) -> Any:
        self.seen.append((x.stride(), bias.stride(), wide.stride()))
        return inner(x + bias.transpose(0, 1) * wide)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        bias = self.table(torch.arange(16)).transpose(0, 1)
        wide = self.table(torch.arange(1)).expand(4, 16, 32)
        for layer in self.layers:
            x = layer(x, bias, wide)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def test_inputs_come_back_from_the_host_as_they_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener.zero.activations.SMALL", 1)
    torch.manual_seed(0)
    model = Biased()
    plain = Plain(copy.deepcopy(model), 1e-2, 0.1, 0.5, torch.float32)
    engine = offloaded(model)
    assert engine._passes.offload is not None
    for tokens in batches(3):
        model.seen.clear()
        engine.backward(loss_of(engine, tokens))
        engine.step()
        loss_of(plain.model, tokens).backward()
        plain.step()
        # Forward, and recomputed from the last to the first.
        assert len(model.seen) == 8 and model.seen[4:] == model.seen[3::-1]
        assert {bias for _, bias, _ in model.seen} == {(1, 32)}
    assert_same(engine, plain)
    # The bias left once for all four blocks; what is expanded stayed. The pool is of four pages.
    places = {key: len(free) for key, free in engine._passes.offload._free.items()}
    assert places == {(4 * 16 * 32, torch.float32): 3, (16 * 32, torch.float32): 1}
    engine.close()


def test_only_plain_tensors_wait_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass has more to it than its elements: lazy logits have a graph of their own."""
    monkeypatch.setattr("evener.zero.activations.SMALL", 1)
    device = SimulatedDevice()
    offload = Offload(device, Spans(device), HostMemory(16 << 20))
    plain = torch.randn(4, 4)
    other = plain.as_subclass(type("Other", (torch.Tensor,), {}))
    assert offload._unpack(offload._pack(other)) is other
    saved = offload._pack(plain)
    assert saved is not plain and torch.equal(offload._unpack(saved), plain)


def test_two_inputs_are_there_at_a_time_in_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plan counts (`profile.peaks`): the one that is used, and the next. What left in the
    forward pass is let go of."""
    monkeypatch.setattr("evener.zero.activations.SMALL", 1)
    made: list[weakref.ref[Any]] = []
    there: list[int] = []
    fetch = Offload._fetch

    def counted(self: Offload, saved: Any) -> None:
        fetch(self, saved)
        made.append(weakref.ref(saved))
        alive = (ref() for ref in made)
        there.append(sum(1 for each in alive if each is not None and each.back is not None))
        assert not self._leaving

    monkeypatch.setattr(Offload, "_fetch", counted)
    engine = offloaded(Model())
    for tokens in batches(2):
        engine.backward(loss_of(engine, tokens))
        engine.step()
    assert there == [1, 2, 2, 2] * 2
    engine.close()
