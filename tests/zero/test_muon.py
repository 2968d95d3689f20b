"""torch.optim.Muon for matrices and another optimizer for the rest, under the engine: bit for bit
what plain torch does, wherever matrices live; and what is refused."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from evener import zero
from evener.errors import UsageError
from evener.tools.plan.memory import plan_memory
from evener.zero import groups, lanes, rules, split, ssd
from evener.zero.checkpoint import CheckpointError
from evener.zero.config import Config
from evener.zero.states import Noise, States

from .engines import weights
from .models import Model, Plain, batches, loss_of
from .test_plan import MACHINE
from .test_rules import Lion

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 has Muon")
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"nesterov": False},
    {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.8},
    {"ns_steps": 3, "ns_coefficients": (3.0, -4.0, 2.0), "eps": 1e-3, "weight_decay": 0.0},
]


def parts(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of the blocks, and the rest."""
    chosen = split.hidden(model)
    return list(chosen), [p for p in model.parameters() if p not in chosen]


def optimizers(model: nn.Module, **changes: Any) -> list[torch.optim.Optimizer]:
    """Lion, because its steps are torch's bit for bit in a plain loop."""
    matrices, rest = parts(model)
    muon = torch.optim.Muon(matrices, **{**MUON, **changes})
    return [muon, Lion(rest, 1e-3, weight_decay=0.1)]


def settings(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "evener": {"device": "cpu"},
    }
    own = {**base["evener"], **changes.pop("evener", {})}
    return {**base, **changes, "evener": own}


def start(
    model: nn.Module,
    resident: set[str] | None = None,
    away: set[str] | None = None,
    streaming: bool = False,
    given: list[torch.optim.Optimizer] | None = None,
    **changes: Any,
) -> tuple[zero.Engine, list[torch.optim.Optimizer]]:
    made = given or optimizers(model)
    engine, *_ = zero.initialize(
        model=model, optimizer=made, config=settings(**changes),
        resident=resident or set(), away=away, streaming=streaming,
    )  # fmt: skip
    engine.threads = 1
    return engine, made


def step(loss: torch.Tensor, made: list[torch.optim.Optimizer]) -> None:
    loss.backward()
    for one in made:
        one.step()
    for one in made:
        one.zero_grad()


