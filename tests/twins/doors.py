"""Training programs under plain DDP and under Evener: by the line, and by the door without a line.

Two ranks live as long as the search, over Gloo, or with TWIN_DEVICE=cuda on two GPUs over NCCL.
Each program trains small models for some steps, between which anything may happen that users do.
Exact ways must give DDP's bits on every rank. In lossy forms what ranks apply must be alike, and
that with their residuals must be the sum of all gradients; a gradient that is finite must stay so
where `auto` chose the form.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import copy
import datetime
import hashlib
import io
import logging
import multiprocessing
import os
import pickle
import random
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from tests.twins.harness import Program, Twin

RANKS = 2
DEVICE = os.environ.get("TWIN_DEVICE", "cpu")
WAYS = ("line", "both", "door")
_SECONDS = 40
_ROWS = 4
_NO_PROGRAM = "plain DDP raises"
FORMS = ("int8", "int4", "topk", "topk-chunk", "lowrank1", "auto")


# --- programs ---

_ACTS = st.one_of(
    st.sampled_from(
        [
            ["freeze", 0],
            ["freeze", 1],
            ["thaw", 0],
            ["thaw", 1],
            ["restart"],
            ["edit state"],
            ["replace state"],
            ["keep state"],
            ["scale kept state"],
            ["keep grads"],
            ["keep flat grads"],
            ["zero kept grads"],
            ["sum kept grads"],
            ["drop kept grads"],
            *[["keep data"], ["sum kept data"]] * 3,
            ["read grad"],
            ["around", 0],
            ["around", 1],
            ["around", 2],
            ["input gradient"],
            ["weight gradient"],
            ["backward to inputs"],
            ["raise in backward"],
            ["evaluate", 0],
            ["evaluate", 2],
            ["evaluate with gradients", 0],
            ["evaluate with gradients", 2],
            ["save"],
            ["roll back"],
            ["copy"],
            ["vector"],
            ["raise in forward"],
            ["raise in loss"],
            ["lr", 2],
            ["add to weights"],
            ["ema"],
        ]
    ),
)
_STEP = st.fixed_dictionaries(
    {
        "zero": st.sampled_from(
            ["none", "none", "none", "zeros", "by hand", "model", "late", "not"]
        ),
        "use": st.sampled_from([[1, 1], [1, 1], [1, 1], [0, 0], [1, 0], [0, 1]]),
        "accumulate": st.sampled_from([0, 0, 0, 1, 2]),
        "clip": st.sampled_from([False] * 7 + [True]),
        "between": st.one_of(st.just([]), st.just([]), st.just([]), st.lists(_ACTS, max_size=1)),
        "after": st.lists(_ACTS, max_size=3),
        "inner": st.sampled_from([""] * 9 + ["vjp", "functional call", "penalty"]),
        "rows": st.sampled_from([_ROWS] * 5 + [_ROWS - 1]),
        "skip": st.sampled_from([False] * 9 + [True]),
    }
)
# Nothing is deferred in the first steps, which are measured: most programs begin with some of them.
_WARM: dict[str, Any] = {
    "zero": "none", "use": [1, 1], "accumulate": 0, "clip": False, "between": [], "after": [],
    "skip": False,
}  # fmt: skip
_ANY = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1 << 16),
        "model": st.sampled_from(["layers", "branches", "norm", "attention", "embedding"]),
        "models": st.sampled_from([1, 1, 1, 2]),
        "optimizer": st.sampled_from(
            ["SGD", "momentum", "Adam", "AdamW", "RMSprop", "Adagrad", "two", "NAdam"]
        ),
        "unused": st.sampled_from([True, True, False]),
        "views": st.sampled_from([False, False, False, True]),
        "bucket_bytes": st.sampled_from([0, 600, 1 << 20]),
        "frozen": st.sampled_from([None, None, 0, 1]),
        "begin": st.sampled_from([0, 0, 2]),
        "ways": st.sampled_from([["both"], ["both"], ["line"], ["both"], ["door"]]),
        "mode": st.sampled_from([None, None, "exact"]),
        "own": st.sampled_from([None, None, None, 5]),
        "form": st.sampled_from([None] * 5 + [*FORMS]),
        "rank 0 wraps": st.sampled_from([False] * 7 + [True]),
        "compile": st.integers(0, 199).map(lambda number: number == 57),  # takes seconds
        "warm": st.sampled_from([5, 5, 5, 0]),
        "steps": st.lists(_STEP, min_size=3, max_size=8),
    }
)

# With these, steps are deferred.
_DEFERRED: dict[str, Any] = {
    "begin": 0, "warm": 5, "ways": ["both"], "optimizer": "Adam", "form": None,
}  # fmt: skip
# What users do step after step, which chance alone puts together too seldom: parts of the program,
# and of its steps in turns.
_HABITS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "thaw later": ({"frozen": 1, "unused": True, "form": None}, []),
    "look at gradients on one rank": (
        {"unused": False, "form": None},
        [{"after": [["around", 0]]}],
    ),
    "restart moments": (
        _DEFERRED,
        [{"after": [["edit state"]], "skip": False}],
    ),
    "torch.func": (
        {**_DEFERRED, "bucket_bytes": 0},
        [{"inner": "vjp", "after": []}, {"inner": "", "after": [], "skip": False}],
    ),
    "keep gradients": (
        {**_DEFERRED, "views": False},
        [
            {"after": [["keep grads"]], "zero": "none"},
            {"after": [["sum kept grads"]], "zero": "not"},
        ],
    ),
    "look at inputs": (
        {"unused": True, "views": False, "form": None},
        [
            {"after": [["keep grads"]], "zero": "none", "use": [0, 0]},
            {"after": [["input gradient"]], "zero": "zeros"},
            {"after": [["sum kept grads"]], "zero": "none"},
        ],
    ),
    "keep weights": (
        _DEFERRED,
        [{"after": [["keep data"]]}, {"after": [["sum kept data"]], "skip": False}],
    ),
    "a branch at times": ({"form": "topk"}, [{"use": [1, 1]}, {"use": [0, 0]}]),
    "a bad batch": ({"form": "auto"}, []),
    "compile": (
        {**_DEFERRED, "compile": True, "models": 1, "bucket_bytes": 0},
        [{**_WARM, "rows": rows} for rows in (_ROWS, _ROWS - 1)],
    ),
    "evaluate on one rank": (
        {"warm": 0, "form": None},
        [{"after": [["evaluate with gradients", 0]]}],
    ),
    "wrap a step on one rank": ({"rank 0 wraps": True, "ways": ["both"], "form": None}, []),
}
_NO_HABIT = [""] * 40
_SELDOM = ("compile",)


@st.composite
def programs(draw: Any) -> Program:
    """Draw a program, of which a third has a habit."""
    program = draw(_ANY)
    often = [name for name in sorted(_HABITS) if name not in _SELDOM]
    habit = draw(st.sampled_from([*_NO_HABIT, *often * 2, *_SELDOM]))
    if habit:
        parts, turns = _HABITS[habit]
        while len(program["steps"]) < 5:
            program["steps"].append(_WARM)
        if turns:
            program["steps"] = [
                {**step, **turns[number % len(turns)]}
                for number, step in enumerate(program["steps"])
            ]
        program.update(parts)
    return program


# --- what a rank does ---


class Net(nn.Module):
    """Two branches around a middle, of a kind; `b` is used where it is said."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "embedding":
            self.table = nn.Embedding(12, 8)
        self.a = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.b = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8) if kind == "norm" else nn.Identity()
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True) if kind == "attention" else None
        self.head = nn.Linear(8, 8)
        if kind == "branches":
            self.head.weight = self.a[0].weight
        self.scale = nn.Parameter(torch.ones(8))
        self.raises = False

    def forward(self, x: torch.Tensor, use: bool = True, inner: str = "") -> torch.Tensor:
        if self.kind == "embedding":
            x = x + self.table((x[:, 0].abs() * 7).long() % 12)
        y = self.a(x) * self.scale
        if self.raises:
            raise ArithmeticError("as it happens")
        if use:
            y = y + self.b(self.norm(y))
        if self.mix is not None:
            z = y[:, None]
            y = y + self.mix(z, z, z, need_weights=False)[0][:, 0]
        if inner == "vjp":
            weights = dict(self.head.named_parameters())
            return torch.func.vjp(
                lambda w: torch.func.functional_call(self.head, w, (y,)), weights
            )[0]
        if inner == "functional call":
            return torch.func.functional_call(self.head, dict(self.head.named_parameters()), (y,))
        return self.head(y)


