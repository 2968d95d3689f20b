"""Blocks in tiles along the sequence against the same blocks whole.

A program is a block of operations drawn from those that do the same to each token and from those
that do not, in a model that both train. A block of the first kind alone has to run in tiles, and
everything has to come out the same to the rounding of sums (`CLOSE`): a block that mixes tokens and
ran in tiles would not.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from evener import zero
from evener.zero import sequence, tokenwise
from tests.twins.harness import Twin
from tests.twins.zero import CLOSE, DEVICE, MACHINE, PLACE

WIDTH = 8
DIVERGES = 1e3


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).reshape(x.shape)


def _places(x: torch.Tensor) -> torch.Tensor:
    return x + torch.arange(x.shape[1], device=x.device).to(x.dtype)[:, None]


def _written(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.0
    y.mul_(0.5).add_(x)
    return y


APART: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": functional.gelu,
    "gate": lambda x: functional.silu(x) * torch.tanh(x),
    "softmax": lambda x: x.softmax(-1),
    "centre": lambda x: x - x.mean(-1, keepdim=True),
    "rms": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3),
    "norm": lambda x: functional.layer_norm(x, (WIDTH,)),
    "halves": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "slice": lambda x: torch.cat([x[..., 2:], x[..., :2]], -1),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "flat": lambda x: (x.reshape(-1, WIDTH) * 2).view(x.shape),
    "written": _written,
    "largest": lambda x: x - x.amax(-1, keepdim=True),
}
MIXED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean of tokens": lambda x: x - x.mean(1, keepdim=True),
    "mean of rows": lambda x: x - x.mean(0, keepdim=True),
    "largest token": lambda x: x - x.amax(1, keepdim=True),
    "rolled": lambda x: x + x.roll(1, 1),
    "flipped": lambda x: x + x.flip(1),
    "sums": lambda x: x.cumsum(1) * 0.3,
    "places": _places,
    "softmax of tokens": lambda x: x.softmax(1),
    "transposed": _transposed,
    "by length": lambda x: x * (4.0 / x.shape[1]),
    "by batch": lambda x: x * (1.0 / x.shape[0]),
    "one token": lambda x: x + x[:, :1],
    "last token": lambda x: x + x[:, -1:],
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "products": lambda x: x + (x @ x.transpose(1, 2) @ x) * 0.1,
    "whole norm": lambda x: x / (x.square().mean() + 1.0),
}


class Part(nn.Module):
    """Operations one after the other, each with a layer of its own before it."""

    def __init__(self, names: list[str], residual: bool) -> None:
        super().__init__()
        self.names, self.residual = names, residual
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in names)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for name, layer in zip(self.names, self.layers, strict=True):
            y = (APART.get(name) or MIXED[name])(layer(y))
        return x + self.scale * y if self.residual else self.scale * y


class Block(nn.Module):
    def __init__(self, program: dict[str, Any]) -> None:
        super().__init__()
        self.part = Part(program["part"], program["residual"])
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, more: float) -> torch.Tensor:
        return x + 0.1 * self.mix(x).cumsum(1) + more * self.part(x)


class Net(nn.Module):
    def __init__(self, program: dict[str, Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(program) for _ in range(program["blocks"]))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, 0.7)
        out: torch.Tensor = self.head(x)
        return out


def begun(model: nn.Module, program: dict[str, Any]) -> zero.Engine:
    """The engine of a program, with tiles of its rows."""
    with mock.patch.object(sequence, "ROWS", program["rows"]):
        engine, *_ = zero.initialize(
            model=model,
            optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1),
            config={
                "zero_optimization": {"stage3_param_persistence_threshold": 0},
                "evener": {
                    "device": DEVICE or "cpu",
                    "checkpointing": program["recompute"],
                    "tiles": True,
                },
            },
            resident={f"blocks.{n}/0" for n in range(program["resident"])},
            machine=MACHINE,
        )
    return engine


def same_steps(
    engine: zero.Engine, model: nn.Module, plain: nn.Module, program: dict[str, Any], width: int
) -> None:
    """Train both by the program's steps: results, gradients of inputs and weights are the same.

    It ends where the loss has grown beyond what rounding leaves comparable.
    """
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for batch, length in program["steps"]:
        x = torch.randn(batch, length, width, device=PLACE)
        losses = []
        for net in (engine, plain):
            torch.manual_seed(program["seed"])
            given = x.clone().requires_grad_(program["inputs"])
            out = net(given)
            loss = out.square().mean()
            losses.append((out.detach(), loss.detach()))
            if net is engine:
                engine.backward(loss)
                engine.step()
            else:
                loss.backward()
            if program["inputs"]:
                losses[-1] = (*losses[-1], given.grad)
        torch.testing.assert_close(*losses, **CLOSE)
        if not loss < DIVERGES:  # what rounding changes grows as fast
            return
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            engine.eval(), plain.eval()
            torch.testing.assert_close(engine(x), plain(x), **CLOSE)
            engine.train(), plain.train()
    mine = {name: value.to(PLACE) for name, value in model.state_dict().items()}
    torch.testing.assert_close(mine, plain.state_dict(), **CLOSE)


def check(program: dict[str, Any]) -> None:
    """Train it whole and in tiles."""
    torch.manual_seed(program["seed"])
    model = Net(program)
    plain = copy.deepcopy(model).to(PLACE)
    for net in (model, plain):
        net.blocks[0].part.requires_grad_(not program["frozen"])
    wanted = set(program["part"]) <= set(APART)
    engine = begun(model, program)
    try:
        tiled = [hasattr(block.part.forward, "part") for block in model.blocks]
        assert all(tiled) or not wanted, f"{program['part']} runs whole"
        same_steps(engine, model, plain, program, WIDTH)
    finally:
        engine.close()


_apart = st.sampled_from(sorted(APART))
_names = st.one_of(
    st.lists(_apart, min_size=1, max_size=4),
    st.lists(st.sampled_from(sorted([*APART, *MIXED])), min_size=1, max_size=4),
    # One operation alone has to keep a block whole.
    st.tuples(st.lists(_apart, max_size=2), st.sampled_from(sorted(MIXED))).map(
        lambda parts: [*parts[0], parts[1]]
    ),
)
PROGRAMS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1000),
        "blocks": st.integers(1, 2),
        "part": _names,
        "residual": st.booleans(),
        "frozen": st.booleans(),
        "inputs": st.booleans(),
        "rows": st.integers(WIDTH, 12),
        "recompute": st.booleans(),
        "resident": st.integers(0, 2),
        "steps": st.lists(
            st.tuples(st.integers(1, 3), st.integers(1, 14)).map(list), min_size=1, max_size=3
        ),
    }
)


def _put(target: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(target, name, value)


@contextlib.contextmanager
def _last_tile() -> Iterator[None]:
    """Gradients of weights are those of the last tile."""
    whole = sequence.Part.backward

    def backward(self: Any, x: Any, gradient: Any, wanted: Any, into: bool) -> Any:
        found, _ = whole(self, x, gradient, wanted, into)
        flat = x.reshape(1, -1, self.width)
        *_, (begin, end) = self.spans(x)
        last = gradient.reshape(1, flat.shape[1], -1)[:, begin:end]
        _, sums = whole(self, flat[:, begin:end], last, wanted, into)
        return found, sums

    with mock.patch.object(sequence.Part, "backward", backward):
        yield


def _without_rest(self: sequence.Part, x: torch.Tensor) -> Iterator[tuple[int, int]]:
    count = x.shape[0] * x.shape[1]
    for begin in range(0, count - self.rows + 1, self.rows):
        yield begin, begin + self.rows


_rule = tokenwise.Rows._apart


def _over_tokens(self: Any, name: str, pointwise: bool, args: Any, *rest: Any) -> bool:
    """A sum over any one dimension is one over a row."""
    return name in ("mean", "amax", "_softmax") or _rule(self, name, pointwise, args, *rest)


def _whatever_shape(self: Any, name: str, pointwise: bool, *rest: Any) -> bool:
    """What changes each number by itself leaves tokens apart, whatever is broadcast."""
    return pointwise or _rule(self, name, pointwise, *rest)


FAULTS = {
    "gradients are those of the last tile": _last_tile,
    "what is left over is no tile": _put(sequence.Part, "spans", _without_rest),
    "a mean over tokens is one of a row": _put(tokenwise.Rows, "_apart", _over_tokens),
    "numbers of tokens are not compared": _put(tokenwise, "SHAPES", ((1, 4),)),
    "what differs by token is broadcast": lambda: _both(
        _put(tokenwise.Rows, "_apart", _whatever_shape)(), _put(tokenwise, "SHAPES", ((1, 4),))()
    ),
}


@contextlib.contextmanager
def _both(*faults: AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault)
        yield


TWIN = Twin("zero_tiles", PROGRAMS, check, FAULTS, programs_per_round=300)
