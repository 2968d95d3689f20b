"""Blocks that run in parts, attention among them, against the same blocks whole.

A program is a block with attention as models have it (heads of their own, shared or one pair of
keys and values, rotary positions, masks of all shapes), in a model that both train with its blocks
recomputed. Such a block has to run in parts. A block with something odd (`ODD`) may: what comes out
has to be the same to the rounding of sums (`CLOSE`), so one that mixes tokens in another way, and
ran in parts, would not pass.
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

from evener.zero import apart, heads
from tests.twins.harness import Twin
from tests.twins.zero import PLACE
from tests.twins.zero_tiles import begun, same_steps

EACH = 4
"""Width of a head."""

HEADS = {"own": (4, 4), "shared": (4, 2), "of three": (6, 2), "one": (4, 1), "many": (10, 10)}

BEFORE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sums": lambda x: x.cumsum(1) * 0.3,
    "places": lambda x: x + torch.arange(x.shape[1], device=x.device).to(x.dtype)[:, None],
    "the token before": lambda x: torch.cat([x[:, :1], x[:, 1:] + 0.3 * x[:, :-1]], 1),
    "softmax of tokens": lambda x: x + 9 * x.softmax(1),
    "a mean": lambda x: x - x.mean(1, keepdim=True),
    "by length": lambda x: x * (40.0 / x.shape[1]),
    "the first tokens": lambda x: torch.cat([2 * x[:, :20], x[:, 20:]], 1),
}
AFTER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "turned": lambda x: x + x.flip(1),
    "rolled": lambda x: x + x.roll(1, 1),
    "the last token": lambda x: x + x[:, -1:],
    "the largest": lambda x: x - x.amax(1, keepdim=True),
}
INSIDE = (
    "dropout", "no kernel", "twice", "keys are rolled", "a mask of its own", "heads as tokens",
    "without heads", "noise", "a table", "keys are read otherwise",
)  # fmt: skip
ODD = (*BEFORE, *AFTER, *INSIDE)


class Block(nn.Module):
    def __init__(self, program: dict[str, Any]) -> None:
        super().__init__()
        self.program = program
        self.heads, self.pairs = HEADS[program["heads"]]
        width = self.heads * EACH
        norm = {"rms": nn.RMSNorm, "layer": nn.LayerNorm, "none": lambda _: nn.Identity()}
        self.norm, self.second = norm[program["norm"]](width), norm[program["norm"]](width)
        total = (self.heads + 2 * self.pairs) * EACH
        if program["fused"]:
            self.qkv = nn.Linear(width, total)
        else:
            self.query = nn.Linear(width, width, bias=False)
            self.key = nn.Linear(width, self.pairs * EACH, bias=False)
            self.value = nn.Linear(width, self.pairs * EACH, bias=False)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.table = nn.Parameter(torch.randn(128, width))
        self.mixed = nn.Parameter(torch.eye(self.heads))

    def three(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Query, key and value, [batch, heads, tokens, EACH]."""
        if self.program["fused"]:
            y = self.qkv(x).view(*x.shape[:2], -1, EACH).transpose(1, 2)
            return list(y.split([self.heads, self.pairs, self.pairs], 1))
        found = self.query(x), self.key(x), self.value(x)
        return [y.view(*x.shape[:2], -1, EACH).transpose(1, 2) for y in found]

    def attend(self, x: torch.Tensor, turns: Any, mask: torch.Tensor | None) -> torch.Tensor:
        program, odd = self.program, self.program["odd"]
        q, k, v = self.three(x)
        if turns is not None:
            q, k = (y * turns[0][:, None] + _half(y) * turns[1][:, None] for y in (q, k))
        if odd == "keys are rolled":
            k = k.roll(1, 2)
        if odd == "keys are read otherwise":
            k = k.reshape(*k.shape[:2], EACH, -1).transpose(2, 3)
        if odd == "a mask of its own":
            mask = torch.ones(x.shape[1], x.shape[1], device=x.device).tril(3).bool()
        gqa = self.heads != self.pairs
        if gqa and (program["repeated"] or odd in ("no kernel", "without heads")):
            k, v = (y.repeat_interleave(self.heads // self.pairs, 1) for y in (k, v))
            gqa = False
        causal = mask is None and program["causal"]
        if odd == "no kernel":
            a = (q @ k.transpose(2, 3) * EACH**-0.5).softmax(-1) @ v
        elif odd == "without heads":
            q, k, v = (y.transpose(1, 2).flatten(2) for y in (q, k, v))
            a = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
            a = a.unflatten(2, (self.heads, EACH)).transpose(1, 2)
        else:
            dropout = 0.3 if odd == "dropout" and self.training else 0.0
            scale = 0.4 if program["scale"] else None
            a = functional.scaled_dot_product_attention(
                q, k, v, mask, dropout, is_causal=causal, scale=scale, enable_gqa=gqa
            )
        if odd == "twice":
            a = functional.scaled_dot_product_attention(a, k, v, enable_gqa=gqa)
        if odd == "heads as tokens":
            return a.reshape(x.shape)
        a = a.transpose(1, 2)
        if program["mixed"]:  # heads, of each token by itself
            a = (a.transpose(2, 3) @ self.mixed).transpose(2, 3)
        return a.reshape(x.shape)

    def forward(
        self, x: torch.Tensor, turns: Any = None, *, mask: torch.Tensor | None = None
    ) -> Any:
        odd = self.program["odd"]
        y = BEFORE[odd](self.norm(x)) if odd in BEFORE else self.norm(x)
        if odd == "a table":
            y = y + self.table[: x.shape[1]]
        a = self.out(self.attend(y, turns, mask))
        if odd in AFTER:
            a = AFTER[odd](a)
        if odd == "noise" and self.training:
            a = functional.dropout(a, 0.3)
        if self.program["beside"]:
            out = x + a + self.down(functional.gelu(self.up(y)))
        else:
            x = x + a
            out = x + self.down(functional.gelu(self.up(self.second(x))))
        return (out, None) if self.program["pair"] else out


def _half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


class Net(nn.Module):
    def __init__(self, program: dict[str, Any]) -> None:
        super().__init__()
        self.program = program
        self.blocks = nn.ModuleList(Block(program) for _ in range(program["blocks"]))
        self.norm = nn.LayerNorm(HEADS[program["heads"]][0] * EACH)
        self.head = nn.Linear(HEADS[program["heads"]][0] * EACH, 3)

    def mask(self, x: torch.Tensor) -> torch.Tensor | None:
        batch, length = x.shape[:2]
        kind, heads_ = self.program["mask"], self.blocks[0].heads  # type: ignore[union-attr]
        shapes: dict[str, tuple[int, ...]] = {
            "square": (length, length),
            "rows": (batch, 1, length, length),
            "shared": (1, 1, length, length),
            "heads": (batch, heads_, length, length),
            "bias": (1, heads_, length, length),
        }
        if kind == "none":
            return None
        drawn = torch.randn(shapes[kind], generator=torch.Generator().manual_seed(length))
        if kind == "bias":
            return drawn.to(x.device)
        # Each token sees itself.
        return ((drawn > 0) | torch.eye(length, dtype=torch.bool)).to(x.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turns = None
        if self.program["turned"]:
            at = torch.arange(x.shape[1], device=x.device)[:, None] * torch.tensor(
                [1.0, 0.1, 1.0, 0.1], device=x.device
            )
            turns = at.cos()[None].to(x.dtype), at.sin()[None].to(x.dtype)
        mask = self.mask(x)
        for block in self.blocks:
            y = block(x, turns, mask=mask)
            x = y[0] if self.program["pair"] else y
        out: torch.Tensor = self.head(self.norm(x))
        return out


def check(program: dict[str, Any]) -> None:
    """Train it whole and in parts."""
    torch.manual_seed(program["seed"])
    model = Net(program)
    plain = copy.deepcopy(model).to(PLACE)
    for net in (model, plain):
        first: Any = net.blocks[0]
        if program["frozen"] == "block":
            first.requires_grad_(False)
        elif program["frozen"] == "before":
            for name in ("qkv", "query", "key", "norm"):
                getattr(first, name, nn.Identity()).requires_grad_(False)
        elif program["frozen"] == "behind":
            first.out.requires_grad_(False)
    engine = begun(model, program)
    long = mock.patch.object(heads, "LONG", 1 if program["long"] else heads.LONG)
    long.start()
    try:
        same_steps(engine, model, plain, program, HEADS[program["heads"]][0] * EACH)
        forwards = (original for _, original, _ in engine._passes._wrapped)
        parts = [f.part for f in forwards if isinstance(getattr(f, "part", None), heads.Block)]
        parted = any(length > parts[0].rows for _, length in program["steps"])
        if parted and program["odd"] == "" and program["recompute"]:
            assert all(any(part.known.values()) for part in parts), "a block runs whole"
    finally:
        long.stop()
        engine.close()


PROGRAMS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1000),
        "blocks": st.integers(1, 2),
        "heads": st.sampled_from(sorted(HEADS)),
        "norm": st.sampled_from(["rms", "layer", "none"]),
        "fused": st.booleans(),
        "turned": st.booleans(),
        "mask": st.sampled_from(["none", "none", "square", "rows", "shared", "heads", "bias"]),
        "causal": st.booleans(),
        "repeated": st.booleans(),
        "scale": st.booleans(),
        "mixed": st.booleans(),
        "beside": st.booleans(),
        "pair": st.booleans(),
        "odd": st.one_of(st.just(""), st.sampled_from(ODD)),
        "frozen": st.sampled_from(["", "", "block", "before", "behind"]),
        "inputs": st.booleans(),
        "rows": st.integers(8, 48),
        "long": st.booleans(),
        "recompute": st.sampled_from([True, True, "offload", False]),
        "resident": st.integers(0, 2),
        "steps": st.lists(
            st.tuples(st.integers(1, 3), st.integers(38, 110)).map(list), min_size=1, max_size=2
        ),
    }
)


