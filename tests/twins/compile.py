"""Random small functions, bucketed beside themselves: right, or run as they are.

Some are computed row by row, some mix rows or count them, some change what they are given. Calls
begin with full batches, as those of a data loader, and go on with shorter ones. torch.compile is
the identity here: what is compared is padding, cutting and the check, not a compiler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from hypothesis import strategies as st
from torch import nn

from evener.compile import Options, independence
from evener.compile.decisions import Decisions
from evener.compile.torch import Function, bucketed
from tests.twins.harness import Program, Twin

torch.set_num_threads(1)
DIM = 4
FAR = 20.0
Step = Callable[["Model", torch.Tensor, float], torch.Tensor]


def _later(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0).cumsum(0).flip(0)


def _last_row(x: torch.Tensor, k: float) -> torch.Tensor:
    return torch.cat([x[:-1], x[-1:] * k])


def _changed(x: torch.Tensor, k: float) -> torch.Tensor:
    with torch.no_grad():
        return x.mul_(k)


def _averaged(model: Model, x: torch.Tensor) -> torch.Tensor:
    """The same rows; a buffer follows their mean."""
    model.average.lerp_(x.detach().mean(0), 0.1)
    return x


def _scaled_back(x: torch.Tensor) -> torch.Tensor:
    """As quantization does: by the largest of the batch."""
    scale = x.detach().abs().max() / 127 + 1e-9
    return torch.round(x / scale) * scale


def _far(x: torch.Tensor) -> bool:
    return float(x.detach()) > FAR / 2


STEPS: dict[str, Step] = {
    # Row by row, or of the rows before.
    "linear": lambda m, x, _: x @ m.weight,
    "bias": lambda m, x, _: x + m.bias,
    "relu": lambda _m, x, _: F.relu(x),
    "tanh": lambda _m, x, k: torch.tanh(x * k),
    "softmax of a row": lambda _m, x, _: torch.softmax(x, 1),
    "norm of a row": lambda _m, x, _: F.layer_norm(x, (DIM,)),
    "sort a row": lambda _m, x, _: x.sort(1).values,
    "rows before": lambda _m, x, _: x.cumsum(0),
    "the first row": lambda _m, x, _: x - x[:1],
    "number of the row": lambda _m, x, k: x + k * torch.arange(x.shape[0]).unsqueeze(1) / 100,
    "ids": lambda m, x, _: m.table[x.detach()[:, 0].mul(3).long().remainder(7)] + x,
    "half": lambda _m, x, _: x.half().float(),
    "outer": lambda _m, x, _: torch.einsum("ni,nj->nij", x, x).sum(2),
    # Of all rows, or of how many there are.
    "mean": lambda _m, x, k: x - k * x.mean(0),
    "a little of the mean": lambda _m, x, k: x + 0.05 * k * x.mean(),
    "rows counted": lambda _m, x, _: x / x.shape[0],
    "root of the count": lambda _m, x, _: x * x.shape[0] ** -0.5,
    "odd count": lambda _m, x, k: x * (k if x.shape[0] % 2 else 1),
    "many": lambda _m, x, k: x * (k if x.shape[0] > 20 else 1),
    "softmax over rows": lambda _m, x, _: torch.softmax(x, 0),
    "later rows": lambda _m, x, _: _later(x),
    "next row": lambda _m, x, k: x + k * x.roll(-1, 0),
    "row before": lambda _m, x, k: x + k * x.roll(1, 0),
    "last row": lambda _m, x, _: x - x[-1:],
    "last row alone": lambda _m, x, k: _last_row(x, k),
    "sort rows": lambda _m, x, _: x.sort(0).values,
    "rank": lambda _m, x, _: x + x.argsort(0).argsort(0).float() / 10,
    "maximum": lambda _m, x, _: x - x.amax(0),
    "median": lambda _m, x, _: x - x.median(0).values,
    "batch norm": lambda _m, x, _: F.batch_norm(x, None, None, training=True),
    "statistics": lambda m, x, _: m.norm(x),
    "attention over rows": lambda _m, x, _: torch.softmax(x @ x.T, 1) @ x,
    "all of it": lambda _m, x, _: x / (1 + x.norm()),
    "far rows count": lambda _m, x, k: x - k * torch.where(x.abs() > FAR / 2, x, 0.0).mean(0),
    "branch of a far first row": lambda _m, x, _: x - x.mean(0) if _far(x[0, 0]) else x,
    "spread": lambda _m, x, k: x * (k if float(x.detach().std()) > 1.02 else 1),
    "sign of the sum": lambda _m, x, _: x * torch.sign(x.detach().sum()),
    "largest row": lambda _m, x, _: x + x[x.detach()[:, 0].argmax()],
    "by the largest": lambda _m, x, _: _scaled_back(x),
    "noise": lambda _m, x, _: x + torch.rand_like(x),
    "gradient over rows": lambda _m, x, _: _Centred.apply(x),
    "gradient counted": lambda _m, x, _: _Shared.apply(x),
    # Changes what it is given, or keeps something of it.
    "in place": lambda _m, x, k: _changed(x, k),
    "average kept": lambda m, x, _: _averaged(m, x),
}
ENDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "rows": lambda x: x,
    "a dict": lambda x: {"rows": x, "name": "x", "table": x.new_ones(3, 2)},
    "loss": lambda x: x.square().mean(),
    "rows and sum": lambda x: (x, x.sum(0)),
    "rows and count": lambda x: (x, x.shape[0]),
    "some rows": lambda x: x[:5],
    "all but one": lambda x: x[1:],
    "rows twice": lambda x: torch.cat([x, x]),
    "pairs": lambda x: x @ x.T,
    "turned": lambda x: x.T,
    "largest": lambda x: x.detach().argmax(0),
    "positive": lambda x: x[x.detach()[:, 0] > 0],
}


class _Centred(torch.autograd.Function):
    """The same rows; a backward pass over all of them."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g - g.mean(0)