def _optimizers(kind: str, net: Net) -> list[Optimizer]:
    o = torch.optim
    made: dict[str, Callable[[Any], Optimizer]] = {
        "SGD": lambda p: o.SGD(p, 0.05),
        "momentum": lambda p: o.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
        "Adam": lambda p: o.Adam(p, 0.01),
        "AdamW": lambda p: o.AdamW(p, 0.01, amsgrad=True),
        "RMSprop": lambda p: o.RMSprop(p, 0.01, momentum=0.5),
        "Adagrad": lambda p: o.Adagrad(p, 0.05),
        "NAdam": lambda p: o.NAdam(p, 0.01),
    }
    if kind == "two":
        mine = {id(p) for p in net.b.parameters()}
        rest = [p for p in net.parameters() if id(p) not in mine]
        return [o.SGD(rest, 0.05, momentum=0.9), o.Adam(net.b.parameters(), 0.01)]
    return [made[kind](net.parameters())]


def _wrap_step(optimizer: Optimizer) -> None:
    inner = optimizer.step
    optimizer.step = lambda *args: inner(*args)  # type: ignore[method-assign]


def _drawn(seed: int, rows: int) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


class Run:
    """One program on one rank, one way."""

    def __init__(self, program: Program, way: str, rank: int) -> None:
        self.program, self.way, self.rank = program, way, rank
        torch.manual_seed(program["seed"])
        self.log: list[torch.Tensor] = []
        self.draws, self.rows = 0, _ROWS
        self.models: list[Any] = []
        self.optimizers: list[list[Optimizer]] = []
        for _ in range(program["models"]):
            net = Net(program["model"]).to(DEVICE)
            if program["compile"]:
                torch._dynamo.reset()
                net.forward = torch.compile(net.forward, backend="eager")  # type: ignore[method-assign]
            optimizers = _optimizers(program["optimizer"], net)
            model = DistributedDataParallel(
                net,
                find_unused_parameters=program["unused"],
                gradient_as_bucket_view=program["views"],
            )
            if program["frozen"] is not None and program["unused"]:
                self._part(net, program["frozen"]).requires_grad_(False)
            if program["rank 0 wraps"] and rank == 0:
                _wrap_step(optimizers[0])
            self.models.append(model)
            self.optimizers.append(optimizers)
        self.armed: set[int] = (
            set()
        )  # models of which a forward was synchronised, without a backward
        self.kept: dict[str, Any] = {}
        self.saved: list[Any] = []
        if not program["begin"]:
            self.take_over()

    def take_over(self) -> None:
        """Evener's turn."""
        from evener.ddp import accelerate

        if self.way == "plain":
            return
        for i, model in enumerate(self.models):
            both = self.way != "line" and len(self.optimizers[i]) == 1
            mode = "exact" if self.way == "door" else self.program["mode"]
            accelerate(
                model,
                self.optimizers[i][0] if both else None,
                mode=mode,
                bucket_bytes=self.program["bucket_bytes"],
            )

    @staticmethod
    def _part(net: Net, which: int) -> nn.Module:
        return net.b if which else net.a[0]

    def data(self) -> torch.Tensor:
        """This rank's next batch; draws are counted alike on all ranks."""
        self.draws += 1
        return _drawn(7919 * self.program["seed"] + 2 * self.draws + self.rank, self.rows)

    def same(self) -> torch.Tensor:
        """A batch that all ranks have."""
        self.draws += 1
        return _drawn(104729 * self.program["seed"] + self.draws, self.rows)

    # --- a step ---

    def train(self) -> None:
        self.number = -1
        for _ in range(self.program["warm"]):
            for model, optimizers in zip(self.models, self.optimizers, strict=True):
                self.step(model, optimizers, _WARM)
        for number, step in enumerate(self.program["steps"]):
            self.number = number
            if number == self.program["begin"] and number:
                self.take_over()
            if number == 3 and self.program["frozen"] is not None:
                for model in self.models:
                    self._part(model.module, self.program["frozen"]).requires_grad_(True)
            if number == self.program["own"]:
                self._own()
            for model, optimizers in zip(self.models, self.optimizers, strict=True):
                self.step(model, optimizers, step)

    def _own(self) -> None:
        """DDP's own reducer takes over, as a planner may find it the fastest."""
        from evener.comm.planner.choose import LIBRARY, Choice, Decision
        from evener.comm.planner.trial import Way

        for model in self.models if self.way != "plain" else []:
            planner, reducer = model.evener_steps.planner, model.evener
            if planner is None or planner.forced is not None or model._evener_own.refusal():
                continue
            choices = tuple(Choice(LIBRARY, "exact", (0.0, 1.0, 0.0)) for _ in reducer.exchanges)
            decision = Decision(choices, tuple(reducer.sequence), False, 1.0, 1.0, 1.0)
            planner._take(Way("own", decision))

    def step(self, model: Any, optimizers: list[Optimizer], step: dict[str, Any]) -> None:
        net = model.module
        inner, self.rows = step.get("inner", ""), step.get("rows", _ROWS)
        use = [self.program["unused"] is False or bool(u) for u in step["use"]]
        zero = step["zero"]
        if zero in ("none", "zeros"):
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=zero == "none")
        elif zero == "model":
            model.zero_grad()
        elif zero == "by hand":
            for parameter in net.parameters():
                parameter.grad = None
        for _ in range(0 if id(model) in self.armed else step["accumulate"]):
            with model.no_sync():
                model(self.data(), use[self.rank]).square().mean().backward()
        loss = self.loss(model, use[self.rank], inner)
        if zero == "late":
            model.zero_grad()
        if loss.requires_grad:
            loss.backward()
            self.armed.discard(id(model))
        else:
            self.armed.add(id(model))
        self.log.append(loss.detach().clone())
        for act in step["between"]:
            self.act(model, optimizers, act)
        if step["clip"]:
            self.log.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5))
        if not step["skip"]:
            for optimizer in optimizers:
                optimizer.step()
        for act in step["after"]:
            self.act(model, optimizers, act)

    def loss(self, model: Any, use: bool, inner: str) -> torch.Tensor:
        """The loss on the next batch. "penalty" adds WGAN-GP's penalty on the inputs' gradient."""
        if inner != "penalty" or self.program["model"] == "attention":  # has no second derivative
            return model(self.data(), use, inner).square().mean()
        x = self.data().requires_grad_()
        y = model(x, use)
        slope = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
        return y.square().mean() + slope.square().mean()

    def act(self, model: Any, optimizers: list[Optimizer], act: list[Any]) -> None:
        """What happens between steps, or between backward and step."""
        name, *args = act
        net, key = model.module, str(self.models.index(model))
        mine = bool(args) and args[0] in (2, self.rank)
        if name == "around" and self.program["unused"]:
            return  # plain DDP that looks for unused parameters counts it, and may fail next
        if "kept grads" in name and self.program["views"]:
            return  # with plain DDP they are the buckets of later steps: docs/reference/limits.md
        parameters = list(net.parameters())
        optimizer = optimizers[0]
        if name == "freeze" and self.program["unused"]:
            self._part(net, args[0]).requires_grad_(False)
        elif name == "thaw":
            self._part(net, args[0]).requires_grad_(True)
        elif name == "restart":
            for value in self._values(optimizers):
                value.zero_()
        elif name == "edit state":
            for value in self._values(optimizers)[::2]:
                value.mul_(0.5)
        elif name == "replace state":
            optimizer.state = collections.defaultdict(dict)
        elif name == "keep state":
            self.kept["state" + key] = self._values(optimizers)
        elif name == "scale kept state":
            for value in self.kept.get("state" + key, []):
                value.mul_(0.5)
        elif name == "keep grads":
            self.kept["grads" + key] = [p.grad for p in parameters if p.grad is not None]
        elif name == "keep flat grads":
            self.kept["grads" + key] = [p.grad.view(-1) for p in parameters if p.grad is not None]
        elif name == "zero kept grads":
            for grad in self.kept.get("grads" + key, []):
                grad.zero_()
        elif name == "sum kept grads":
            self.log += [g.double().sum() for g in self.kept.get("grads" + key, [])]
        elif name == "drop kept grads":
            self.kept.pop("grads" + key, None)
        elif name == "keep data":
            self.kept["data" + key] = [p.data for p in parameters]
        elif name == "sum kept data":
            self.log += [d.double().sum() for d in self.kept.get("data" + key, [])]
        elif name == "read grad":
            self.log += [p.grad.clone() for p in parameters[:3] if p.grad is not None]
        elif name == "around" and id(model) not in self.armed:
            x = self.same() if args[0] == 2 else self.data()
            if mine:
                with torch.enable_grad():
                    loss = net(x).square().sum()
                if loss.requires_grad:
                    loss.backward()
            if args[0] != 2:  # its rank alone has that: gone, before it makes the ranks differ
                for parameter in parameters:
                    parameter.grad = None
        elif name == "input gradient":
            self.armed.add(id(model))
            x = self.data().requires_grad_()
            self.log.append(torch.autograd.grad(model(x).square().mean(), x)[0])
        elif name == "weight gradient":
            self.armed.add(id(model))
            loss, weights = model(self.data()).square().mean(), list(net.head.parameters())
            self.log += torch.autograd.grad(loss, [w for w in weights if w.requires_grad])
        elif name == "backward to inputs":
            self.armed.add(id(model))
            x = self.data().requires_grad_()
            model(x).square().mean().backward(inputs=[x])
            self.log.append(x.grad)
        elif name == "raise in backward":
            self.armed.add(id(model))
            y = model(self.data())
            if y.requires_grad:
                y.register_hook(_raise)
                with contextlib.suppress(ArithmeticError):
                    y.square().mean().backward()
        elif name == "evaluate":
            x = self.same()
            if mine and self.program["model"] != "norm":
                model.eval()
                with torch.no_grad():
                    self.log.append(model(x).double().sum())
                model.train()
        elif name == "evaluate with gradients":
            x = self.same()
            # In its second forward plain DDP lays its buckets out anew, with all ranks.
            if mine and self.number > 2 and self.program["model"] != "norm":
                self.log.append(model(x).detach().double().sum())
            self.armed.add(id(model))
            dist.barrier()
        elif name == "save":
            file = io.BytesIO()
            state = [model.state_dict(), [o.state_dict() for o in optimizers]]
            torch.save(state, file)
            self.saved.append((key, file.getvalue()))
        elif name == "roll back":
            found = [data for of, data in self.saved if of == key]
            if found:
                weights, states = torch.load(io.BytesIO(found[0]))
                model.load_state_dict(weights)
                for one, state in zip(optimizers, states, strict=True):
                    one.load_state_dict(state)
        elif name == "copy":
            made = copy.deepcopy(net)
            with torch.no_grad():
                self.log.append(made.eval()(self.same()).double().sum())
            self.log += [
                v.double().sum()
                for v in copy.deepcopy(optimizer).state_dict()["state"].get(0, {}).values()
                if torch.is_tensor(v)
            ]
        elif name == "vector":
            self.log.append(nn.utils.parameters_to_vector(parameters).double().sum().detach())
        elif name == "raise in forward":
            net.raises = True
            with contextlib.suppress(ArithmeticError):
                model(self.data())
            net.raises = False
        elif name == "raise in loss":
            self.armed.add(id(model))
            model(self.data())  # and what follows it does not happen
        elif name == "lr":
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
        elif name == "add to weights":
            with torch.no_grad():
                for parameter in parameters[::2]:
                    parameter.add_(0.01)
        elif name == "ema":
            now = [p.detach().clone() for p in parameters]
            before = self.kept.get("ema" + key, now)
            self.kept["ema" + key] = [0.9 * a + 0.1 * b for a, b in zip(before, now, strict=True)]

    @staticmethod
    def _values(optimizers: list[Optimizer]) -> list[torch.Tensor]:
        # In the order of parameters: the first update of each adds its state, in any order.
        return [
            value
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            for value in optimizer.state.get(parameter, {}).values()
            if torch.is_tensor(value) and value.is_floating_point() and value.dim()
        ]

    def result(self) -> dict[str, torch.Tensor]:
        """Logs, weights, buffers, state."""
        found = {f"log {i}": value.detach().clone() for i, value in enumerate(self.log)}
        for i, model in enumerate(self.models):
            found |= {f"{i} {k}": v.clone() for k, v in model.module.state_dict().items()}
            for j, optimizer in enumerate(self.optimizers[i]):
                for index, state in optimizer.state_dict()["state"].items():
                    for name, value in state.items():
                        if torch.is_tensor(value):
                            found[f"{i} state {j} {index} {name}"] = value.clone()
        for name, values in self.kept.items():
            if name.startswith("ema"):
                found |= {f"{name} {i}": v for i, v in enumerate(values)}
        return found


