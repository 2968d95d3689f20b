"""The optimizer in the backward pass against an update after it, bit for bit.

A program is a small model, where its chunks live, an optimizer with its forms, and what a training
script does. Two engines run it, one with `optimizer_in_backward`: losses, norms, weights, moments
have to be the same. Lanes are late at random: a buffer that comes back too early is then written
while it is read. What would come between `backward()` and `step()` must be refused.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch.nn import functional

from evener import zero
from evener.errors import UsageError
from evener.zero import gradients, lanes, ssd, units
from evener.zero.chunk import Chunk
from evener.zero.engine import Engine
from evener.zero.in_backward import InBackward
from evener.zero.lanes import Lanes
from tests.twins.harness import Twin
from tests.twins.zero import (
    LOSSES,
    MACHINE,
    WORDS,
    Block,
    Net,
    _all,
    _ce,
    _nothing,
    _optimizer,
    _scheduled,
)

WIDTH = 16
SLICE = 256


class Reads(Block):
    """It begins with a weight that it reads without a gradient: the backward pass reads that last,
    when the weight's own gradient has been there for a while."""

    def forward(self, x: torch.Tensor, side: bool) -> torch.Tensor:
        x = x + functional.linear(x, self.side.weight.detach()).tanh()
        return super().forward(x, True)


