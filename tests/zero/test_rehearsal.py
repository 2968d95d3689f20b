"""Units that run once before the plan: what is measured of which, and what the plan makes of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from evener.base.budget import Budget
from evener.zero import api
from evener.zero.config import read
from evener.zero.meter import Ledger, Meter
from evener.zero.planner import Machine
from evener.zero.planning import cut_and_trace
from evener.zero.probe import STEP
from evener.zero.profile import Profile, Rehearsed, step_seconds
from evener.zero.rehearsal import Spec, _made, rehearse, specs

CPU = torch.device("cpu")
WIDTH = 16


class Block(nn.Module):
    def __init__(self, wide: int, fails: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH)
        self.drop, self.fails = nn.Dropout(0.1), fails
        self.runs = 0

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.runs += 1
        if self.fails and type(x) in (torch.Tensor, nn.Parameter):
            raise RuntimeError("not alone")
        out: torch.Tensor = x + self.drop(self.down(self.up(x).relu()))
        return out


class Model(nn.Module):
    def __init__(self, *blocks: Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask=tokens.bool())
        return x


def profile_of(model: Model) -> tuple[Any, Profile]:
    config = read({"evener": {"checkpointing": "auto"},
                   "zero_optimization": {"stage3_param_persistence_threshold": 0}}, 1)  # fmt: skip
    call = ((torch.zeros(2, 4, dtype=torch.int64),), {})
    units, profile = cut_and_trace(model, {}, config, CPU, call, None)
    assert profile is not None
    return units, profile


def test_one_unit_of_each_kind_runs_and_nothing_moves() -> None:
    model = Model(Block(32), Block(32), Block(48)).train()
    units, profile = profile_of(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    runs = [block.runs for block in model.blocks]
    random = torch.get_rng_state()
    found = rehearse(units, profile.calls, CPU, torch.float32)
    assert sorted(kind.count for kind in found) == [1, 2]
    assert [block.runs for block in model.blocks] == runs
    for kind in found:
        assert kind.forward > 0 and kind.launch > 0 and kind.backward_recomputed > 0
        products = [f for f, _, n in kind.forward_work if f for _ in range(n)]
        assert len(products) == 2
        again = sum(n for f, _, n in kind.backward_recomputed_work if f)
        assert again == sum(n for f, _, n in kind.backward_work if f) + 2
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_inputs_have_the_strides_of_those_they_stand_for() -> None:
    given = (torch.randn(4, 6).t(), torch.randn(4, 1).expand(4, 6), torch.randn(0, 3))
    (made, _) = _made(specs(given, {}), CPU)
    assert [x.stride() for x in made] == [x.stride() for x in given]
    assert [x.shape for x in made] == [x.shape for x in given]
    flat, _ = _made(specs((torch.eye(3).to_sparse(),), {}), CPU)
    assert flat[0].shape == (3, 3)


class Keeps(Block):
    """Keeps a tensor, a count, a list and running statistics on itself."""

    def __init__(self) -> None:
        super().__init__(32)
        self.norm, self.last, self.seen = nn.BatchNorm1d(WIDTH), None, []

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.last = super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2))
        self.seen.append(self.last)
        return self.last


def test_nobody_sees_the_rehearsal() -> None:
    model = Model(Block(32), Keeps()).train()
    units, profile = profile_of(model)
    block, keeps = model.blocks
    told: list[str] = []
    for module in (block, keeps, block.up):
        module.register_forward_pre_hook(lambda *_: told.append("pre"))
        module.register_forward_hook(lambda *_: told.append("forward"))
        module.register_full_backward_hook(lambda *_: told.append("backward"))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: told.append("gradient"))
    keeps.last, keeps.seen = None, []
    before = {name: value.clone() for name, value in model.state_dict().items()}
    runs = block.runs, keeps.runs
    assert sum(kind.count for kind in rehearse(units, profile.calls, CPU, torch.float32)) == 2
    assert told == [] and keeps.last is None and keeps.seen == []
    assert (block.runs, keeps.runs) == runs
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_forward_pass_that_an_instance_brought_does_not_run() -> None:
    model = Model(Block(32))
    units, profile = profile_of(model)
    block = model.blocks[0]
    inner, told = block.forward, []
    block.forward = lambda *args, **named: told.append(1) or inner(*args, **named)
    assert rehearse(units, profile.calls, CPU, torch.float32) == ()
    assert told == []


def test_a_unit_that_finds_no_memory_is_planned_from_its_trace(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    units, profile = profile_of(Model(Block(32)))

    def none(*_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr("evener.zero.rehearsal._timed", none)
    with caplog.at_level("INFO", logger="evener.zero"):
        assert rehearse(units, profile.calls, CPU, torch.float32, limit=1) == ()
    assert "planned from the trace: blocks.0" in caplog.text


def test_what_cannot_run_alone_is_planned_from_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    units, profile = profile_of(Model(Block(32), Block(48, fails=True)))
    with caplog.at_level("INFO", logger="evener.zero"):
        found = rehearse(units, profile.calls, CPU, torch.float32)
    assert [kind.count for kind in found] == [1]
    assert "1 kinds of units ran once" in caplog.text and "blocks.1" in caplog.text


def test_inputs_are_remembered_by_their_shapes() -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    (first, second), named = specs((x, (None, 4)), {"mask": torch.ones(2, dtype=torch.bool)})
    assert first == Spec((2, 3), torch.float32, True, (3, 1))
    assert second == (None, 4) and named == {"mask": Spec((2,), torch.bool, False, (1,))}
    _, profile = profile_of(Model(Block(32)))
    (args, named) = profile.calls[max(profile.calls)]
    assert args[0].shape == (2, 4, WIDTH) and named["mask"].dtype == torch.bool


def test_a_plan_takes_what_was_measured_in_the_place_of_the_trace() -> None:
    """Two of three units were measured; launches take 3 x as long beside the optimizer."""
    work = ((1000, 0, 10),)  # 10 operations of 1 s each
    kind = Rehearsed(2, 15.0, 6.0, 25.0, 45.0, work, work, ((1000, 0, 20),))
    profile = Profile((), (), frozenset(), forward=((1000, 0, 30),), backward=((1000, 0, 30),),
                      backward_recomputed=((1000, 0, 60),))  # fmt: skip
    assert step_seconds(profile, 1000, 0, 0.0) == (30, 30, 30, 60)
    measured = dataclasses.replace(profile, rehearsed=(kind,))
    forward, beside, plain, again = step_seconds(measured, 1000, 0, 0.0, 3.0)
    assert forward == 10 + 2 * 15
    assert beside == 10 + 2 * 18  # 3 x 6 s of launches
    assert plain == 10 + 2 * 25
    assert again == 20 + 2 * 45


@pytest.mark.parametrize(
    ("asked", "ranks", "cores", "runs"),
    [("auto", 1, 0, True), ("auto", 2, 0, False), (False, 1, 0, False), ("auto", 1, 132, False)],
)
def test_units_run_where_one_process_plans_for_the_gpu_that_is_here(
    asked: bool | str, ranks: int, cores: int, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read({"evener": {"rehearse": asked}} if asked != "auto" else {}, 1)
    profile = Profile((), (), frozenset())
    monkeypatch.setattr(api, "world_size", lambda: ranks)
    monkeypatch.setattr(api, "_budget", lambda *_: Budget(8 << 30, 8 << 30))
    monkeypatch.setattr(api, "rehearse", lambda *_: (Rehearsed(1, 1.0, 1.0, 1.0, 1.0),))
    machine = Machine(1e12, 1e10, 1e10, 1e9, 1e9, cores=cores)
    found = api._rehearsed(profile, [], config, torch.device("cuda"), machine, None)
    assert found is not None and bool(found.rehearsed) == runs


def test_the_host_has_what_units_loaded_when_they_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.budgets, "resident_now", lambda: 3_000_000_000)
    machine = Machine(flops=1e12, h2d=1e10, d2h=1e10, host_adam=1e9, device_adam=1e10)
    ran = Rehearsed(1, 1.0, 1.0, 1.0, 1.0)
    profile = Profile((), (), frozenset(), rehearsed=(ran,))
    assert api._loaded(machine, profile).host_reserve == 3_000_000_000 + STEP
    large = dataclasses.replace(machine, host_reserve=4_000_000_000)
    assert api._loaded(large, profile) == large
    assert api._loaded(machine, dataclasses.replace(profile, rehearsed=())) == machine
    monkeypatch.setattr(api, "world_size", lambda: 2)
    assert api._loaded(machine, profile) == machine


def test_what_modules_launch_takes_longer_than_what_autograd_does() -> None:
    work = ((0, 0, 100),)
    profile = Profile((), (), frozenset(), forward=work, backward=work, backward_recomputed=work)
    forward, beside, plain, again = step_seconds(profile, 1.0, 0.0, 0.01, 4.0)
    assert plain == again == pytest.approx(1.0)
    assert forward > plain and beside == pytest.approx(4 * forward)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [64, 128])
def test_attention_is_counted_by_the_square_of_the_length(length: int, causal: bool) -> None:
    """On a CPU too, whose kernel torch's formulas do not know; a causal one is half."""
    shape, work = (2, 3, length, 16), 2 * 3 * length**2 * 16 * (2 if causal else 4)
    with FakeTensorMode(), Meter(Ledger(), count_work=True) as meter:
        query, key, value = (torch.empty(shape, requires_grad=True) for _ in range(3))
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        assert meter.work is not None
        assert sum(flops * n for (flops, _), n in meter.work.items()) == work
        meter.work.clear()
        out.sum().backward()
        assert sum(flops * n for (flops, _), n in meter.work.items()) == 5 * work // 2
