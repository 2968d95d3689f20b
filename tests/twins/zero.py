"""The memory engine against plain torch, in one process on the simulated device, or on the GPU with
TWIN_DEVICE=cuda.

A program is a small model, an optimizer, perhaps a schedule, and what a training script does. Both
run it; losses, outputs, weights and buffers agree to the rounding of sums (`CLOSE`). With moments
of one byte torch's optimizer has them too (`_moments`). Muon comes with AdamW for what is no matrix
of a block, each with its schedule. What Evener refuses must raise UsageError, and leave everything
as it was.
"""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from evener import zero
from evener.base import torch_names
from evener.errors import UsageError
from evener.zero import (
    api,
    boundary,
    checkpoint,
    edges,
    groups,
    passes,
    tiles,
    units,
    vocabulary,
    weight,
)
from evener.zero import loss as loss_module
from evener.zero import optimizer as optimizers
from evener.zero.chunk import Chunk
from evener.zero.engine import Engine
from evener.zero.passes import Passes
from evener.zero.states import SCALE, States
from tests.twins import _moments
from tests.twins.harness import Twin

DEVICE = os.environ.get("TWIN_DEVICE", "")
PLACE = DEVICE or "cpu"
WIDTH, WORDS = 8, 24
CLOSE: dict[str, Any] = {"rtol": 3e-3, "atol": 3e-4, "equal_nan": True}
MACHINE = zero.Machine(1e12, 1e10, 1e10, 1e9, 1e9)


class Block(nn.Module):
    """`writes`: where something is written in place (`WRITES`). "bare": nothing is added to the
    last linear layer's result, which is a view."""

    writes: frozenset[str] = frozenset()

    def __init__(self, norm: str, width: int) -> None:
        super().__init__()
        kinds = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d}
        self.norm = kinds[norm](width) if norm in kinds else nn.Identity()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.side = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, side: bool) -> torch.Tensor:
        if "input" in self.writes:
            x.mul_(0.9)
        given = x * 1.1 if "sum" in self.writes else x
        y = self.up(self.norm(given.flatten(0, 1)).view_as(x))
        if "inner" in self.writes:
            y.mul_(1.2)[..., :2] = 0.1
        y = self.down(functional.gelu(y))
        if "sum" in self.writes:
            y = x.add_(y)
        elif "bare" not in self.writes:
            y = x + y
        out: torch.Tensor = y + torch.tanh(self.side(given)) if side else y
        return out


WRITES = ("embedding", "input", "inner", "sum", "bare", "between", "row", "logits")
AGAIN = {"input", "sum"}
"""What a block writes to its input would be written twice where it is recomputed."""


class Net(nn.Module):
    """Embedding, blocks that may be left out or run twice, a head that may be tied. `writes`: as of
    its blocks."""

    writes: frozenset[str] = frozenset()

    def __init__(self, blocks: int, norm: str, tied: bool, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Block(norm, width) for _ in range(blocks))
        self.scale = nn.Parameter(torch.ones(width))
        self.head = nn.Linear(width, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def body(self, x: torch.Tensor, side: bool = True, skip: int = -1) -> torch.Tensor:
        x = x.clone() if x.is_floating_point() else self.embed(x)
        if "embedding" in self.writes:
            x.mul_(2.0)
        for number, layer in enumerate(self.layers):
            if number != skip:
                x = layer(x, side)
                if "between" in self.writes:
                    x.mul_(0.8)
                if "row" in self.writes:
                    x[:, 0] = 0.3
        return x * self.scale

    def forward(self, x: torch.Tensor, side: bool = True, skip: int = -1) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x, side, skip))
        if "logits" in self.writes:
            out.div_(0.8)
        return out

    def write(self, where: Iterable[str]) -> Net:
        """The same model, which writes in place there."""
        self.writes = frozenset(where)
        for layer in self.layers:
            layer.writes = self.writes  # type: ignore[assignment]
        return self