class Side:
    """One engine, and what its script has. `early`: with the optimizer in the backward pass."""

    def __init__(self, program: dict[str, Any], early: bool, folder: str) -> None:
        self.program, self.early, self.folder = program, early, f"{folder}/{early}"
        torch.manual_seed(program["seed"])
        model = Net(program["blocks"], program["norm"], program["tied"], WIDTH)
        if program["reads"]:
            model.layers = torch.nn.ModuleList(Reads(program["norm"], WIDTH) for _ in model.layers)
        optimizer = _optimizer(program["optimizer"], model.parameters())
        several = program["optimizer"] == "Muon"
        self.each = optimizer.each if several else [optimizer]
        kind = program["schedule"]
        self.schedules = [_scheduled(kind, one) for one in self.each] if kind else []
        names = {f"layers.{n}/0" for n in range(program["blocks"])}
        here = {f"layers.{n}/0" for n in program["resident"]} & names
        here |= {"head/0"} if program["head"] else set()
        moments = "fp32" if several else program["moments"]
        own = {
            "device": program["device"],
            "loss": program["loss"],
            "checkpointing": program["recompute"],
            "moments": moments,
            "master": program["master"] or not program["half"],
            "depth": program["depth"],
            "optimizer_in_backward": early,
            "budget": {"ssd": f"{folder}:1GB"},
        }
        away = names - here if program["away"] else None
        self.engine, self.front, *_ = zero.initialize(
            model=model,
            optimizer=self.each if several else optimizer,
            config={
                "bf16": {"enabled": program["half"]},
                "zero_optimization": {"stage3_param_persistence_threshold": 0},
                "evener": own,
            },
            resident=here,
            away=away,
            machine=MACHINE,
            streaming=program["streaming"],
        )
        self.engine.threads = 1
        self.model = model
        self.saved = False
        assert all((chunk.gradient is None) == early for chunk in self.engine.chunks()), (
            "a gradient is kept"
        )

    def step(self) -> None:
        for one in self.each:
            one.step()
        for one in self.schedules:
            one.step()

    def train(self, call: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        loss = call(self.engine)
        if self.program["seed"] % 2:
            self.engine.drain()
        self.engine.backward(loss)
        norm = self.engine.norm()
        self.step()
        return torch.stack([loss.detach().float(), norm])

    def do_train(self, x: torch.Tensor, y: torch.Tensor, loss: str) -> torch.Tensor:
        return self.train(lambda net: LOSSES[loss](net(x), y))

    def do_branch(self, x: torch.Tensor, y: torch.Tensor, side: bool, skip: int) -> torch.Tensor:
        return self.train(lambda net: _ce(net(x, side, skip), y))

    def do_body(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        """A method beside forward."""
        return self.train(lambda _: self.model.body(x).float().square().mean())

    def do_nan(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """A step that is skipped."""
        self.engine.backward(_ce(self.engine(x), y) * torch.nan)
        self.step()
        return torch.tensor(self.engine.skipped_steps)

    def do_evaluate(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.engine(x).clone()

    def do_freeze(self, *given: Any) -> None:
        layer = self.model.layers[given[2] % len(self.model.layers)]
        layer.requires_grad_(not layer.down.weight.requires_grad)

    def do_between(self, x: torch.Tensor, y: torch.Tensor, what: str) -> torch.Tensor:
        """What has to wait for the step is refused, and changes nothing."""
        engine = self.engine
        loss = _ce(engine(x), y)
        engine.backward(loss)
        calls: dict[str, Callable[[], Any]] = {
            "zero_grad": self.front.zero_grad,
            "forward": lambda: engine(x),
            "evaluate": lambda: self.do_evaluate(x, y),
            "state": self.front.state_dict,
            "save": lambda: zero.save_checkpoint(engine, self.folder),
            "clip": lambda: torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1),
        }
        if self.early:
            try:
                calls[what]()
            except UsageError:
                pass
            else:
                raise AssertionError(f"{what} was not refused")
        self.step()
        return loss.detach()

    def do_save(self, *_: Any) -> None:
        zero.save_checkpoint(self.engine, self.folder)
        self.saved = True

    def do_load(self, *_: Any) -> None:
        if self.saved:
            zero.load_checkpoint(self.engine, self.folder)

    def do_evict(self, *_: Any) -> None:
        """What may leave the accelerator does."""
        self.engine.room._evict(1 << 30)

    def state(self) -> dict[str, torch.Tensor]:
        """All weights and moments."""
        self.engine.drain()
        found = {}
        for chunk in self.engine.chunks():
            end = chunk.states.weights.numel()
            found[chunk.group.name] = chunk.full().clone()
            for name in chunk.formats():
                found[f"{chunk.group.name}.{name}"] = chunk.read(name, 0, end).clone()
        return found


def _data(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, WORDS, (3, 4), generator=made) for _ in range(2))  # type: ignore[return-value]


def _equal(mine: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if mine is None or other is None:
        return mine is other
    return torch.equal(mine.nan_to_num(7.0), other.nan_to_num(7.0)) if (
        mine.is_floating_point()
    ) else torch.equal(mine, other)  # fmt: skip


@contextlib.contextmanager
def _late(seed: int) -> Iterator[None]:
    """Lanes with small slices, each of which may be late."""
    chance, update = random.Random(seed), Lanes._update

    def slow(self: Lanes, *given: Any) -> None:
        time.sleep(chance.choice([0.0, 0.0, 0.0005, 0.001]))
        update(self, *given)

    defaults = {**Lanes.__init__.__kwdefaults__, "slice_numel": SLICE}
    with (
        mock.patch.object(Lanes, "_update", slow),
        mock.patch.object(Lanes.__init__, "__kwdefaults__", defaults),
        mock.patch.object(ssd, "BLOCK", ssd.GRAIN),
        mock.patch.object(units, "LEAST", 64),
    ):
        yield


def check(program: dict[str, Any]) -> None:
    """Run it with both."""
    with tempfile.TemporaryDirectory() as folder, _late(program["seed"]):
        sides: list[Side] = []
        try:
            sides += [Side(program, early, folder) for early in (True, False)]
            for kind, seed, *given in [*program["steps"], ["train", 1, "plain"]]:
                x, y = _data(seed)
                one, other = (getattr(side, f"do_{kind}")(x, y, *given) for side in sides)
                assert _equal(one, other), f"{kind}: {one} and {other}"
            one, other = (side.state() for side in sides)
            wrong = [name for name in other if not _equal(one[name], other[name])]
            assert one.keys() == other.keys() and not wrong, f"{wrong} differ"
        finally:
            for side in sides:
                with contextlib.suppress(Exception):
                    side.engine.close()


_seeds = st.integers(0, 1000)


def _step(kind: str, *given: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.tuples(st.just(kind), _seeds, *given).map(list)


BETWEEN = ["zero_grad", "forward", "evaluate", "state", "save", "clip"]
STEPS = st.one_of(
    _step("train", st.sampled_from(sorted(LOSSES))),
    _step("train", st.sampled_from(sorted(LOSSES))),
    _step("branch", st.booleans(), st.integers(-1, 2)),
    _step("body"),
    _step("nan"),
    _step("evaluate"),
    _step("freeze", st.integers(0, 2)),
    _step("between", st.sampled_from(BETWEEN)),
    _step("save"),
    _step("load"),
    _step("evict"),
)
PROGRAMS = st.fixed_dictionaries(
    {
        "seed": _seeds,
        "blocks": st.integers(1, 6),
        "norm": st.sampled_from(["none", "layer"]),
        "tied": st.booleans(),
        "reads": st.booleans(),
        "optimizer": st.sampled_from(["AdamW", "AdamW", "SGD", "Muon"]),
        "schedule": st.sampled_from(["", "warm", "milestones", "steps"]),
        "half": st.booleans(),
        "master": st.booleans(),
        "moments": st.sampled_from(["fp32", "bf16", "int8"]),
        "loss": st.sampled_from(["plain", "fused"]),
        "recompute": st.booleans(),
        "resident": st.lists(st.integers(0, 5), max_size=3),
        "head": st.booleans(),
        "away": st.booleans(),
        "streaming": st.booleans(),
        "depth": st.integers(1, 3),
        "device": st.sampled_from(["cpu"] * 19 + ["simulated"]),
        "steps": st.lists(STEPS, min_size=1, max_size=6),
    }
)


def _put(target: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(target, name, value)


_begin, _wait, _put_jobs = InBackward.begin, InBackward.wait, Lanes.put
_home, _make = gradients.Gradients._home, Engine._make_gradients


@contextlib.contextmanager
def returned_early() -> Iterator[None]:
    """A buffer goes back when the update is begun."""

    def begin(self: InBackward, chunk: Chunk) -> None:
        buffer = chunk.gradient_buffer
        assert buffer is not None
        _begin(self, chunk)
        self.buffers.give(buffer, None)

    with (
        mock.patch.object(InBackward, "begin", begin),
        mock.patch.object(InBackward, "_given_back", lambda *_: None),
    ):
        yield


def _lost(self: Lanes, jobs: Any) -> None:
    for job in jobs:
        if job.done.__qualname__ == "InBackward._given_back" and job.chunk.index % 2:
            job.runs.clear()
    _put_jobs(self, jobs)


def _at_once(self: InBackward, chunk: Chunk) -> None:
    _wait(self, chunk)
    self._update(chunk)


def _all_given(self: InBackward, chunk: Chunk) -> None:
    chunk.given |= set(range(len(chunk.group.pieces)))
    _begin(self, chunk)


def _old(self: InBackward, *_: Any) -> None:
    self.clear()


def _before(self: Any, chunk: Chunk, share: torch.Tensor, whole: torch.Tensor) -> None:
    """What comes home is not what the gradient is later."""
    early = self._early is not None and not chunk.resident
    _home(self, chunk, torch.zeros_like(share) if early else share, whole)


def _apart(made: Any) -> Any:
    made._ends = frozenset()
    return made


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "a buffer goes back when the update is begun": returned_early,
    "the updates of some chunks are lost": _put(lanes.Lanes, "put", _lost),
    "a weight is updated before its last read": _put(InBackward, "wait", _at_once),
    "what had no gradient is updated too": _put(InBackward, "begin", _all_given),
    "weights on the accelerator stay those of the last step": _put(InBackward, "step", _old),
    "a gradient that is not finite is used": _put(InBackward, "sound", lambda *_: True),
    "a gradient is read before it is there": _put(gradients.Gradients, "_home", _before),
    "nothing is refused": partial(
        _all, *(_put(InBackward, name, _nothing) for name in ("refuse_open", "refuse_late"))
    ),
    "a tied weight is updated with a part of its gradient": _put(
        Engine, "_make_gradients", lambda self, *given: _apart(_make(self, *given))
    ),
}
ENDS = {
    # Others notice these before anything is compared.
    "a tied weight is updated with a part of its gradient": "is used again in a backward pass",
    "a gradient that is not finite is used": "the norm of all gradients is not finite",
}
TWIN = Twin("zero_in_backward", PROGRAMS, check, FAULTS, ENDS, programs_per_round=80)