# --- the world ---


def run_one(program: Program, rank: int) -> str:
    """What differs from plain DDP on this rank; or nothing."""
    if program["form"]:
        return lossy(program, rank)
    results: dict[str, dict[str, torch.Tensor]] = {}
    errors: dict[str, str] = {}
    for way in ("plain", *program["ways"]):
        try:
            run = Run(program, way, rank)
            run.train()
            results[way] = run.result()
        except Exception as error:  # noqa: BLE001 - plain DDP may raise it too
            errors[way] = f"{type(error).__name__}: {error}\n{traceback.format_exc()[-900:]}"
    if "plain" in errors:
        return _NO_PROGRAM
    if errors:
        return f"raises: {errors}"
    want = results.pop("plain")
    for way, found in results.items():
        if want.keys() != found.keys():
            return f"{way}: {sorted(want.keys() ^ found.keys())[:3]}"
        differ = [k for k, v in want.items() if not _same(v, found[k])]
        if differ:
            return f"{way}: {len(differ)} of {len(want)}, {differ[0]}"
    return ""


def lossy(program: Program, rank: int) -> str:
    """Whether what is applied and kept back are all gradients, and the ranks alike."""
    from evener.ddp import accelerate

    torch.manual_seed(program["seed"])
    net, form = Net("layers").to(DEVICE), program["form"]
    wrapped = DistributedDataParallel(net, find_unused_parameters=True)
    options = {"floor": "fp16"} if form == "auto" else {"ratio": 0.1} if "topk" in form else {}
    options["bucket_bytes"] = program["bucket_bytes"]
    model: Any = accelerate(wrapped, mode=form, **options)
    given = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
    got = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
    for name, parameter in net.named_parameters():
        parameter.register_hook(partial(_add_to, given[name]))
    run = Run.__new__(Run)
    run.program, run.rank, run.draws, run.rows = program, rank, 0, _ROWS
    for number, step in enumerate([*program["steps"], {"use": [1, 1], "accumulate": 0}]):
        if form == "auto" and number == 2:
            _take_last_form(model)
        spike = 1e8 if form == "auto" and number == 3 else 1.0
        model.zero_grad()
        for _ in range(step["accumulate"]):
            with model.no_sync():
                model(run.data(), step["use"][rank]).square().mean().backward()
        (spike * model(run.data(), step["use"][rank]).square().mean()).backward()
        for name, parameter in net.named_parameters():
            if parameter.grad is not None:
                if not parameter.grad.isfinite().all():
                    return f"step {number}: the gradient of {name} is not finite"
                got[name] += parameter.grad
    owed = model.evener.state_dict()["residual"]
    for name, mine in given.items():
        dist.all_reduce(mine)
        kept = owed[name].to(DEVICE) if name in owed else 0
        apart = (mine / RANKS - got[name] - kept).norm() / (mine.norm() + 1e-6)
        if apart > (1e-2 if form == "auto" else 1e-4):
            return f"{apart:.1%} of the gradients of {name} are lost"
    digest = hashlib.sha256(b"".join(map(_bytes, got.values()))).hexdigest()
    digests = [""] * RANKS
    dist.all_gather_object(digests, digest)
    return "" if len(set(digests)) == 1 else "ranks differ"


