"""Out of memory beside the engine: the error names the budget, who has the memory, and the fix."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from evener import zero
from evener.zero import out_of_memory
from evener.zero.device import SimulatedDevice

WIDTH, BUDGET = 64, 6_000_000
X = torch.ones(4, 8, WIDTH)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _engine(budget: int = BUDGET) -> zero.Engine:
    model = Net()
    engine, *_ = zero.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), 1e-3),
        config={
            "zero_optimization": {"stage3_param_persistence_threshold": 0},
            "evener": {"device": "simulated", "budget": {"gpu": budget}},
        },
        example=(X,),
        machine=zero.Machine(1e12, 1e10, 1e10, 1e9, 1e9),
    )
    return engine


def test_a_step_without_room_says_what_is_beside_it() -> None:
    budget = 60_000_000
    engine = _engine(budget)
    try:
        engine.backward(engine(X).square().mean())
        engine.step()
        engine.settle()
        used, _ = engine.device.used()
        beside = [torch.empty(budget - used - 1000, dtype=torch.uint8)]
        with pytest.raises(zero.NoRoomError) as caught:
            for _ in range(20):  # what the engine gives away for room is taken too
                engine(X)
                used, _ = engine.device.used()
                beside.append(torch.empty(budget - used - 1000, dtype=torch.uint8))
        said, others = str(caught.value), sum(x.nbytes for x in beside)
        (found,) = re.findall(r"tensors are there: ([\d.]+) GB are not the engine's", said)
        assert float(found) * 1e9 == pytest.approx(others, abs=5e6)  # two decimals
        assert "evener.budget.gpu is 0.06 GB" in said
        assert 'give evener.budget.gpu = "1GB"' in said
        beside.clear()
        engine.backward(engine(X).square().mean())  # and it goes on
    finally:
        engine.close()


def test_who_has_how_much() -> None:
    """24 GB, of which 20 are planned: 1 for the context, 2 for others, 17 for the engine."""
    gb = 10**9
    plan: Any = SimpleNamespace(
        gpu_bytes=20 * gb,
        gpu_reserve=gb,
        gpu_held=2 * gb,
        budget=SimpleNamespace(gpu=23 * gb, spare=gb),
    )
    device: Any = SimpleNamespace(used=lambda: (26 * gb, 4 * gb))
    problem, fix = out_of_memory.account(plan, device, gb)
    assert "at least 9.00 GB are not the engine's (2.00 GB when it was planned)" in problem
    assert "other processes have about 3.00 GB" in problem
    assert 'evener.budget.spare = "9GB"' in fix  # 1 was left, 7 came, and 1 more was asked for
    problem, fix = out_of_memory.account(plan, device, gb, own=10 * gb)
    assert "are there: 16.00 GB are not the engine's" in problem and '"39GB"' in fix


class _Wants(torch.autograd.Function):
    """A loss whose backward pass finds no memory."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    @staticmethod
    def backward(_ctx: Any, _gradient: torch.Tensor) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has")


def test_the_callers_own_loss_and_a_model_beside_the_engine() -> None:
    engine = _engine()
    try:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            engine.backward(_Wants.apply(engine(X)))
        said = str(caught.value)
        assert said.startswith("CUDA out of memory. Tried to allocate 2.50 GiB.")
        assert "evener: evener.budget.gpu is 0.01 GB" in said
        assert 'give evener.budget.spare = "3GB"' in said  # 2.68 GB that were asked for
        with (
            pytest.raises(torch.OutOfMemoryError) as caught,
            engine.explained(),
            engine.explained(),
        ):
            torch.empty(BUDGET, dtype=torch.uint8)
        assert str(caught.value).count("evener.budget.gpu is") == 1
    finally:
        engine.close()


def test_a_trainers_step_is_explained() -> None:
    """A reference model runs in Trainer's step, where no call of the engine would see its error."""

    class Base:
        def __init__(self, accelerator: Any) -> None:
            self.accelerator = accelerator

        def create_accelerator_and_postprocess(self) -> None:
            """As Trainer has it."""

        def training_step(self, model: Any, inputs: Any) -> None:
            torch.empty(BUDGET, dtype=torch.uint8)

    engine = _engine()
    trainer = zero.trainer(Base)(SimpleNamespace(evener=engine))
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"evener\.budget\.gpu is 0\.01 GB"):
            trainer.training_step(None, None)
    finally:
        engine.close()


def test_what_is_there_before_is_planned_for_and_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SimulatedDevice, "allocated", lambda _: 20_000_000)
    _engine(60_000_000).close()
    (said,) = [r for r in caplog.records if "held by something else" in r.getMessage()]
    assert said.levelname == "WARNING" and said.getMessage().startswith("0.02 of the budget's 0.06")
    with pytest.raises(zero.NoFitError, match=r"0\.02 GB of the accelerator are other tensors"):
        _engine(20_100_000)