class _Shared(torch.autograd.Function):
    """The same rows; a gradient over their number."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g / g.shape[0]


class Model(nn.Module):
    """Steps in their order, then what is given back."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(program["seed"])
        self.weight = nn.Parameter(torch.randn(DIM, DIM, generator=draw))
        self.bias = nn.Parameter(torch.randn(DIM, generator=draw))
        self.table = nn.Parameter(torch.randn(7, DIM, generator=draw))
        self.norm = nn.BatchNorm1d(DIM)
        self.average: torch.Tensor
        self.register_buffer("average", torch.zeros(DIM))
        self.steps, self.ends = program["steps"], program["ends"]

    def forward(self, x: torch.Tensor, turn: int) -> Any:
        for name, k in self.steps:
            x = STEPS[name](self, x, k)
        return ENDS[self.ends[turn]](x)


def check(program: Program) -> None:
    """Call it both ways, and compare outputs, gradients, inputs and buffers."""
    plain = Model(program)
    made = Model(program)
    quick = Options(plan_after=program["plan_after"], hits=1, judge=10**6)
    with mock.patch.object(torch, "compile", lambda function, **_: function):
        bucketed(made, options=quick, record=False)
    draw = torch.Generator().manual_seed(program["seed"] + 1)
    full = program["full"]
    kinds = len(program["ends"])  # of calls, each planned by itself
    sizes = [full] * (program["plan_after"] * kinds) + [
        max(1, full * p // 100) for p in program["sizes"]
    ]
    for number, size in enumerate(sizes):
        x = torch.randn(size, DIM, generator=draw) * program["scale"] + 0.1
        if number >= len(sizes) - len(program["sizes"]):
            x[[0, -1]] += program.get("far", 0.0)
        results = []
        for model in (plain, made):
            torch.manual_seed(number)
            given = x.clone()
            leaf = given.requires_grad_() if program["grads"] else given
            model.zero_grad()
            try:
                found = model(leaf, number % len(program["ends"]))
                results.append((_flat(found), _gradients(found, leaf, model), given.detach()))
            except (RuntimeError, ValueError, IndexError) as error:
                results.append((type(error).__name__, [], x))
        _compare(f"call {number} of {size} rows", *results)
        _compare("buffers", *(([b.float() for b in m.buffers()], [], x) for m in (plain, made)))


def _flat(found: Any) -> list[Any]:
    return torch.utils._pytree.tree_flatten(found)[0]


def _gradients(found: Any, leaf: torch.Tensor, model: Model) -> list[torch.Tensor | None]:
    outputs = [x for x in _flat(found) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not outputs:
        return []
    total = sum((x * torch.cos(torch.arange(x.numel())).view(x.shape)).sum() for x in outputs)
    total.backward()
    named = ("weight", "bias", "table")
    return [leaf.grad, *(getattr(model, name).grad for name in named)]


def _compare(what: str, right: Any, found: Any) -> None:
    for kind, ours, theirs in zip(("output", "gradient"), found[:2], right[:2], strict=True):
        assert len(ours) == len(theirs), f"{what}: {ours!r:.60}, and {theirs!r:.60} is right"
        for one, other in zip(ours, theirs, strict=True):
            if isinstance(other, torch.Tensor) and isinstance(one, torch.Tensor):
                assert one.shape == other.shape, f"{what}: {kind} of {list(one.shape)}"
                largest = other.detach().float().abs().max() if other.numel() else 0.0
                mine, plain = one.detach().float(), other.detach().float()
                # Halves overflow: the same infinity on both sides is no difference.
                off = torch.where(mine == plain, 0.0, (mine - plain).abs())
                # A bucket's bound: 2e-3 of a row's norm; gradients add up rounding of all rows.
                bound = 5e-3 * (float(largest) + 1e-3)
                assert not off.numel() or float(off.max()) <= bound, (
                    f"{what}: {kind} is off by {float(off.max()):.2g} of {float(largest):.2g}"
                )
            else:
                assert type(one) is type(other) and one == other, f"{what}: {one!r}, not {other!r}"
    assert torch.equal(right[2], found[2]), f"{what}: the input was not changed alike"


# Rows of one kind of call are cut, and not all of the other's: both may share a bucket.
_OFTEN = ["rows"] * 6 + ["a dict", "some rows"] * 2
_STEP = st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from([0.5, -1.0, 2.0, 1.5])).map(list)
PROGRAMS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "steps": st.lists(_STEP, min_size=1, max_size=3),
        "ends": st.lists(st.sampled_from(_OFTEN + sorted(ENDS)), min_size=1, max_size=2),
        "full": st.one_of(st.integers(2, 64), st.sampled_from([128, 512, 1024])),
        "plan_after": st.integers(2, 4),
        "sizes": st.lists(st.integers(1, 100), min_size=1, max_size=6),  # percent
        "scale": st.sampled_from([1.0, 1.0, 0.01, 30.0]),
        "grads": st.booleans(),
        # Most of what a data loader gives is alike; then something far off comes.
        "far": st.sampled_from([0.0, FAR]),
    }
)


