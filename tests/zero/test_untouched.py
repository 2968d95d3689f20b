"""What a model keeps on itself, draws and counts: as in plain training, whatever runs beside it."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

from evener import moe, zero
from evener.errors import UsageError
from evener.zero import boundary

MACHINE = zero.Machine(1e12, 1e10, 1e10, 1e9, 1e9)
WIDTH = 16


class Keeping(nn.Module):
    """Keeps an auxiliary loss as an attribute and in a list, counts its calls, draws."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.route = nn.Linear(WIDTH, 4)
        self.calls = 0
        self.load = torch.zeros(())
        self.more: list[torch.Tensor] = []
        self.cache: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.load += 1
        self.cache["last"] = x.detach()
        random.random()
        numpy.random.rand()
        self.aux = self.route(x).logsumexp(-1).mean()
        self.more = [self.aux * 2]
        out: torch.Tensor = x + self.down(functional.gelu(self.up(x)))
        return out


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.experts = moe.MoE(WIDTH, 2 * WIDTH, experts=4, top_k=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.experts(self.norm(x))
        return out


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def start(model: nn.Module, example: Any = None, **evener: Any) -> zero.Engine:
    dtype = evener.pop("dtype", None)
    given: dict[str, Any] = {"resident": set()} if example is None else {"example": example}
    engine, *_ = zero.initialize(
        model=model,
        config={
            "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
            "zero_optimization": {"stage3_param_persistence_threshold": 0},
            "evener": {"device": "cpu", **evener},
            **({dtype: {"enabled": True}} if dtype else {}),
        },
        machine=MACHINE,
        **given,
    )
    return engine


def data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(8, WIDTH, generator=made), torch.randn(8, WIDTH, generator=made)


def kept(net: Net) -> torch.Tensor:
    total = torch.zeros(())
    for layer in net.layers:
        if isinstance(layer, Routed):
            total = total + 0.1 * layer.experts.aux_loss
        else:
            total = total + 0.1 * (layer.aux + layer.more[0])
    return total


@pytest.mark.parametrize("kind", [Keeping, Routed])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_loss_that_modules_keep(
    kind: type[nn.Module], recompute: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Net(kind)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    engine = start(model, checkpointing=recompute)
    if again:  # the graph is gone when the backward pass comes
        found = boundary._Pass.forward

        def forward(self: Any) -> Any:
            out = found(self)
            self.drop()
            return out

        monkeypatch.setattr(boundary._Pass, "forward", forward)
    for step in range(3):
        x, y = data(step)
        mine = functional.mse_loss(engine(x), y) + kept(model)
        engine.backward(mine)
        engine.step()
        theirs = functional.mse_loss(plain(x), y) + kept(plain)
        theirs.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert mine.item() == pytest.approx(theirs.item(), rel=1e-5)
        assert kept(model).item() == pytest.approx(kept(plain).item(), rel=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])
    for mine, theirs in zip(model.layers, plain.layers, strict=True):
        if isinstance(mine, Keeping):
            assert (mine.calls, float(mine.load)) == (theirs.calls, float(theirs.load)) == (3, 3.0)
        else:
            assert torch.equal(mine.experts.experts.load, theirs.experts.experts.load)
    engine.close()


def test_what_is_kept_elsewhere_is_refused() -> None:
    away: list[torch.Tensor] = []

    class Elsewhere(Keeping):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            away.append(out.square().mean())
            return out

    model = Net(Elsewhere)
    engine = start(model)
    x, y = data(0)
    loss = functional.mse_loss(engine(x), y) + away[-1]
    with pytest.raises(UsageError, match="kept somewhere else than in its outputs"):
        engine.backward(loss)
    engine.zero_grad()
    engine.close()


def test_what_is_kept_from_one_pass_to_the_next_is_refused() -> None:
    class Recurrent(Keeping):
        state: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x if self.state is None else x + self.state)
            self.state = out
            return out

    model = Net(Recurrent)
    engine = start(model)
    engine(data(0)[0])
    with pytest.raises(UsageError, match="detach"):
        engine.backward(engine(data(1)[0]).square().mean())
    engine.zero_grad()
    engine.close()


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()