def _raise(gradient: torch.Tensor) -> None:
    raise ArithmeticError("as it happens")


def _add_to(total: torch.Tensor, gradient: torch.Tensor) -> None:
    total.add_(gradient)


def _take_last_form(model: Any) -> None:
    """What the planner could choose, whatever this machine's network is."""
    from evener.comm.planner.choose import Choice, Decision
    from evener.comm.planner.trial import Way

    planner, reducer = model.evener_steps.planner, model.evener
    form = planner.forms[-1]
    choices = tuple(Choice("2d", form, (0.0, 1.0, 0.0)) for _ in reducer.exchanges)
    planner._take(Way(form, Decision(choices, tuple(reducer.sequence), False, 1.0, 1.0, 1.0)))


def _bytes(value: torch.Tensor) -> bytes:
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())


def _drawn_sequence(
    _profile: Any, stages: Sequence[Any], *_: Any, **_options: Any
) -> tuple[int, ...]:
    """Instead of the best order, which takes long to find: any order must do."""
    sequence = list(range(len(stages)))
    random.Random(len(stages)).shuffle(sequence)
    return tuple(sequence)


def _serve(rank: int, port: int, pipe: Any, env: dict[str, str]) -> None:
    from evener.comm import steps
    from evener.comm.planner import choose

    os.environ.update(env)
    os.environ.update({"EVENER_HOSTID": f"node{rank}", "GLOO_SOCKET_IFNAME": "lo"})
    os.environ.update({"EVENER_TRIAL_STEPS": "0", "LIGHT_TOPK_THRESHOLD": "64"})
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = datetime.timedelta(seconds=_SECONDS / 2)
    backend = "gloo"
    if DEVICE == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(rank)
        torch.use_deterministic_algorithms(True)
    dist.init_process_group(backend, store=store, rank=rank, world_size=RANKS, timeout=limit)
    steps.best_sequence = choose.best_sequence = _drawn_sequence
    fault = env.get("TWIN_FAULT", "")
    if fault:
        FAULTS[fault]()
    while True:
        try:
            program = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        pipe.send_bytes(pickle.dumps(run_one(program, rank)))