def assert_same(engine: zero.Engine, plain: nn.Module) -> None:
    engine.drain()
    found = engine.module.state_dict()
    for name, parameter in plain.named_parameters():
        assert torch.equal(found[name], parameter.detach()), name


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_bitwise_a_plain_loop(changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    theirs = optimizers(plain, **changes)
    engine, mine = start(model, {"layers.1/0"}, given=optimizers(model, **changes))
    for tokens in batches(6):
        step(loss_of(engine, tokens), mine)
        step(loss_of(plain, tokens), theirs)
    assert_same(engine, plain)
    assert engine.global_steps == 6
    matrices = sum(p.numel() for p in split.hidden(plain))
    assert engine.updated["stream"] == 6 * matrices * 3 // 4, "the lane of whole matrices"
    engine.close()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("place", ["host", "accelerator", "ssd"])
def test_places_do_not_change_a_bit(
    place: str, streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evener.zero.ssd.BLOCK", 4096)  # a matrix is in more than one block
    torch.manual_seed(0)
    model = Model(width=48)
    plain = copy.deepcopy(model)
    theirs = optimizers(plain)
    names = {f"layers.{n}/0" for n in range(4)}
    engine, mine = start(
        model,
        names if place == "accelerator" else set(),
        names | {"layers.0/1"} if place == "ssd" else None,
        streaming,
        evener={"budget": {"ssd": f"{tmp_path}:100MB"}} if place == "ssd" else {},
    )
    for tokens in batches(4):
        step(loss_of(engine, tokens), mine)
        step(loss_of(plain, tokens), theirs)
    assert_same(engine, plain)
    if place == "ssd":
        assert all(c.away is not None for c in engine.chunks() if c.group.name in names)
    engine.close()


@pytest.mark.parametrize("streaming", [False, True])
def test_a_matrix_may_be_larger_than_a_slice(
    streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots hold the largest matrix, and what is elementwise goes on by slices."""
    monkeypatch.setattr(lanes, "SLICE", 1024)
    torch.manual_seed(0)
    model = Model(width=48)
    plain = copy.deepcopy(model)
    theirs = optimizers(plain)
    engine, mine = start(model, streaming=streaming)
    for tokens in batches(4):
        step(loss_of(engine, tokens), mine)
        step(loss_of(plain, tokens), theirs)
    assert_same(engine, plain)
    engine.close()


def test_chunks_that_leave_and_checkpoints_beside_training(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    theirs = optimizers(plain)
    names = {f"layers.{n}/0" for n in range(4)}
    engine, mine = start(model, names)
    for number, tokens in enumerate(batches(6)):
        step(loss_of(engine, tokens), mine)
        step(loss_of(plain, tokens), theirs)
        if number == 2:
            held = copy.deepcopy(plain.state_dict())
            save = zero.begin_checkpoint(engine, tmp_path)
            engine.room._evict(1 << 40)
            assert not [c for c in engine.chunks() if c.resident and c.group.name in names]
    assert_same(engine, plain)
    save.result()
    zero.load_checkpoint(engine, tmp_path)
    plain.load_state_dict(held)
    assert_same(engine, plain)
    engine.close()


def test_a_disk_that_fails_ends_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some matrices have moved and some have not: only a checkpoint is whole."""
    model = Model(width=48)
    names = {f"layers.{n}/0" for n in range(4)}
    budget = {"budget": {"ssd": f"{tmp_path}:100MB"}}
    engine, mine = start(model, away=names, evener=budget)
    given = batches(2)

    def fails(*_: Any) -> None:
        raise ssd.SsdError("SSD tier: no space", "make room")

    with monkeypatch.context() as patch:
        patch.setattr(ssd.Away, "write", fails)
        step(loss_of(engine, given[0]), mine)
        with pytest.raises(ssd.SsdError, match="no space"):
            engine.drain()
    for _ in range(2):
        with pytest.raises(ssd.SsdError, match="no space"):
            step(loss_of(engine, given[1]), mine)
    with pytest.raises(ssd.SsdError, match="no space"):
        zero.save_checkpoint(engine, tmp_path / "saved")


def test_bf16_with_an_exact_copy_clipping_accumulation_and_a_schedule() -> None:
    """The plain loop has float32 masters, and gradients in bf16."""
    torch.manual_seed(0)
    model = Model()
    plain = Plain(copy.deepcopy(model), 0.0, 0.0, 0.5, torch.bfloat16)
    chosen = split.hidden(plain.model)
    at = [n for n, p in enumerate(plain.trained) if p in chosen]
    others = [n for n in range(len(plain.trained)) if n not in at]
    theirs = [
        torch.optim.Muon([plain.masters[n] for n in at], **MUON),
        Lion([plain.masters[n] for n in others], 1e-3, weight_decay=0.1),
    ]
    mine = optimizers(model)
    rates = [
        [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in both] for both in (mine, theirs)
    ]
    engine, _ = start(
        model, {"layers.2/0"}, given=mine, bf16={"enabled": True},
        data_types={"grad_accum_dtype": "fp32"},
        gradient_accumulation_steps=2, gradient_clipping=0.5,
    )  # fmt: skip
    sums = [torch.zeros_like(m) for m in plain.masters]
    for count, tokens in enumerate(batches(10)):
        engine.backward(loss_of(engine, tokens))
        (loss_of(plain.model, tokens) / 2).backward()
        for total, parameter in zip(sums, plain.trained, strict=True):
            assert parameter.grad is not None
            total += parameter.grad
            parameter.grad = None
        if count % 2 == 0:
            continue
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(sums, 2)))
        scale = (0.5 / (norm + 1e-6)).clamp(max=1.0)
        for master, total in zip(plain.masters, sums, strict=True):
            master.grad = total * scale
        # A schedule that steps between the optimizers: the step takes the rate of before.
        for optimizer, rate in zip(mine, rates[0], strict=True):
            optimizer.step()
            rate.step()
        for optimizer, rate in zip(theirs, rates[1], strict=True):
            optimizer.step()
            rate.step()
        with torch.no_grad():
            for total, parameter, master in zip(sums, plain.trained, plain.masters, strict=True):
                parameter.copy_(plain.rounded(master, torch.bfloat16))
                total.zero_()
    assert engine.global_steps == 5 and mine[0].param_groups[0]["lr"] == MUON["lr"] / 4
    found = weights(engine)
    names = {id(p): name for name, p in plain.model.named_parameters()}
    for parameter, master in zip(plain.trained, plain.masters, strict=True):
        assert torch.equal(found[names[id(parameter)]], master), names[id(parameter)]
    engine.close()


def test_half_moments_are_rounded_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rounding to nearest by hand: torch's step between two roundings of its momentum."""
    monkeypatch.setattr("evener.zero.states.random_bits", lambda n, *_: torch.full((n,), 1 << 15))
    torch.manual_seed(0)
    w, m, g = torch.randn(24, 16), torch.randn(24, 16).bfloat16(), torch.randn(24, 16)
    rule = rules.of(torch.optim.Muon([w])).of_shape(w.shape)
    before, one = m.float(), w.clone()
    states = States(w.flatten().clone(), None, None, m.flatten().clone(), None)
    rule.on_device(states, g.flatten() * 4, rule.values, 3, 0.25, Noise(1, 2, 3))
    plain = torch.optim.Muon([one])
    plain.state[one]["momentum_buffer"] = kept = before
    one.grad = g
    plain.step()
    assert torch.equal(states.weights.view_as(w), one)
    assert states.first is not None and states.first.dtype == torch.bfloat16
    assert torch.allclose(states.first.float().view_as(w), kept, rtol=2**-8)


def test_half_moments_train(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model()
    twin = copy.deepcopy(model)
    losses = []
    for net, moments in ((model, "bf16"), (twin, "fp32")):
        engine, mine = start(net, evener={"moments": moments})
        losses.append([])
        for tokens in batches(8):
            loss = loss_of(engine, tokens)
            losses[-1].append(loss.item())
            step(loss, mine)
        engine.close()
    assert torch.allclose(*map(torch.tensor, losses), rtol=1e-2)
    assert losses[0] != losses[1]


def test_a_checkpoint_goes_on_elsewhere(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, fresh = Model(), Model()
    plain = copy.deepcopy(model)
    theirs = optimizers(plain)
    engine, mine = start(model, {"layers.1/0"})
    given = batches(6)
    for tokens in given[:3]:
        step(loss_of(engine, tokens), mine)
    folder = zero.save_checkpoint(engine, tmp_path)
    engine.close()
    kinds = json.loads((folder / "meta.json").read_text())["kind"]
    assert kinds["layers.0.up.weight"] == "muon" and kinds["embed.weight"] == "lion"
    engine, mine = start(fresh, {"layers.0/0", "layers.0/1"}, streaming=True)
    zero.load_checkpoint(engine, tmp_path)
    for tokens in given[3:]:
        step(loss_of(engine, tokens), mine)
    for tokens in given:
        step(loss_of(plain, tokens), theirs)
    assert_same(engine, plain)
    engine.close()
    other = Model()
    lion = Lion(other.parameters())
    engine, *_ = zero.initialize(model=other, optimizer=lion, config=settings(), resident=set())
    with pytest.raises(CheckpointError, match=r"with muon, this run uses lion for layers\.0"):
        zero.load_checkpoint(engine, tmp_path)
    engine.close()


def test_state_dicts_are_torchs_of_each_optimizer() -> None:
    """What torch's Muon and Lion hold goes in, and comes out again."""
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    theirs = optimizers(plain)
    given = batches(6)
    for tokens in given[:2]:
        step(loss_of(plain, tokens), theirs)
    model.load_state_dict(plain.state_dict())
    mine = optimizers(model)
    for one, other in zip(mine, theirs, strict=True):
        one.load_state_dict(copy.deepcopy(other.state_dict()))
    engine, _ = start(model, given=mine)
    for tokens in given[2:]:
        step(loss_of(engine, tokens), mine)
        step(loss_of(plain, tokens), theirs)
    assert_same(engine, plain)
    for one, other in zip(mine, theirs, strict=True):
        have, want = one.state_dict(), other.state_dict()
        assert have["param_groups"] == want["param_groups"]
        for number, entry in want["state"].items():
            for name, value in entry.items():
                assert torch.equal(have["state"][number][name], value)
    saved = copy.deepcopy([one.state_dict() for one in mine])
    held = copy.deepcopy(engine.module.state_dict())
    step(loss_of(engine, given[0]), mine)
    engine.module.load_state_dict(held)
    for one, state in zip(mine, saved, strict=True):
        one.load_state_dict(state)
    assert_same(engine, plain)
    for net, both in ((engine, mine), (plain, theirs)):
        step(loss_of(net, given[1]), both)
    assert_same(engine, plain)
    engine.close()


def test_a_parameter_without_a_gradient_stays() -> None:
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    theirs = optimizers(plain)
    engine, mine = start(model)
    given = batches(4)
    for number, tokens in enumerate(given):
        for net in (model, plain):
            net.layers[1].up.requires_grad_(number % 2 == 0)
        step(loss_of(engine, tokens), mine)
        step(loss_of(plain, tokens), theirs)
    assert_same(engine, plain)
    engine.close()


def test_muon_alone_steps_as_one_optimizer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(3)))
    plain = copy.deepcopy(model)
    mine, theirs = (torch.optim.Muon(m.parameters(), **MUON) for m in (model, plain))
    engine, *_ = zero.initialize(model=model, optimizer=mine, config=settings(), resident=set())
    for seed in range(4):
        x = torch.randn(8, 24, generator=torch.Generator().manual_seed(seed))
        for net, one in ((engine, mine), (plain, theirs)):
            step(net(x).square().mean(), [one])
    assert_same(engine, plain)
    engine.close()


ORDERS: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "one twice": (lambda a, _: (a.step(), a.step()), "Muon.step.. was called twice, and Lion"),
    "all by the front": (lambda a, front: (a.step(), front.step()), "another step.*Lion.step"),
    "all cleared": (lambda a, front: (a.step(), front.zero_grad()), "zero_grad.*Lion.step"),
    "a closure": (lambda a, _: a.step(lambda: None), "a closure, with several optimizers"),
}