def test_the_start_and_new_shapes_leave_everything_as_it_was() -> None:
    torch.manual_seed(0)
    model = Net(Keeping)
    before = states()
    engine = start(model, example=data(0)[0])
    assert states() == before
    assert engine.plan.traced
    first = model.layers[0]
    assert (first.calls, float(first.load), first.cache, first.more) == (0, 0.0, {}, [])
    assert not hasattr(first, "aux")
    engine(torch.randn(32, WIDTH))  # larger: traced
    assert (first.calls, float(first.load)) == (1, 1.0)
    assert type(first.cache["last"]) is torch.Tensor
    engine.close()


@pytest.mark.parametrize("named", [False, True])
def test_whole_numbers_that_bf16_lacks_are_refused(named: bool) -> None:
    class Timed(Net):
        def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
            return super().forward(x + torch.sin(time.to(x.dtype) / 100)[:, None])

    engine = start(Timed(Keeping), dtype="bf16")
    x = data(0)[0]
    for fine in (torch.arange(8), torch.arange(8.0), torch.arange(8.0) * 256, torch.rand(8) * 999):
        engine(x, fine)
    wrong = torch.tensor([3.0] * 7 + [999.0])
    said = "time" if named else "number 2"
    with pytest.raises(UsageError, match=f"input {said} holds whole numbers.*999.*become 1000"):
        engine(x, time=wrong) if named else engine(x, wrong)
    engine.close()


@pytest.mark.parametrize("resident", [set(), {f"layers.{n}/0" for n in range(3)}])
def test_a_penalty_outside_of_forward(resident: set[str]) -> None:
    """Equal to plain, or refused in a line that names a weight: never NaN."""
    torch.manual_seed(0)
    model = Net(Keeping)
    plain = copy.deepcopy(model)
    engine, *_ = zero.initialize(
        model=model,
        config={
            "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
            "zero_optimization": {"stage3_param_persistence_threshold": 0},
            "evener": {"device": "cpu"},
        },
        machine=MACHINE,
        resident=resident,
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)

    def loss(net: Any, of: nn.Module, step: int) -> torch.Tensor:
        x, y = data(step)
        penalty = sum((p.square().sum() for p in of.parameters()), torch.zeros(()))
        return functional.mse_loss(net(x), y) + 0.01 * penalty

    for step in range(3):
        if not resident:
            with pytest.raises(UsageError, match=r"weight layers.0.\S+ is away"):
                loss(engine, model, step)
            break
        mine, theirs = loss(engine, model, step), loss(plain, plain, step)
        assert mine.item() == pytest.approx(theirs.item(), rel=1e-5)
        engine.backward(mine)
        engine.step()
        theirs.backward()
        optimizer.step()
        optimizer.zero_grad()
    else:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name])
    engine.close()


class Watched(nn.Module):
    """Hooks its blocks in its first forward pass, as transformers does to collect hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        seen: list[torch.Tensor] = []
        self._seen = [seen]
        if not getattr(self, "hooked", False):
            for layer in self.layers:
                layer.register_forward_hook(lambda _, __, out: self._seen[0].append(out))
            self.hooked = True
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x, list(seen)


@pytest.mark.parametrize("tiles", [False, True])
def test_hooks_of_a_first_pass_are_put_on_once(tiles: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, WIDTH)
    engine, *_ = zero.initialize(
        model=Watched(),
        config={"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                "evener": {"device": "simulated", "tiles": tiles,
                           "budget": {"gpu": "1GB", "host": "1GB"}}},
        example=(x,), machine=MACHINE,
    )  # fmt: skip
    for _ in range(2):
        out, seen = engine(x)
        assert len(seen) == 3
        engine.backward(out.square().mean())
        engine.step()
    engine.close()
