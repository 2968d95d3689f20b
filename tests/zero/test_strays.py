"""Weights that are read while their unit does not run, as trl's SFTTrainer reads the last layer's:
found by the trace of the call that does it, and then on the accelerator wherever the states are."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from evener import zero
from tests.zero.engines import assert_same, configuration, train_both
from tests.zero.models import Block, Model, Plain, batches, loss_of

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


class Sums(Block):
    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x + bias)


class Sharing(Model):
    """Its blocks share an input that needs a gradient, as T5's do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 32)
        self.layers = nn.ModuleList(Sums(32) for _ in range(8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, bias = self.embed(tokens), self.table(torch.arange(16))
        for layer in self.layers:
            x = layer(x, bias)
        out: torch.Tensor = self.head(self.norm(x))
        return out


class Detached(Block):
    """The first thing that it does reads a weight without a gradient: in a backward pass that is
    read last, when the weight's own gradient has been there for long."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x * self.scale.detach() + bias) * self.scale


def _tight(model: Model, recompute: bool) -> zero.Engine:
    """In as little memory as it can be trained in."""

    def start(gpu: int) -> zero.Engine:
        engine, *_ = zero.initialize(
            model=model,
            config=configuration(
                evener={"checkpointing": recompute, "budget": {"gpu": gpu, "host": 1 << 30}}
            ),
            machine=MACHINE,
            batch=(4, 16),
        )
        return engine

    with pytest.raises(zero.NoFitError) as refused:
        start(1000)
    return start(refused.value.plan.gpu_bytes)


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_leave_though_blocks_share_an_input(
    recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Sharing()
    plain = Plain(copy.deepcopy(model), 1e-2, 0.1, 0.5, torch.float32)
    engine = _tight(model, recompute)
    loading, seen = engine._loading, []
    enter = loading.enter

    def entered(unit: int) -> None:
        enter(unit)
        units = engine.store.units
        seen.append(sum(c.loaded for u, mine in units if u.repeated for c in mine))

    monkeypatch.setattr(loading, "enter", entered)
    train_both(engine, plain, 3)
    assert_same(engine, plain)
    assert 0 < max(seen) <= 4, seen
    engine.close()


class Fresh(Block):
    """Nothing keeps its input, so the next block's is likely at the same address."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + 1)


def test_an_input_at_the_address_of_one_that_is_gone_is_not_shared() -> None:
    class Drops(Model):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Fresh(32) for _ in range(8))
            self.at: list[int] = []

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                given = x + 0
                self.at.append(id(given))
                x = layer(given)
                del given
            out: torch.Tensor = self.head(self.norm(x))
            return out

    torch.manual_seed(0)
    model = Drops()
    engine = _tight(model, False)
    try:
        model.at.clear()
        loss = loss_of(engine, batches(1)[0])
        if len(set(model.at)) == len(model.at):
            pytest.skip("no address was used again")
        assert not any(live.shares for live in engine._passes._live)
        engine.backward(loss)
    finally:
        engine.close()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_weight_that_is_read_after_its_gradient_stays(recompute: bool) -> None:
    torch.manual_seed(0)
    model = Sharing()
    model.layers = nn.ModuleList(Detached(32) for _ in range(3))
    plain = Plain(copy.deepcopy(model), 1e-2, 0.1, 0.5, torch.float32)
    engine = _tight(model, recompute)
    train_both(engine, plain, 3)
    assert_same(engine, plain)
    engine.close()


class _Greedy(torch.autograd.Function):
    """Takes memory in its backward pass that no trace has seen."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, size: int) -> torch.Tensor:
        ctx.size = size
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient + torch.zeros(ctx.size + 1, dtype=torch.uint8)[0], None


def test_blocks_that_share_an_input_run_again_in_the_middle_of_a_backward_pass() -> None:
    """The blocks behind the middle have delivered their gradients; the weights of each have to stay
    until the last of its gradients has come once more."""

    class Hungry(Sharing):
        appetite = 0

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x, bias = self.embed(tokens), self.table(torch.arange(16))
            for number, layer in enumerate(self.layers):
                x = _Greedy.apply(x, self.appetite) if number == 4 else x
                x = layer(x, bias)
            out: torch.Tensor = self.head(self.norm(x))
            return out

    def run(gpu: int, appetite: int) -> tuple[list[float], zero.Engine, zero.Plan]:
        torch.manual_seed(0)
        Hungry.appetite = 0
        evener = {"device": "simulated", "checkpointing": "auto",
                  "budget": {"gpu": gpu, "host": 1 << 30}}  # fmt: skip
        engine, *_ = zero.initialize(
            model=Hungry(), config=configuration(evener=evener), machine=MACHINE, batch=(4, 16)
        )
        Hungry.appetite = appetite
        found = []
        for tokens in batches(3):
            loss = loss_of(engine, tokens)
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        memory = engine.memory()
        engine.close()
        assert engine.plan is not None
        assert (memory["passes run again"] > 0) == (appetite > 0)
        return found, engine, engine.plan

    want, _, plan = run(1 << 40, 0)
    got, _, _ = run(plan.gpu_bytes * 7 // 10, plan.gpu_bytes // 4)
    assert got == want
