"""Half precision that follows the loss, beside the same loop in plain torch.

A program is a small network, a way to train it (`policy.step`, or hooks in a loop of its own),
rules with small numbers, and batches: usual ones, ones whose loss or gradients leave float16's
range, and ones that are not finite. Evener says before each step whether it is in half precision;
the plain loop does that step with torch's autocast and GradScaler. Losses, weights, buffers and
random numbers are the same bits: what Evener looks at leaves nothing behind. Ranks decide alike.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from evener import precision
from evener.precision import hooks, rules
from evener.precision import torch as stepping
from evener.precision.torch import Policy
from tests.twins._ranks import Ranks, Switch
from tests.twins.harness import Program, Twin, often

WIDTH, ROWS = 6, 8
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "norm": lambda: nn.BatchNorm1d(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
}
BATCHES = {"usual": 1.0, "far": 3e4, "tiny": 1e-6, "not finite": math.inf}


def _model(program: Program, size: int) -> nn.Module:
    torch.manual_seed(program["seed"])
    inner = [LAYERS[name]() for name in program["layers"]]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *inner, nn.Linear(WIDTH, 1))
    return DistributedDataParallel(model) if size > 1 else model


def _optimizer(program: Program, model: nn.Module) -> torch.optim.Optimizer:
    kind = torch.optim.AdamW if program["optimizer"] == "adamw" else torch.optim.SGD
    return kind(model.parameters(), lr=0.01)


def _batch(program: Program, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """On rank 1 batches are usual: what rank 0 sees is for both."""
    draw = torch.Generator().manual_seed(program["seed"] * 1009 + 7 * step + rank)
    x, y = torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, 1, generator=draw)
    factor = BATCHES[program["batches"][step]] if rank == 0 else 1.0
    return (x, y * factor) if program["of"] == "targets" else (x * factor, y)


class Plain:
    """The loop without Evener, which is told the precision of each step."""

    def __init__(self, program: Program, size: int) -> None:
        self.model = _model(program, size)
        self.optimizer = _optimizer(program, self.model)
        self.dtype = getattr(torch, program["dtype"])
        self.scaler = torch.amp.grad_scaler.GradScaler("cpu", enabled=program["dtype"] == "float16")
        self.size = size

    def step(self, half: bool, x: torch.Tensor, y: torch.Tensor, whole: bool) -> torch.Tensor:
        """whole: the loss is computed in autocast too."""
        with torch.autocast("cpu", self.dtype, enabled=half):
            out = self.model(x)
            loss = mse_loss(out, y) if whole else None
        if loss is None:
            loss = mse_loss(out.float(), y)
        scaling, finite = half and self.scaler.is_enabled(), self._finite(loss)
        (self.scaler.scale(loss) if scaling else loss).backward()
        if scaling:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif finite or not (half or whole):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _finite(self, loss: torch.Tensor) -> bool:
        finite = loss.detach().isfinite().float()
        if self.size > 1:
            torch.distributed.all_reduce(finite, torch.distributed.ReduceOp.MIN)
        return bool(finite)


def _same(what: str, one: Any, other: Any) -> None:
    assert one.keys() == other.keys(), what
    for name, tensor in one.items():
        assert torch.equal(tensor.nan_to_num(7.0), other[name].nan_to_num(7.0)), f"{what}: {name}"


def run(rank: int, size: int, program: Program, fault: str) -> list[bool]:
    """One rank: raises where something differs. Gives whether each step was in half precision."""
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        return _run(rank, size, program)


def _run(rank: int, size: int, program: Program) -> list[bool]:
    model, plain = _model(program, size), Plain(program, size)
    optimizer = _optimizer(program, model)
    limits = precision.Limits(**program["limits"])
    policy = precision.follow(model, optimizer, dtype=plain.dtype, limits=limits)
    halves = []
    for step, kind in enumerate(program["batches"]):
        x, y = _batch(program, step, rank)
        half = policy.half
        halves.append(half)
        torch.manual_seed(step)
        if program["way"] == "step":
            loss = policy.step(lambda x=x, y=y: mse_loss(model(x), y))
        else:
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        drawn = torch.get_rng_state()
        torch.manual_seed(step)
        wanted = plain.step(half, x, y, program["way"] == "step")
        what = f"step {step}, in {program['dtype'] if half else 'float32'}"
        assert torch.equal(drawn, torch.get_rng_state()), f"{what}: random numbers"
        _same(what, {"loss": loss.detach()}, {"loss": wanted})
        _same(what, model.state_dict(), plain.model.state_dict())
        now = [e.cause for e in policy.events if e.step == policy.machine.step]
        if kind == "not finite":
            assert "loss" not in now, f"{what}: the data are the cause, and it has switched"
    return halves


_switch = Switch()
_world = functools.cache(Ranks)


def check(program: Program) -> None:
    """Train both ways, here or on two ranks, which decide alike."""
    if program["ranks"] == 1:
        torch.set_num_threads(1)
        run(0, 1, program, _switch.fault)
        return
    halves = _world(program["ranks"]).run("tests.twins.precision:run", program, _switch.fault)
    assert halves[0] == halves[1], f"ranks decide differently: {halves}"


@st.composite
def programs(draw: Any) -> Program:
    """Draw a program."""
    way = draw(st.sampled_from(["step", "step", "loop"]))
    usual = st.just("usual")
    return {
        "way": way,
        "dtype": draw(st.sampled_from(["float16", "bfloat16"])) if way == "step" else "bfloat16",
        "layers": draw(st.lists(st.sampled_from(sorted(LAYERS)), max_size=3)),
        "optimizer": draw(st.sampled_from(["sgd", "adamw"])),
        "of": draw(st.sampled_from(["targets", "inputs"])),
        "batches": draw(
            st.lists(
                often(usual, usual, usual, st.sampled_from(sorted(BATCHES))),
                min_size=4,
                max_size=24,
            )
        ),
        "limits": {
            "settle": draw(st.integers(1, 4)),
            "hold": draw(st.integers(1, 4)),
            "fast": 2,
            "slow": draw(st.integers(2, 5)),
            "for_steps": draw(st.integers(1, 2)),
            "halvings": draw(st.integers(1, 3)),
            "underflow": draw(st.sampled_from([0.05, 0.001])),
        },
        "ranks": draw(st.sampled_from([1] * 5 + [2])),
        "seed": draw(st.integers(0, 9999)),
    }


# --- Faults ---------------------------------------------------------------------------------------


def _leaves_behind(module: Any) -> Any:
    """What is computed to look at it counts as training."""
    return mock.patch.object(module, "aside", lambda *_, **__: contextlib.nullcontext())


def _alone() -> Any:
    def agreed(_: Any, loss: float, halved: bool = False, under: float | None = None) -> Any:
        return rules.Facts(loss, halved, under)

    return mock.patch.multiple(Policy, agreed=agreed, agreed_probe=lambda _, mine: mine)


def _scaler(**methods: Any) -> Any:
    """The policy's loss scale has these methods, and torch's own, the plain loop's, does not."""
    plain = Policy.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        for name, method in methods.items():
            setattr(self.scaler, name, functools.partial(method, self.scaler))

    return mock.patch.object(Policy, "__init__", init)