class World:
    """Two ranks that live until one of them hangs or dies."""

    def __init__(self) -> None:
        self.pipes: list[Any] = []
        self.processes: list[Any] = []
        self.fault = ""

    def check(self, program: Program) -> None:
        """Raise AssertionError where a rank differs from plain DDP, or ranks from each other."""
        fault = os.environ.get("TWIN_FAULT", "")
        if not self.pipes or fault != self.fault:
            self.start(fault)
        try:
            for pipe in self.pipes:
                pipe.send_bytes(pickle.dumps(program))
            answers: list[str] = []
            limit = _SECONDS * (5 if program["compile"] else 1)  # on busy processors
            for rank, pipe in enumerate(self.pipes):
                if not pipe.poll(limit):
                    raise AssertionError(f"rank {rank} has not finished after {limit} s")
                answers.append(pickle.loads(pipe.recv_bytes()))
        except (AssertionError, EOFError, OSError) as error:
            self.stop()
            raise AssertionError(f"{type(error).__name__}: {error}") from error
        wrong = [f"rank {rank}: {text}" for rank, text in enumerate(answers) if text]
        if _NO_PROGRAM in answers:
            self.stop()  # plain DDP raises, and then the ranks may be anywhere
            return
        if wrong:
            self.stop()  # the ranks may be anywhere
            raise AssertionError("; ".join(wrong))

    def start(self, fault: str) -> None:
        """A world of its own, broken in that way."""
        self.stop()
        self.fault = fault
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preload", "evener.ddp.line", "tests.twins.doors"])
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        env = {"TWIN_FAULT": fault}
        for rank in range(RANKS):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.store.port, there, env), daemon=True
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def stop(self) -> None:
        """End its processes."""
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.pipes, self.processes = [], []