@pytest.mark.parametrize("name", ORDERS)
def test_steps_that_torch_would_take_apart_are_refused(name: str) -> None:
    model = Model()
    mine = optimizers(model)
    engine, front, *_ = zero.initialize(
        model=model, optimizer=mine, config=settings(), resident=set()
    )
    loss_of(engine, batches(1)[0]).backward()
    call, words = ORDERS[name]
    with pytest.raises(UsageError, match=words):
        call(mine[0], front)
    engine.close()


def test_what_comes_between_two_steps_is_refused() -> None:
    model = Model()
    engine, mine = start(model)
    tokens = batches(1)[0]
    loss_of(engine, tokens).backward()
    mine[0].step()
    mine[0].zero_grad()
    loss_of(engine, tokens).backward()
    with pytest.raises(UsageError, match=r"a backward pass before Lion.step"):
        mine[1].step()
    engine.close()
    engine, mine = start(Model())
    loss_of(engine, tokens).backward()
    mine[0].step()
    engine.step()
    with pytest.raises(UsageError, match=r"a step of the engine before Lion.step"):
        mine[1].step()
    engine.close()


def test_each_clears_its_own_gradients_and_none_that_wait() -> None:
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    theirs = optimizers(plain)
    engine, mine = start(model)
    given = batches(4)
    for number, tokens in enumerate(given):
        for net, both in ((engine, mine), (plain, theirs)):
            loss_of(net, tokens).backward()
            if number % 2:
                both[1].zero_grad()  # its parameters take no step
            for one in both:
                one.step()
                one.zero_grad()
    assert_same(engine, plain)
    engine.close()


