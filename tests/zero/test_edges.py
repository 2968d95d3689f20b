"""What is written in place at the edges of blocks: weights come and go as they do without it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from evener import zero
from evener.errors import UsageError
from evener.zero.edges import Edges, WrittenError
from evener.zero.loading import Loading
from tests.zero.engines import weights

WIDTH, BLOCKS = 8, 6


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.tanh(self.up(x * 1.1)))
        if self.way == "sum":
            return x.add_(y)
        return x + y if self.way == "none" else y


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.start = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(way) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.start(x)
        for layer in self.layers:
            if self.way == "sum outside":
                x += layer(x)
                continue
            x = layer(x)
            if self.way == "views":
                x.mul_(0.9)
        return x


def _config(**evener: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage3_param_persistence_threshold": 0}, "evener": evener}


def _most_loaded(way: str, frozen: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """The most chunks whose weights are there at once in a backward pass."""
    model = Net(way)
    model.layers[1].requires_grad_(not frozen)
    engine, *_ = zero.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        config=_config(device="cpu", checkpointing=False),
        resident=set(),
    )
    counts: list[int] = []

    def counted(inner: Callable[..., None]) -> Callable[..., None]:
        def call(self: Loading, unit: int) -> None:
            inner(self, unit)
            if torch._C._current_graph_task_id() != -1:
                counts.append(sum(chunk.loaded for chunk in engine.chunks()))

        return call

    for name in ("enter", "leave"):
        monkeypatch.setattr(Loading, name, counted(getattr(Loading, name)))
    try:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 3, WIDTH)).square().mean())
            engine.step()
    finally:
        engine.close()
    # Each unit of a backward pass came, and went.
    assert len(counts) == 4 * (BLOCKS + 1)
    return max(counts)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("way", ["views", "sum"])
def test_writes_hold_no_more_weights(
    way: str, frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block's weights leave when its backward pass is through, also if its input or its result
    was written to."""
    with monkeypatch.context() as patch:
        usual = _most_loaded("none", frozen, patch)
    assert _most_loaded(way, frozen, monkeypatch) == usual < BLOCKS


CHECKPOINTING = [True, "offload"]


def _start(way: str, **given: Any) -> tuple[zero.Engine, Net]:
    torch.manual_seed(0)
    model = Net(way)
    plain = copy.deepcopy(model)
    engine, *_ = zero.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), **given
    )
    return engine, plain


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("way", ["sum", "sum outside"])
def test_a_block_whose_input_is_gone_is_not_recomputed(way: str, checkpointing: Any) -> None:
    """Where nobody has seen it before: autograd does not look at what hooks have saved."""
    config = _config(device="cpu", checkpointing=checkpointing)
    engine, _ = _start(way, config=config, resident=set())
    try:
        with pytest.raises(WrittenError, match="checkpointing = false"):
            engine.backward(engine(torch.ones(2, 3, WIDTH)).square().mean())
    finally:
        engine.close()


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("way", ["sum", "sum outside"])
def test_a_trace_finds_that_no_block_can_be_recomputed(
    way: str, checkpointing: Any, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.ones(2, 3, WIDTH)
    config = _config(device="simulated", checkpointing=checkpointing, budget={"gpu": "1GB"})
    machine = zero.Machine(1e12, 1e10, 1e10, 1e9, 1e9)
    engine, plain = _start(way, config=config, example=(x,), machine=machine)
    try:
        assert "no block is recomputed" in caplog.text
        engine.backward(engine(x).square().mean())
        engine.step()
        weights = engine.module.state_dict()
    finally:
        engine.close()
    plain(x).square().mean().backward()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    torch.testing.assert_close(weights, dict(plain.state_dict()))


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("way", ["result", "view", "written", "written, nothing returned"])
def test_both_ends_are_passed(way: str, view: bool) -> None:
    """First an end, then what is inside, then the beginning; whatever is a view or written to."""
    x = torch.ones(2, 3, requires_grad=True) * 1.0
    x = x.view(3, 2) if view else x
    seen: list[str] = []
    edges = Edges([x])
    inner = x * 3.0
    inner.register_hook(lambda _: seen.append("inside"))
    y = inner * 2.0
    out = y.view(6) if way == "view" else x.add_(y) if "written" in way else y
    for end in edges.ends(None if "nothing" in way else out):
        end.register_hook(lambda _: seen.append("end"))
    edges.on_begin(lambda: seen.append("begin"))
    out.mul_(2.0)
    out.sum().backward()
    assert seen[0] == "end"
    assert seen.index("inside") < seen.index("begin") == len(seen) - 1


class Twice(nn.Module):
    """Returns its result, and again: the same tensor, or a view of it."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.view = view
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.layers[1](self.layers[0](x).tanh()) + 1.0
        return x, x[:, 0] if self.view else x


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("writes", [False, True])
def test_outputs_of_one_memory(view: bool, writes: bool) -> None:
    """One tensor is cut off once. Of two views each is, so that none knows of the other."""
    torch.manual_seed(0)
    model = Twice(view)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = zero.initialize(
        model=model, optimizer=given, config=_config(device="cpu"), resident=set()
    )

    def loss(found: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        first, second = found
        if writes:
            second.mul_(2.0)
        return first.square().mean() + second.mean()

    try:
        for _ in range(2):
            x = torch.randn(2, 3, WIDTH)
            optimizer.zero_grad()
            loss(plain(x)).backward()
            optimizer.step()
            if view and writes:
                with pytest.raises(UsageError, match="two views of one tensor"):
                    engine.backward(loss(engine(x)))
                continue
            engine.backward(loss(engine(x)))
            engine.step()
        if not (view and writes):
            engine.drain()
            for name, value in weights(engine).items():
                torch.testing.assert_close(value, plain.get_parameter(name).detach())
    finally:
        engine.close()