WORLD = World()
atexit.register(WORLD.stop)


# --- faults: what was once wrong, put back in the ranks ---


def _forgets_frozen() -> None:
    from evener.ddp import line

    inner = line.taken
    line.taken = lambda model: [(n, p) for n, p in inner(model) if p.requires_grad]


def _reduces_every_backward() -> None:
    from evener.ddp.model import AcceleratedDataParallel

    inner = AcceleratedDataParallel.backward_ended

    def ended(self: Any) -> None:
        inner(self)
        self.evener.arrivals.active = True

    AcceleratedDataParallel.backward_ended = ended  # type: ignore[method-assign]


def _state_is_not_watched() -> None:
    from evener.comm.overlap.state import StateWatch

    StateWatch.seen = lambda _: ""  # type: ignore[method-assign]
    StateWatch.of_the_step = lambda _: contextlib.nullcontext()  # type: ignore[method-assign]


def _transforms_are_not_seen() -> None:
    from evener.comm.overlap import interpose

    interpose._transforms = lambda: iter(())  # type: ignore[assignment]
    interpose.refusal = lambda: ""
    interpose.within = lambda: False


def _gradients_are_not_looked_at() -> None:
    from evener.comm.reducer import Reducer

    Reducer.begins = lambda _: None  # type: ignore[method-assign]