def unlike(config: Config, given: list[torch.optim.Optimizer], makes: list[str]) -> None:
    groups.with_rules(config, given)
    groups.refuse_unlike(config, makes)


def test_what_is_not_built_is_refused() -> None:
    model = Model()
    mine = optimizers(model)
    matrix = nn.Parameter(torch.zeros(4, 4))
    unlike(Config(), mine, ["A", "A"])
    unlike(Config(), mine[1:], ["A", "B"])

    class Muon(torch.optim.Optimizer):
        """As its author's file has it."""

    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: start(model, evener={"moments": "int8"}), "moments = .int8. with Muon"),
        (lambda: rules.of(Muon([matrix], {})), "torch.optim.Muon or zero.MuonAdamW alone"),
        (lambda: groups.listed([mine[0], torch.optim.SGD(model.parameters())]), "Muon and SGD"),
        (lambda: groups.listed([]), "no optimizer"),
        (lambda: unlike(Config(), mine, ["A", "B"]), "by A and B: their products differ"),
    ]  # fmt: skip
    for call, words in cases:
        with pytest.raises(UsageError, match=words):
            call()


def test_a_torch_with_other_arithmetic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = nn.Parameter(torch.zeros(4, 4))

    def other(params: Any, grads: Any, momenta: Any, *, normalization: str, **given: Any) -> None:
        raise AssertionError("called")

    for module in (None, SimpleNamespace(muon=other)):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "torch.optim._muon", module)
            with pytest.raises(UsageError, match=r"keeps the arithmetic of torch.optim.Muon in"):
                rules.of(torch.optim.Muon([matrix]))
    later = torch.optim.Muon([matrix])
    later.defaults["normalization"] = "fro"
    with pytest.raises(UsageError, match=r"Muon.normalization='fro'.: Evener does not know"):
        rules.of(later)