# --- faults: what was wrong once ---


def _first_batch(size: int, edge: int) -> list[range]:
    return [range(min(size, edge - 1))]


def _one_padding(plain: Any) -> Any:
    return lambda *arguments: plain(*arguments)[:1]


class _ByEdge(dict[Any, Any]):
    """Which outputs are cut, by size alone."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key[1], value)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key[1])


def _cut_by_edge() -> contextlib.AbstractContextManager[Any]:
    plain = Function.__init__

    def init(self: Any, *arguments: Any) -> None:
        plain(self, *arguments)
        self._cut = _ByEdge()

    return mock.patch.object(Function, "__init__", init)


def _changes_pass() -> contextlib.AbstractContextManager[Any]:
    plain = Function._quiet

    def quiet(self: Any, *arguments: Any) -> bool:
        found = plain(self, *arguments)
        if self._refused.startswith("a call changes"):
            self._refused = ""
        return found

    return mock.patch.object(Function, "_quiet", quiet)


FAULTS: dict[str, Any] = {
    "the first batch is compared alone": lambda: mock.patch.object(
        independence, "samples", _first_batch
    ),
    "the padding of the call is compared alone": lambda: mock.patch.object(
        independence, "fillings", _one_padding(independence.fillings)
    ),
    "inputs and buffers that change are not looked for": _changes_pass,
    "decisions by values are not looked for": lambda: mock.patch.object(
        Decisions, "follows", lambda *_: False
    ),
    "outputs are cut by size alone": _cut_by_edge,
}
TWIN = Twin("compile", PROGRAMS, check, FAULTS, programs_per_round=300)