def _all_is_finite(module: str) -> Any:
    finite = SimpleNamespace(**{**vars(math), "isfinite": lambda _: True})
    return mock.patch(f"evener.precision.{module}.math", finite)


FAULTS: dict[str, Callable[[], Any]] = {
    "a look moves statistics": lambda: _leaves_behind(stepping),
    "a look in a loop moves statistics": lambda: _leaves_behind(hooks),
    "a loss that is not finite is stepped": lambda: _all_is_finite("torch"),
    "a loop's loss that is not finite is stepped": lambda: _all_is_finite("hooks"),
    "a loop gets half outputs": lambda: mock.patch.object(hooks, "_wide", lambda out: out),
    "gradients keep the loss scale": lambda: _scaler(step=lambda _, optimizer: optimizer.step()),
    "the loss scale stays": lambda: _scaler(
        update=lambda scaler: type(scaler).update(scaler, 65536.0)
    ),
    "each rank decides alone": _alone,
    "precision is the cause of all": lambda: mock.patch.object(
        rules.Machine, "_precision_is_the_cause", lambda *_: True
    ),
}
TWIN = Twin(
    name="precision",
    programs=programs(),
    check=check,
    faults={name: (lambda name=name: _switch.put(name)) for name in FAULTS},
    ends={"a loop gets half outputs": "Found dtype Float but expected BFloat16"},
    programs_per_round=200,
)