def newton_schulz(x: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Jordan et al.'s five lines."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.size(0) > x.size(1)
    y = x.bfloat16().T if tall else x.bfloat16()
    y = y / y.norm().clamp(min=1e-7)
    for _ in range(steps):
        s = y @ y.T
        y = torch.addmm(y, torch.addmm(s, s, s, beta=b, alpha=c), y, beta=a)
    return y.T if tall else y


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16), (1, 16)])
def test_torchs_arithmetic_is_the_papers(shape: tuple[int, int]) -> None:
    """What a new torch would change unseen."""
    torch.manual_seed(0)
    w, g, m = torch.randn(shape), torch.randn(shape), torch.randn(shape)
    rule = rules.of(torch.optim.Muon([w], lr=0.1)).of_shape(w.shape)
    states = States(w.flatten().clone(), None, None, m.flatten().clone(), None)
    rule.on_device(states, g.flatten(), rule.values, 1, 1.0)
    momentum = 0.95 * m + 0.05 * g
    change = newton_schulz(0.05 * g + 0.95 * momentum).float()
    want = w * (1 - 0.1 * 0.1) - 0.1 * max(1, shape[0] / shape[1]) ** 0.5 * change
    assert torch.allclose(states.weights.view(shape), want, atol=2e-3)
    assert states.first is not None and torch.allclose(states.first.view(shape), momentum)


class Squares(nn.Module):
    """Matrices that are far larger than what is computed with them, and vectors."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def run(gpu: int, moments: str) -> dict[str, int]:
    torch.manual_seed(0)
    x = torch.randn(2, 192)
    model = Squares()
    engine, *_ = zero.initialize(
        model=model,
        optimizer=optimizers(model),
        config=settings(
            evener={
                "device": "simulated",
                "moments": moments,
                "budget": {"gpu": gpu, "host": 1 << 30},
            }
        ),
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


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
def test_plans_count_slots_and_updates_of_whole_matrices(moments: str) -> None:
    whole = run(1 << 40, moments)
    held = MACHINE.reserve
    assert 1.0 <= (whole["gpu planned"] - held) / (whole["gpu peak"] - held) < 1.05, whole
    # An update is not run again: with no byte more than was planned it must go through.
    run(whole["gpu planned"], moments)


def test_a_plan_counts_one_moment_of_matrices_and_two_of_the_rest() -> None:
    """Both `zero.plan` and `evener plan-memory` do."""
    with zero.empty_weights():
        model = Model(width=1024, blocks=3)
    matrices, rest = parts(model)
    given = [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]
    settings = Config(dtype=torch.bfloat16, device="cpu", small=0)
    kept: dict[str, Any] = {"config": settings, "machine": MACHINE}
    budget = {"gpu": "8GB", "host": "8GB"}
    made = zero.plan(model, optimizer=given, budget=budget, **kept)
    alone = zero.plan(model, budget=budget, **kept)
    there = {p.name: p.bytes for p in made.places if p.where == "gpu"}
    numel = sum(p.numel() for p in matrices)
    assert sum(size for name, size in there.items() if name.endswith("/0")) == 10 * numel
    spare = sum(p.bytes for p in alone.places) - sum(p.bytes for p in made.places)
    assert abs(spare - 4 * numel) < 4096
    assert made.times["matrices"] == 0 and made.times["device optimizer"] > 0


def test_plan_memory_has_muon(tmp_path: Path) -> None:
    shape = {"hidden_size": 512, "num_hidden_layers": 4, "vocab_size": 1000}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shape))
    call = [str(file), "--on", "rtx4090", "--gpu", "3GB", "--json"]
    found = []
    for more in ([], ["--optimizer", "muon"]):
        result = CliRunner().invoke(plan_memory, [*call, *more])
        assert result.exit_code == 0, result.output
        found.append(json.loads(result.stdout)["plan"])
    adam, muon = (sum(place["bytes"] for place in plan["places"]) for plan in found)
    matrices = 4 * (4 * 512 * 512 + 3 * 4 * 512 * 512)
    assert abs(adam - muon - 4 * matrices) < 4 * matrices // 100
    result = CliRunner().invoke(plan_memory, [*call, "--optimizer", "muon", "--ranks", "2"])
    assert result.exit_code == 0, result.output
    shared = sum(place["bytes"] for place in json.loads(result.stdout)["plan"]["places"])
    assert abs(2 * shared - muon) < muon // 100


def test_what_would_fit_is_nothing_that_is_refused() -> None:
    with zero.empty_weights():
        model = Model(width=1024, blocks=8)
    matrices, rest = parts(model)
    given = [torch.optim.Muon(matrices), torch.optim.AdamW(rest)]
    made = zero.plan(
        model,
        optimizer=given,
        machine=MACHINE,
        config=Config(dtype=torch.bfloat16, device="cpu", small=0),
        budget={"gpu": "1.2GB", "host": "100MB"},
    )
    assert not made.fits and made.nearest
    assert not [fit for fit in made.nearest if "int8" in fit.option]
    assert [fit for fit in made.nearest if "GPUs" in fit.option]
