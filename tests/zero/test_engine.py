"""The engine on the simulated device: bit for bit what a plain torch loop does."""

from __future__ import annotations

import copy
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
from evener.zero.chunk import Chunk
from evener.zero.rules import AdamW

from .engines import Branches, assert_same, configuration, start, train_both, weights
from .models import Model, Plain, batches, loss_of


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