def _put(target: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(target, name, value)


_back, _grad, _told, _together = (
    heads._Group.back, heads._grad, apart.told, apart._together,
)  # fmt: skip


def _lost(self: Any, gradient: torch.Tensor) -> None:
    _back(self, gradient if not self.mine.start else torch.zeros_like(gradient))


def _without_before(outs: Any, tile: Any, attended: Any, *rest: Any) -> Any:
    back, own, each = _grad(outs, tile, attended, *rest)
    return back, own if attended is not None else None, each


def _first_keys(self: Any, n: int) -> slice:
    count = self.pairs.stop - self.pairs.start
    return slice(0, count) if n else self.mine


def _with_dropout(*given: Any, dropout_p: float = 0.0, **named: Any) -> Any:
    return _told(*given, **named)


def _whatever_shape(labels: Any, _: Any, shape: Any) -> Any:
    return _together(labels, [], shape)


def _without_check(labels: torch.Tensor, dim: int) -> torch.Tensor:
    return labels.narrow(dim, 0, 1)


@contextlib.contextmanager
def _mask_of_first() -> Iterator[None]:
    """Each group has the mask of the first heads."""
    whole = heads._Parts._attend

    def attend(self: Any, call: Any, group: Any) -> Any:
        count = group.mine.stop - group.mine.start
        return whole(self, call, heads._Group(slice(0, count), group.pairs, group.given))

    with mock.patch.object(heads._Parts, "_attend", attend):
        yield


FAULTS = {
    "a group's gradient is lost": _put(heads._Group, "back", _lost),
    "groups have the keys of the first": _put(heads._Group, "of", _first_keys),
    "the mask is that of the first heads": _mask_of_first,
    "the input has no gradient by attention": _put(heads, "_grad", _without_before),
    "dropout is left out": _put(apart, "told", _with_dropout),
    "what differs by token is broadcast": _put(apart, "_together", _whatever_shape),
    "a sum over tokens is one of a token": _put(apart, "_one", _without_check),
    "lengths are not compared": _put(apart, "_alike", lambda *_, **__: True),
    "the order of tokens is not looked at": _put(
        apart._Labels, "placed", lambda self, x, dim: x.shape[dim] == self.tokens
    ),
}

TWIN = Twin("zero_heads", PROGRAMS, check, FAULTS, programs_per_round=150)