def _last_look_is_not_forgotten() -> None:
    from evener.comm.reducer import Reducer

    inner = Reducer.begins

    def begins(self: Any) -> None:
        before = self._kept
        inner(self)
        self._kept = before | self._kept

    Reducer.begins = begins  # type: ignore[method-assign]


def _weights_are_not_looked_at() -> None:
    from evener.comm import holders

    holders.share_memory = lambda _: False  # type: ignore[assignment]


def _unused_are_sent() -> None:
    from evener.comm.state import ShardState

    ShardState.aside = lambda *_: contextlib.nullcontext()  # type: ignore[method-assign]


def _frozen_have_no_node() -> None:
    from evener.comm import arrivals
    from evener.ddp import torch_reducer as own

    own.thawed = arrivals.thawed = lambda *_: contextlib.nullcontext()  # type: ignore[assignment]


def _fp16_is_chosen() -> None:
    from evener.comm import wires

    wires.get("fp16").overflows = False


def _compiled_code_is_not_seen() -> None:
    from evener.comm.overlap import interpose

    interpose._compiled = lambda enter: enter  # type: ignore[assignment]
    interpose.within = lambda: False


def _ranks_talk_in_a_forward() -> None:
    from evener.comm.steps import Steps

    turn, began = Steps._turn, Steps.forward_began

    def forward_began(self: Any, compiled: bool) -> None:
        for _ in range(self.__dict__.pop("owed", 0)):
            turn(self)
        began(self, compiled)

    Steps._turn = lambda self: self.__dict__.update(owed=1)  # type: ignore[method-assign]
    Steps.forward_began = forward_began  # type: ignore[method-assign]


