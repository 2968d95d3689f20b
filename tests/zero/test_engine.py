"""The engine on the simulated device: bit for bit what a plain torch loop does."""

from __future__ import annotations

import copy
import functools
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from evener import zero
from evener.base import records
from evener.errors import EvenerError, UsageError
from evener.tools.stats import show
from evener.zero.activations import Offload
from evener.zero.chunk import Chunk
from evener.zero.device import SimulatedDevice
from evener.zero.host import HostMemory
from evener.zero.rules import AdamW
from evener.zero.spans import Spans

from .models import Model, Plain, batches, loss_of

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


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("resident", [set(), {"layers.0/0", "layers.2/0"}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitwise_a_plain_loop(
    checkpointing: bool, tied: bool, resident: set[str], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = Model(tied=tied)
    plain = Plain(copy.deepcopy(model), 1e-2, 0.1, 0.5, dtype)
    engine = start(
        model,
        resident,
        bf16={"enabled": dtype == torch.bfloat16},
        evener={"checkpointing": checkpointing},
    )
    for tokens in batches(6):
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        expected = loss_of(plain.model, tokens)
        expected.backward()
        plain.step()
        assert loss.item() == expected.item()
        assert engine.get_global_grad_norm() == plain.norm
    assert_same(engine, plain)
    engine.close()


def test_a_plain_loop_with_the_optimizer_works() -> None:
    torch.manual_seed(0)
    model = Model()
    plain = Plain(copy.deepcopy(model), 1e-2, 0.1, 0.5, torch.float32)
    engine, optimizer, _, _ = zero.initialize(model=model, config=configuration(), resident=set())
    for tokens in batches(4):
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(plain.model, tokens).backward()
        plain.step()
    assert_same(engine, plain)
    engine.close()


@pytest.mark.parametrize("resident", [set(), {"layers.0/0"}])
def test_accumulation_is_one_large_step(resident: set[str]) -> None:
    torch.manual_seed(0)
    model = Model()
    plain = Plain(copy.deepcopy(model), 1e-2, 0.1, 0.5, torch.float32)
    engine = start(model, resident, gradient_accumulation_steps=3)
    data = batches(9)
    for number, tokens in enumerate(data, 1):
        engine.backward(loss_of(engine, tokens))
        assert engine.is_gradient_accumulation_boundary() == (number % 3 == 0)
        engine.step()
        (loss_of(plain.model, tokens) * (1 / 3)).backward()
        if number % 3 == 0:
            plain.step()
    assert engine.global_steps == 3
    assert_same(engine, plain)
    engine.close()


class Lora(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.a = nn.Parameter(torch.randn(2, inner.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(inner.out_features, 2) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) + (x @ self.a.t()) @ self.b.t()
        return out


@pytest.mark.parametrize("checkpointing", [False, True])
def test_frozen_parameters_with_lora(checkpointing: bool) -> None:
    torch.manual_seed(0)
    model = Model()
    for parameter in model.parameters():
        parameter.requires_grad = False
    for layer in model.layers:
        layer.down = Lora(layer.down)  # its gradient is done long before the block's
    plain = Plain(copy.deepcopy(model), 1e-2, 0.1, 0.5, torch.float32)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    engine = start(model, evener={"checkpointing": checkpointing})
    train_both(engine, plain, 4)
    assert_same(engine, plain)
    got = weights(engine)
    assert all(
        torch.equal(got[name], value.flatten().view_as(got[name])) for name, value in frozen.items()
    )
    engine.close()


class Shared(Model):
    """One block, used three times (as ALBERT)."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for _ in range(3):
            x = self.layers[0](x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def test_a_unit_that_is_used_several_times() -> None:
    torch.manual_seed(0)
    model = Shared(blocks=1)
    plain = Plain(copy.deepcopy(model), 1e-2, 0.1, 0.5, torch.float32)
    engine = start(model)
    train_both(engine, plain, 4)
    assert_same(engine, plain)
    engine.close()


class Switch(Model):
    """Skips a block on demand: the order of units changes, and a unit has no gradient."""

    skip = -1

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            if number != self.skip:
                x = layer(x)
        out: torch.Tensor = self.head(self.norm(x))
        return out


def test_the_order_may_change_and_units_may_be_left_out() -> None:
    torch.manual_seed(0)
    model = Switch()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=1e-2)
    engine = start(model, optimizer={"type": "SGD", "params": {"lr": 1e-2}}, gradient_clipping=0.0)
    for number, tokens in enumerate(batches(8)):
        model.skip = reference.skip = [-1, 0, 3, 1][number % 4]
        engine.backward(loss_of(engine, tokens))
        engine.step()
        loss_of(reference, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    got = weights(engine)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(got[name], parameter.detach(), rtol=1e-5, atol=1e-7)
    engine.close()


def test_evaluation_between_steps_changes_nothing() -> None:
    def run(evaluate: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        engine = start(Model())
        for tokens in batches(4):
            engine.backward(loss_of(engine, tokens))
            engine.step()
            if evaluate:
                with torch.no_grad():
                    engine.eval()
                    loss_of(engine, tokens)
                    engine.train()
        found = {name: value.clone() for name, value in weights(engine).items()}
        engine.close()
        return found

    a, b = run(False), run(True)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_fp16_skips_what_overflows_and_recovers() -> None:
    torch.manual_seed(0)
    engine = start(Model(), fp16={"enabled": True, "initial_scale_power": 40, "hysteresis": 1})
    assert engine.scaler is not None
    first = weights(engine)["layers.0.up.weight"].clone()
    losses = []
    for tokens in batches(30):
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        if engine.global_steps == 0:
            assert torch.equal(weights(engine)["layers.0.up.weight"], first)
        losses.append(loss.item())
    assert engine.skipped_steps > 5 and engine.global_steps > 5
    assert engine.scaler.scale == 2.0 ** (40 - engine.skipped_steps)
    assert losses[-1] < losses[0]
    engine.close()


@pytest.mark.parametrize("own", [{"moments": "bf16"}, {"moments": "int8"}, {"master": False}])
def test_smaller_states_train(own: dict[str, Any]) -> None:
    torch.manual_seed(0)
    engine = start(Model(width=64), bf16={"enabled": True}, evener=own)
    losses = []
    for tokens in batches(30):
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    engine.close()


def test_weights_are_on_the_device_only_while_their_unit_runs() -> None:
    torch.manual_seed(0)
    model = Model(blocks=8)
    engine = start(model, evener={"depth": 1})
    most = 0

    def count(*_: object) -> None:
        nonlocal most
        most = max(most, sum(c.loaded or c.requested for c in engine.chunks()))

    for layer in model.layers:
        layer.up.register_forward_pre_hook(count)
        layer.up.register_full_backward_hook(count)
    for tokens in batches(3):
        engine.backward(loss_of(engine, tokens))
        engine.step()
    assert 1 <= most <= 3
    engine.flush()  # what was asked for ahead of the next forward pass goes, too
    assert all(c.flat.untyped_storage().nbytes() == 0 for c in engine.chunks() if not c.keeps)
    # Who computes with a weight that is not here is told so.
    assert model.layers[0].up.weight.shape == (128, 32)
    with pytest.raises(UsageError, match=r"weight layers\.0\.up\.weight is away"):
        model.layers[0].up.weight.isnan()
    engine.close()


def test_races_between_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random delays in loader and updater, poisoned buffers: the bits stay the same."""
    generator = random.Random(3)

    def slow(function: Any) -> Any:
        def call(*arguments: Any, **keywords: Any) -> Any:
            time.sleep(generator.choice([0, 0, 0.001, 0.004]))
            return function(*arguments, **keywords)

        return call

    def poisoned(chunk: Chunk) -> None:
        chunk.flat.untyped_storage().resize_(chunk.bytes)
        chunk.flat.fill_(torch.nan)

    torch.manual_seed(0)
    model = Model()
    plain = Plain(copy.deepcopy(model), 1e-2, 0.1, 0.5, torch.float32)
    monkeypatch.setattr(Chunk, "allocate", slow(poisoned))
    monkeypatch.setattr(
        "evener.zero.rules.AdamW.on_host",
        slow(AdamW.on_host),
    )
    engine = start(model, {"layers.1/0"}, evener={"depth": 3})
    train_both(engine, plain, 8)
    assert_same(engine, plain)
    engine.close()


def test_what_fails_on_a_thread_is_raised_where_the_user_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no room")

    torch.manual_seed(0)
    engine = start(Model())
    tokens = batches(1)[0]
    monkeypatch.setattr("evener.zero.rules.AdamW.on_host", broken)
    engine.backward(loss_of(engine, tokens))
    engine.step()
    with pytest.raises(EvenerError, match="optimizer step on the host failed: no room"):
        engine.drain()
    monkeypatch.undo()
    engine.flush()  # first: a prefetch that is still under way may need to allocate
    monkeypatch.setattr(Chunk, "allocate", broken)
    with pytest.raises(EvenerError, match=r"could not be brought to cpu: no room"):
        loss_of(engine, tokens)


def test_groups_schedules_and_optimizers_of_torch() -> None:
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model)

    def groups(module: nn.Module) -> list[dict[str, Any]]:
        flat = [p for p in module.parameters() if p.dim() < 2]
        deep = [p for p in module.parameters() if p.dim() >= 2]
        return [{"params": deep, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]

    def halve(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    theirs = torch.optim.AdamW(groups(reference), lr=1e-2)
    schedule = halve(theirs)
    engine, _, _, mine = zero.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups(model), lr=1e-2),
        lr_scheduler=halve,
        config=configuration(gradient_clipping=0.0),
        resident=set(),
    )
    for tokens in batches(5):
        engine.backward(loss_of(engine, tokens))
        engine.step()
        loss_of(reference, tokens).backward()
        theirs.step()
        theirs.zero_grad()
        schedule.step()
    assert mine.get_last_lr() == schedule.get_last_lr()
    got = weights(engine)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(got[name], parameter.detach(), rtol=1e-4, atol=1e-5)
    engine.close()


def test_what_cannot_be_is_refused_before_anything_is_moved() -> None:
    model = Model()
    with pytest.raises(zero.NoFitError, match=r"the budget is 0\.00 GB"):
        zero.initialize(
            model=model,
            config=configuration(evener={"budget": {"gpu": 1000}}),
            machine=zero.Machine(1e12, 1e10, 1e10, 1e9, 1e9),
        )
    with pytest.raises(UsageError, match=r"parameter embed\.weight is trained and in no"):
        zero.initialize(
            model=model, config=configuration(), model_parameters=list(model.parameters())[1:]
        )
    with pytest.raises(UsageError, match="Adagrad has no fused kernel"):
        zero.initialize(
            model=model,
            config=configuration(),
            optimizer=torch.optim.Adagrad(model.parameters()),
        )
    assert not model.embed.weight.isnan().any()


def test_blocks_that_are_compiled_give_the_same_bits() -> None:
    ends = []
    for compiler in (False, "aot_eager"):
        torch.manual_seed(0)
        engine = start(Model(), evener={"compile": compiler, "checkpointing": True})
        for tokens in batches(3):
            engine.backward(loss_of(engine, tokens))
            engine.step()
        ends.append({name: value.clone() for name, value in weights(engine).items()})
        engine.close()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_whole_model_that_is_compiled_trains_as_it_is(when: str) -> None:
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Model()
        if compiled and when == "before":
            model.compile(backend="aot_eager")
        engine = start(model)
        if compiled and when == "after":
            engine.module.compile(backend="aot_eager")
        for tokens in batches(3):
            engine.backward(loss_of(engine, tokens))
            engine.step()
        ends.append({name: value.clone() for name, value in weights(engine).items()})
        engine.close()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


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
    assert offload._pack(other) is other
    saved = offload._pack(plain)
    assert saved is not plain and torch.equal(offload._unpack(saved), plain)


@pytest.mark.parametrize("budget", [None, {"gpu": "1GB", "host": "4GB"}])
def test_a_step_is_recorded(
    budget: dict[str, str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVENER_STATS_DIR", str(tmp_path))
    monkeypatch.setattr("evener.base.records.EVERY", 0.0)
    engine = start(Model(), **({"evener": {"budget": budget}} if budget else {}))
    for tokens in batches(3):
        engine.backward(loss_of(engine, tokens))
        engine.step()
    engine.close()
    (record,) = records.read(tmp_path)
    assert (record["rank"], record["zero"]["steps"], record["zero"]["skipped"]) == (0, 3, 0)
    assert record["zero"]["step_ms"] > 0
    host = record["zero"]["tiers"][1]
    assert 0 <= host["used"] <= host["peak"] <= host["bytes"]
    assert list(show.parts([record]))


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


@pytest.mark.parametrize("resident", [set(), {"layers.0/0"}])
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_a_parameter_without_a_gradient_does_not_move(resident: set[str], kind: str) -> None:
    """Its moments and its step stay too: what a plain loop does, bit for bit."""
    torch.manual_seed(0)
    model = Branches()
    plain = copy.deepcopy(model)
    plain.layers[0].forward = plain.route  # type: ignore[method-assign]
    values = {"lr": 1e-2, "weight_decay": 0.1}
    if kind == "SGD":
        values["momentum"] = 0.9
    expected = getattr(torch.optim, kind)(plain.parameters(), **values)
    engine = start(model, resident, optimizer={"type": kind, "params": values}, gradient_clipping=0)
    for step, which in enumerate(["ab", "a", "a", "b", "ab", "ab"]):
        model.which = plain.which = which
        if step == 3:  # frozen halfway
            for m in (model, plain):
                m.layers[0]["c"].requires_grad_(False)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(x).square().mean())
        engine.step()
        expected.zero_grad()
        plain(x).square().mean().backward()
        expected.step()
    got = weights(engine)
    for name, want in plain.named_parameters():
        torch.testing.assert_close(got[name], want, rtol=1e-6, atol=1e-7)
    steps = [s for chunk in engine.chunks() for s in chunk.steps]
    assert sorted(steps) == [3, 3, 4, 4, 5, 5]
    engine.close()


def test_a_gradient_of_the_inputs_leaves_the_weights_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    plain = copy.deepcopy(model)
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    engine = start(model, optimizer=sgd, gradient_clipping=0.0)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, 8)
        attacked = []
        for net in (engine, plain):
            given = x.clone().requires_grad_()
            (found,) = torch.autograd.grad(net(given).square().mean(), given)
            attacked.append((x + 0.1 * found.sign()).detach())
        assert torch.equal(*attacked)
        engine.backward(engine(attacked[0]).square().mean())
        engine.step()
        plain(attacked[1]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = weights(engine)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(values[name], parameter.detach(), rtol=0, atol=1e-7)
    given = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(UsageError, match="gradient of a gradient"):
        torch.autograd.grad(engine(given).sum(), given, create_graph=True)
    engine.close()


def test_the_given_optimizer_and_its_scheduler_go_on() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    pairs: list[Any] = []
    for net in (model, plain):
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, s / 3))
        for _ in range(2):
            net(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        pairs.append((optimizer, scheduler))
    engine, *_ = zero.initialize(
        model=model, optimizer=pairs[0][0], config={"evener": {"device": "cpu"}}, resident=set()
    )
    for net, (optimizer, scheduler) in zip((engine, plain), pairs, strict=True):
        for _ in range(4):
            net(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    values = weights(engine)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(values[name], parameter.detach(), rtol=0, atol=1e-6)
    with pytest.raises(UsageError, match="takes no more"):
        pairs[0][0].add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    engine.close()


@pytest.mark.parametrize(
    "model",
    [nn.Linear(4, 4).double(), nn.Linear(4, 4).to(torch.complex64),
     nn.Embedding(4, 4, sparse=True)],
)  # fmt: skip
def test_parameters_that_a_chunk_cannot_hold_are_refused(model: nn.Module) -> None:
    with pytest.raises(UsageError):
        start(model)


def test_an_optimizer_of_another_class_is_refused_by_more_than_its_name() -> None:
    class AdamW(torch.optim.AdamW):
        pass

    model = nn.Linear(4, 4)
    with pytest.raises(UsageError, match="no fused kernel"):
        zero.initialize(
            model=model,
            optimizer=AdamW(model.parameters()),
            config={"evener": {"device": "cpu"}},
            resident=set(),
        )


class Parts(nn.Module):
    """A model with more methods than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.first = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.second = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.first:
            x = torch.tanh(layer(x))
        return x * self.scale

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.second:
            x = torch.tanh(layer(x * self.scale))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


def _pair(lr: float = 0.1) -> tuple[zero.Engine, Parts, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Parts()
    plain = copy.deepcopy(model)
    engine = start(model, optimizer={"type": "SGD", "params": {"lr": lr}}, gradient_clipping=0.0)
    return engine, plain, torch.optim.SGD(plain.parameters(), lr)


def test_methods_beside_forward_use_the_weights_of_now() -> None:
    engine, plain, optimizer = _pair()
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(4, 8)
        for net in (engine.module, plain):
            middle = net.encode(x)
            loss = net.decode(middle).square().mean() + middle.square().mean()
            if net is plain:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                engine.backward(loss)
                engine.step()
        with torch.no_grad():
            torch.testing.assert_close(engine.module.encode(x), plain.encode(x))
    engine.close()


def test_state_dicts_are_real_and_copies_are_refused() -> None:
    engine, plain, optimizer = _pair()
    averaged = {name: p.detach().clone() for name, p in plain.named_parameters()}
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, 8)
        engine.backward(engine(x).square().mean())
        engine.step()
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = engine.module.state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-8)
            averaged[name].lerp_(state[name], 0.1)
    for name, part in engine.module.named_modules():  # as peft asks for a part that it saves whole
        for own, value in part.state_dict().items():
            assert torch.equal(value, state[f"{name}.{own}".lstrip(".")])
    assert all(value.isfinite().all() for value in averaged.values())
    with pytest.raises(UsageError, match="is away"):
        torch.stack([p.detach().sum() for p in engine.module.parameters()])
    with pytest.raises(UsageError, match="a copy of a model"):
        torch.optim.swa_utils.AveragedModel(engine.module)
    with pytest.raises(UsageError, match="belongs to an engine"):
        start(engine.module)
    model = zero.give_back(engine)
    for name, value in plain.state_dict().items():
        found = dict(model.named_parameters())[name].detach()
        torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-8)
    again = start(copy.deepcopy(model))
    again.close()


def test_clipping_gradients_that_have_left_is_refused() -> None:
    engine, _, _ = _pair()
    engine(torch.randn(4, 8)).square().mean().backward()
    with pytest.raises(UsageError, match="gradient_clipping"):
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
    with pytest.raises(UsageError, match="cannot be set"):
        engine.module.scale.grad = None
    assert engine.norm() > 0
    engine.update()
    engine.module.zero_grad()
    engine.close()


def test_what_would_not_train_is_refused() -> None:
    engine, _, _ = _pair()
    engine.module.first[0].add_module("adapter", nn.Linear(8, 8))
    engine.backward(engine(torch.randn(4, 8)).square().mean())
    with pytest.raises(UsageError, match=r"first\.0\.adapter\.weight came, or was unfrozen"):
        engine.step()
    engine.close()
    model = Parts()
    model.first.requires_grad_(False)
    engine = start(model)
    model.first.requires_grad_(True)
    engine.backward(engine(torch.randn(4, 8)).square().mean())
    with pytest.raises(UsageError, match="was unfrozen"):
        engine.step()
    engine.close()
    engine = start(Parts(), fp16={"enabled": True})
    engine(torch.randn(4, 8)).float().square().mean().backward()
    with pytest.raises(UsageError, match="loss was not scaled"):
        engine.update()
    engine.close()