class Own(torch.autograd.Function):
    """A cross-entropy with a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = logits.float().log_softmax(-1)
        ctx.save_for_backward(found.exp(), targets)
        return -found.gather(1, targets[:, None]).mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        found, targets = ctx.saved_tensors
        found = found.clone()
        found[torch.arange(len(targets), device=PLACE), targets] -= 1
        return gradient * found / len(targets), None


def _ce(x: torch.Tensor, y: torch.Tensor, **given: Any) -> torch.Tensor:
    return functional.cross_entropy(x.float().view(-1, WORDS), y.view(-1), **given)


def _cooled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.div_(0.5)
    return _ce(x, y)


def _masked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows = x.view(-1, WORDS)
    x[..., :2] = -4.0
    return functional.cross_entropy(rows, y.view(-1).clamp(min=2))


def _written_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[0].mul_(2.0)
    return _ce(x, y)


def _shifted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _ce(x[:, :-1].contiguous(), y[:, 1:].contiguous())


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "plain": _ce,
    "smooth": lambda x, y: _ce(x, y, label_smoothing=0.1),
    "sum": lambda x, y: _ce(x, y, reduction="sum") / y.numel(),
    "weighted": lambda x, y: (
        _ce(x, y, reduction="none") * torch.linspace(0, 1, y.numel(), device=PLACE)
    ).mean(),
    "ignored": lambda x, y: _ce(x, y.masked_fill(y % 2 == 0, -100)),
    "z": lambda x, y: _ce(x, y) + 1e-2 * x.logsumexp(-1).square().mean(),
    "gathered": lambda x, y: -x.log_softmax(-1).gather(2, y[..., None]).mean(),
    "own": lambda x, y: Own.apply(x.view(-1, WORDS), y.view(-1)),
    "own of a slice": lambda x, y: Own.apply(x[:, 0], y[:, 0]),
    "both": lambda x, y: _ce(x, y) + Own.apply(x.view(-1, WORDS), y.view(-1)),
    "cooled": _cooled,
    "masked": _masked,
    "written view": _written_view,
    "shifted": _shifted,
    "transposed": lambda x, y: functional.cross_entropy(x.transpose(1, 2), y),
    "looked at": lambda x, y: x.argmax(-1).sum() * 0 + _ce(x, y),
}


def _scheduled(kind: str, optimizer: torch.optim.Optimizer) -> Any:
    rates = torch.optim.lr_scheduler
    if kind == "warm":
        return rates.LambdaLR(optimizer, lambda step: min(1.0, step / 3))
    if kind == "milestones":
        return rates.MultiStepLR(optimizer, [2, 4], 0.5)
    return rates.StepLR(optimizer, 3, 0.5)


class Several:
    """Optimizers or schedules that step one after the other."""

    def __init__(self, each: list[Any]) -> None:
        self.each = each

    def step(self) -> None:
        for one in self.each:
            one.step()

    def zero_grad(self) -> None:
        for one in self.each:
            one.zero_grad()

    def state_dict(self) -> list[Any]:
        return [one.state_dict() for one in self.each]

    def load_state_dict(self, states: list[Any]) -> None:
        for one, state in zip(self.each, states, strict=True):
            one.load_state_dict(state)


def _several(parameters: Iterable[nn.Parameter]) -> Several:
    """Muon of the blocks' matrices, and AdamW of the rest. One step of Newton-Schulz: each more
    makes differences of rounding three times as large."""
    given = list(parameters)
    matrices = [p for p in given if p.dim() == 2 and WORDS not in p.shape]
    rest = [p for p in given if p.dim() != 2 or WORDS in p.shape]
    how = {"momentum": 0.8, "eps": 1e-3, "ns_steps": 1, "adjust_lr_fn": "match_rms_adamw"}
    return Several([torch.optim.Muon(matrices, 2e-2, **how), _optimizer("AdamW", rest)])


def _optimizer(kind: str, parameters: Iterable[nn.Parameter]) -> Any:
    if kind == "Muon":
        return _several(parameters)
    if kind == "SGD":
        return torch.optim.SGD(parameters, 0.05, momentum=0.9)
    # A large epsilon: a gradient that is zero but for rounding moves nothing.
    return torch.optim.AdamW(parameters, 1e-2, eps=1e-3)


class Pair:
    """Evener's model and torch's. `near`: how close losses, outputs and gradients are; `prefix`:
    what stands before the names of the model's own modules."""

    near, prefix = CLOSE, ""

    def __init__(self, program: dict[str, Any], folder: str) -> None:
        self.program, self.folder = program, folder
        self.saved: Any = None
        torch.manual_seed(program["seed"])
        self.never = {program.get("frozen", -1)}
        """Blocks that are never trained; the engine knows it."""
        self.frozen = set(self.never)
        model = self._net()
        self._freeze(model)
        self._copy(model)
        self._plain_optimizer()
        self._start(model)

    def _copy(self, model: Net) -> None:
        """The plain model of the same weights."""
        self.plain = copy.deepcopy(model).to(PLACE)

    def _trained(self) -> dict[str, nn.Parameter]:
        """What the plain optimizer steps, in the order of the model's parameters."""
        return dict(self.plain.named_parameters())

    def _plain_optimizer(self) -> None:
        """A new one; with its states rounded as the program has it."""
        trained = self._trained()
        self.plain_optimizer = _optimizer(self.program["optimizer"], trained.values())
        self.plain_scheduler = self._schedule(self.plain_optimizer)
        if self.bytes:
            _moments.coarse(self.plain_optimizer, trained, lambda: self.engine)

    @property
    def bytes(self) -> bool:
        return self.program.get("moments") == "int8" and not self.several

    @property
    def several(self) -> bool:
        """Muon, whose momentum has no form of one byte."""
        return bool(self.program["optimizer"] == "Muon")

    def _net(self) -> Net:
        given = self.program
        made = Net(given["blocks"], given["norm"], given["tied"])
        return made.write(given.get("writes", ()))

    def _schedule(self, optimizer: Any) -> Any:
        kind = self.program["schedule"]
        if kind and isinstance(optimizer, Several):
            return Several([_scheduled(kind, one) for one in optimizer.each])
        return _scheduled(kind, optimizer) if kind else None

    def _start(self, model: Net) -> None:
        program = self.program
        self._freeze(model, self.never)
        optimizer = _optimizer(program["optimizer"], model.parameters())
        scheduler = self._schedule(optimizer)
        names = {f"{self.prefix}layers.{n}/0" for n in range(program["resident"])}
        several = isinstance(optimizer, Several)
        self.given = optimizer if several else None
        self.mine = scheduler if several else None
        self.engine, self.optimizer, _, self.scheduler = zero.initialize(
            model=model,
            optimizer=optimizer.each if several else optimizer,
            lr_scheduler=None if several else scheduler,
            config=self._config(),
            resident=names,
            machine=MACHINE,
            streaming=program.get("streaming", False),
        )
        self.engine.threads = 1
        self.model = model
        self._freeze(self.model)

    def _freeze(self, net: Any, those: Container[int] | None = None) -> None:
        those = self.frozen if those is None else those
        for number, layer in enumerate(net.layers):
            layer.requires_grad_(number not in those)

    def _config(self) -> dict[str, Any]:
        program = self.program
        return {
            "gradient_accumulation_steps": program["accumulate"],
            "gradient_clipping": program["clip"],
            "zero_optimization": {"stage3_param_persistence_threshold": 0},
            "evener": {
                "device": DEVICE or program.get("device", "cpu"),
                "loss": program.get("loss", "fused"),
                "checkpointing": program["recompute"]
                and AGAIN.isdisjoint(program.get("writes", ())),
                "moments": "fp32" if self.several else program.get("moments", "fp32"),
            },
        }

    def compare(self) -> None:
        mine, theirs = (
            {name: value.cpu() for name, value in model.state_dict().items()}
            for model in (self.model, self.plain)
        )
        if not self.bytes:
            torch.testing.assert_close(mine, theirs, **CLOSE)
            return
        _moments.close(mine, theirs, **CLOSE)
        self.compare_moments(rtol=3e-3, atol=1e-5)

    def compare_moments(self, **bound: float) -> None:
        kept = [
            {
                f"{number}.{name}": value.float().cpu()
                for number, state in optimizer.state_dict()["state"].items()
                for name, value in state.items()
                if name in _moments.EXPONENTS and value is not None
            }
            for optimizer in (self.optimizer, self.plain_optimizer)
        ]
        _moments.close(*kept, **bound)

    def data(self, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(seed)
        x = torch.randint(0, WORDS, (3, 4), generator=made)
        return x.to(PLACE), torch.randint(0, WORDS, (3, 4), generator=made).to(PLACE)

    def both(self, call: Callable[[Any, Net], torch.Tensor]) -> list[torch.Tensor]:
        found = [call(self.engine, self.model), call(self.plain, self.plain)]
        torch.testing.assert_close(found[0].detach(), found[1].detach(), **self.near)
        return found

    def train(self, call: Callable[[Any, Net], torch.Tensor]) -> None:
        accumulate = self.program["accumulate"]
        for _ in range(accumulate):
            mine, theirs = self.both(call)
            self.engine.backward(mine)
            if self.given is None:
                self.engine.step()
            (theirs / accumulate).backward()
        if self.given is not None:
            order = list(enumerate(self.given.each))
            for number, one in order if self.program["seed"] % 2 else reversed(order):
                one.step()
                one.zero_grad()
                if self.mine is not None:
                    self.mine.each[number].step()
        if self.program["clip"]:
            trained = [p for p in self.plain.parameters() if p.requires_grad]
            torch.nn.utils.clip_grad_norm_(trained, self.program["clip"])
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()
        if self.plain_scheduler is not None:
            self.plain_scheduler.step()

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.engine.close()

    def run(self, step: list[Any]) -> None:
        kind, seed = step[0], step[1]
        x, y = self.data(seed)
        getattr(self, f"do_{kind}")(x, y, *step[2:])

    def do_train(self, x: torch.Tensor, y: torch.Tensor, loss: str) -> None:
        self.train(lambda net, _: LOSSES[loss](net(x), y))

    def do_branch(self, x: torch.Tensor, y: torch.Tensor, side: bool, skip: int) -> None:
        self.train(lambda net, _: _ce(net(x, side, skip), y))

    def do_twice(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Two passes and one loss."""
        self.train(lambda net, _: _ce(net(x), y) + _ce(net(x.flip(0), False), y))

    def do_body(self, x: torch.Tensor, _y: torch.Tensor) -> None:
        """A method beside forward."""
        self.train(lambda _, model: model.body(x).square().mean())

    def do_evaluate(self, x: torch.Tensor, _y: torch.Tensor, inner: bool) -> None:
        for net in (self.model, self.plain):
            net.eval()
        with torch.no_grad():
            self.both(lambda net, model: model.body(x) if inner else net(x))
        for net in (self.model, self.plain):
            net.train()

    def do_attack(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """A gradient of the inputs, which leaves the weights' alone."""
        found: list[torch.Tensor] = []
        scale = self.plain.scale
        given = functional.one_hot(x, WORDS)[..., : scale.numel()].to(scale.dtype)
        for net in (self.engine, self.plain):
            inputs = given.clone().requires_grad_()
            found += torch.autograd.grad(_ce(net(inputs), y), inputs)
        torch.testing.assert_close(*found, **self.near)

    def do_state(self, *_: Any) -> None:
        self.compare()

    def do_freeze(self, *given: Any) -> None:
        self.frozen ^= {given[2] % len(self.model.layers)} - self.never
        for net in (self.model, self.plain):
            self._freeze(net)

    def do_forget(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """A backward pass of which nothing is used."""
        for loss in self.both(lambda net, _: _ce(net(x), y)):
            loss.backward()
        self.optimizer.zero_grad()
        self.plain_optimizer.zero_grad()

    def do_fail(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """An error in a forward pass, caught."""

        class MineError(Exception):
            pass

        def fail(*_: Any) -> None:
            raise MineError

        for net, model in ((self.engine, self.model), (self.plain, self.plain)):
            last: Any = model.layers[-1]
            hook = last.up.register_forward_pre_hook(fail)
            with contextlib.suppress(MineError):
                net(x)
                raise AssertionError("the hook was not called")
            hook.remove()

    def do_label(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """A label outside of the vocabulary raises with both. (On a GPU it ends the context.)"""
        if DEVICE:
            return
        bad = y.clone()
        bad[0, 0] = WORDS
        for net in (self.engine, self.plain):
            try:
                _ce(net(x), bad)
            except IndexError:
                continue
            raise AssertionError("a label outside of the vocabulary gave a loss")

    def do_refused(self, x: torch.Tensor, y: torch.Tensor, what: str) -> None:
        """What the engine cannot do says so."""
        calls: dict[str, Callable[[], Any]] = {
            "copy": lambda: copy.deepcopy(self.model),
            "again": lambda: zero.initialize(model=self.model, config={}, resident=set()),
            "group": lambda: self.optimizer.add_param_group({"params": [nn.Parameter(x.float())]}),
            "clip": lambda: torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1),
        }  # fmt: skip
        if what == "clip":
            for loss in self.both(lambda net, _: _ce(net(x), y)):
                loss.backward()
        try:
            calls[what]()
        except UsageError:
            pass
        else:
            raise AssertionError(f"{what} was not refused")
        self.optimizer.zero_grad()
        self.plain_optimizer.zero_grad()

    def do_save(self, *_: Any) -> None:
        zero.save_checkpoint(self.engine, self.folder)
        self.schedules = copy.deepcopy(self.mine and self.mine.state_dict())
        self.saved = copy.deepcopy(self._kept())

    def _kept(self) -> Any:
        return (
            self.plain.state_dict(),
            self.plain_optimizer.state_dict(),
            self.plain_scheduler and self.plain_scheduler.state_dict(),
        )

    def _back(self, saved: Any) -> None:
        model, optimizer, scheduler = saved
        self.plain.load_state_dict(model)
        self.plain_optimizer.load_state_dict(optimizer)
        if self.plain_scheduler is not None:
            self.plain_scheduler.load_state_dict(scheduler)

    def do_load(self, _x: torch.Tensor, _y: torch.Tensor, elsewhere: bool) -> None:
        """Back to the last checkpoint, here or in an engine of a model that was drawn anew."""
        if self.saved is None:
            return
        if elsewhere:
            self.engine.close()
            self._start(self._net())
        zero.load_checkpoint(self.engine, self.folder)
        if self.mine is not None:
            self.mine.load_state_dict(copy.deepcopy(self.schedules))
        self._back(copy.deepcopy(self.saved))

    def do_resume(self, x: torch.Tensor, y: torch.Tensor, elsewhere: bool) -> None:
        """Save, go on, and go back."""
        self.do_train(x, y, "plain")
        self.do_save()
        self.do_train(y, x, "plain")
        self.do_load(x, y, elsewhere)
        self.compare()

    def do_back(self, *_: Any) -> None:
        """The weights back in a plain model, and under an engine again: moments go on from none."""
        zero.give_back(self.engine)
        model = self.model
        self._plain_optimizer()
        self.saved = None
        model.requires_grad_(True)  # what is frozen now could not be trained later
        self._start(model)


def check(program: dict[str, Any]) -> None:
    """Run it with both."""
    small = mock.patch.object(units, "LEAST", _moments.LEAST)
    with tempfile.TemporaryDirectory() as folder, small:
        pair = Pair(program, folder)
        try:
            for step in program["steps"]:
                pair.run(step)
            pair.do_train(*pair.data(1), "plain")
            pair.compare()
        finally:
            pair.close()


_seeds = st.integers(0, 1000)


def _step(kind: str, *given: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.tuples(st.just(kind), _seeds, *given).map(list)


STEPS = st.one_of(
    _step("train", st.sampled_from(sorted(LOSSES))),
    _step("train", st.sampled_from(sorted(LOSSES))),
    _step("branch", st.booleans(), st.integers(-1, 2)),
    _step("twice"),
    _step("body"),
    _step("evaluate", st.booleans()),
    _step("attack"),
    _step("state"),
    _step("freeze", st.integers(0, 2)),
    _step("forget"),
    _step("fail"),
    _step("label"),
    _step("refused", st.sampled_from(["copy", "again", "group", "clip"])),
    _step("save"),
    _step("load", st.booleans()),
    _step("resume", st.booleans()),
    _step("resume", st.booleans()),
    _step("back"),
)
PROGRAMS = st.fixed_dictionaries(
    {
        "seed": _seeds,
        "blocks": st.integers(1, 3),
        "norm": st.sampled_from(["none", "layer", "batch"]),
        "tied": st.booleans(),
        "frozen": st.integers(-2, 2),
        "optimizer": st.sampled_from(["SGD", "AdamW", "Muon"]),
        "schedule": st.sampled_from(["", "warm", "milestones", "steps"]),
        "moments": st.sampled_from(["fp32", "fp32", "int8"]),
        "accumulate": st.integers(1, 2),
        "clip": st.sampled_from([0.0, 0.5]),
        "loss": st.sampled_from(["fused", "fused", "plain", "chunked"]),
        "recompute": st.booleans(),
        "writes": st.lists(st.sampled_from(WRITES), max_size=2, unique=True),
        "resident": st.integers(0, 2),
        # What the simulated device counts is traced before a step, as on a GPU: seconds.
        "device": st.sampled_from(["cpu"] * 49 + ["simulated"]),
        "steps": st.lists(STEPS, min_size=1, max_size=7),
    }
)


def _put(target: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(target, name, value)


@contextlib.contextmanager
def _all(*faults: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for fault in faults:
            stack.enter_context(fault())
        yield


@contextlib.contextmanager
def _no_graph() -> Iterator[None]:
    """Lazy logits that need no gradient, as functions of one's own see them."""
    made = vocabulary.LazyLogits.of

    def of(hidden: torch.Tensor, head: Any, raw: Any = None) -> Any:
        with torch.no_grad():
            found = made(hidden, head, raw)
        found.hidden = hidden
        return found

    with mock.patch.object(vocabulary.LazyLogits, "of", staticmethod(of)):
        yield


@contextlib.contextmanager
def _copied_groups() -> Iterator[None]:
    def copied(_model: Any, _parameters: Any, optimizers: Any) -> Any:
        return [dict(group) for one in optimizers for group in one.param_groups]

    with (
        mock.patch.object(groups, "of", copied),
        mock.patch.object(api, "take_over", lambda *_: None),
    ):
        yield


def _frozen_scales(self: States, place: str) -> Any:
    tensor, scale = getattr(self, place), getattr(self, place + SCALE)
    return tensor if scale is None else (tensor, scale.clone())


def _without_scales(self: Chunk) -> dict[str, torch.dtype]:
    return {name: dtype for name, dtype in _formats(self).items() if not name.endswith(SCALE)}


def _muon(
    change: Callable[[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]], Any],
    **hyper: Any,
) -> Callable[[], AbstractContextManager[Any]]:
    """torch's arithmetic with a fault: on what `change` makes of weights, gradients and momenta."""

    def step(w: list[Any], g: list[Any], m: list[Any], **given: Any) -> None:
        for one in change(w, g, m):
            _arithmetic(*one, **{**given, **hyper})

    return _put(torch_names, "muon", lambda: step)


def _pieces(w: list[Any], g: list[Any], m: list[Any]) -> Iterator[Any]:
    """The upper and the lower half of each matrix."""
    for half in (0, 1):
        yield tuple([x.chunk(2)[half] for x in each] for each in (w, g, m))


def _forgetful(w: list[Any], g: list[Any], m: list[Any]) -> Iterator[Any]:
    """The momentum is added to and does not decay."""
    kept = [x.clone() for x in m]
    yield w, g, m
    for x, before, gradient in zip(m, kept, g, strict=True):
        x.copy_(before + gradient * 0.2)


@contextlib.contextmanager
def _late_rates() -> Iterator[None]:
    """The optimizers' rates are taken when the last has been asked, and not each's when it was."""
    update = Engine.update
    with mock.patch.object(Engine, "update", lambda self, _=None: update(self)):
        yield


@contextlib.contextmanager
def _clears_all() -> Iterator[None]:
    """zero_grad of one of several optimizers takes the gradients of all."""
    take = optimizers.Together._take

    def wrapped(self: Any, number: int, optimizer: Any) -> None:
        take(self, number, optimizer)
        optimizer.zero_grad = lambda: self._engine.zero_grad()

    with mock.patch.object(optimizers.Together, "_take", wrapped):
        yield


def _nothing(*_: Any) -> None:
    """Nothing."""


_arithmetic = torch_names.muon()
_formats = Chunk.formats
FAULTS = {
    "Muon: the momentum does not decay": _muon(_forgetful),
    "Muon: the rate is not adjusted": _muon(lambda *each: [each], adjust_lr_fn="none"),
    "Muon: a matrix is updated in two pieces": _muon(_pieces),
    "Muon: Nesterov's momentum is plain": _muon(lambda *each: [each], nesterov=False),
    "Muon: the weights do not decay": _muon(lambda *each: [each], weight_decay=0.0),
    "several: rates of after the schedules": _late_rates,
    "several: one clears the gradients of all": _clears_all,
    "the scale of a block is not updated": _put(States, "moment", _frozen_scales),
    "checkpoints hold no scales": _put(Chunk, "formats", _without_scales),
    "a written view has no hook": _put(edges, "_base", _nothing),
    "what is written in a call is not seen": _put(edges.Edges, "written", lambda _: []),
    "recomputation moves buffers twice": _put(passes, "_kept", lambda _: contextlib.nullcontext()),
    "writes to logits are dropped": _put(vocabulary.LazyLogits, "parts", property(lambda _: True)),
    "functions of one's own get no gradient": _no_graph,
    "checkpoints hold no buffers": _put(checkpoint, "_restore_buffers", lambda *_: None),
    "a gradient of inputs adds those of weights": _put(boundary, "_wants_weights", lambda _: True),
    "torch's clipping does nothing": _put(weight.Weight, "_refuse_gone", lambda *_: None),
    # Those of the last step are read where none are brought.
    "weights that are away are NaN": partial(
        _all, _put(weight, "away", _nothing), _put(Passes, "wake", _nothing)
    ),
    "state_dicts are NaN": partial(
        _all, _put(api, "show", _nothing), _put(weight, "away", _nothing)
    ),
    "the given optimizer's groups are copied": _copied_groups,
    "milestones become strings": partial(
        _all, *(_put(checkpoint, name, lambda value: value) for name in ("_packed", "_unpacked"))
    ),
    "labels outside of the vocabulary pass": partial(
        _all, *(_put(place, "in_vocabulary", _nothing) for place in (tiles, loss_module))
    ),
}
# Weights that have left the accelerator before the backward pass has read them.
ENDS = {
    "a written view has no hook": "setStorage",
    "what is written in a call is not seen": "setStorage",
    # The optimizer that was given still steps, and finds no gradient.
    "the given optimizer's groups are copied": "it has left the parameter",
}
TWIN = Twin("zero", PROGRAMS, check, FAULTS, ENDS, programs_per_round=150)