def _each_rank_decides() -> None:
    from evener.ddp import line

    line.everyones = lambda communicators, mine: [mine] * communicators.size


FAULTS: dict[str, Callable[[], None]] = {
    "C1 what is frozen is left out": _forgets_frozen,
    "C2 every backward is reduced": _reduces_every_backward,
    "C3 state is not watched": _state_is_not_watched,
    "C4 torch.func is not seen": _transforms_are_not_seen,
    "C5 gradients that are kept are not seen": _gradients_are_not_looked_at,
    "C5 gradients seen by a backward to inputs stay": _last_look_is_not_forgotten,
    "C5 weights that are kept are not seen": _weights_are_not_looked_at,
    "H1 residuals of unused parameters are dropped": _unused_are_sent,
    "H2 frozen parameters have no node": _frozen_have_no_node,
    "H3 auto chooses FP16": _fp16_is_chosen,
    "H4 compiled code is not seen": _compiled_code_is_not_seen,
    "H5 ranks talk in a forward": _ranks_talk_in_a_forward,
    "H5 each rank decides alone": _each_rank_decides,
}


@contextlib.contextmanager
def _fault(name: str) -> Iterator[None]:
    os.environ["TWIN_FAULT"] = name
    try:
        yield
    finally:
        del os.environ["TWIN_FAULT"]
        WORLD.stop()


TWIN = Twin(
    "doors",
    programs(),
    WORLD.check,
    {name: partial(_fault, name) for name in FAULTS},
    programs_per_round=100,
)
