"""The memory engine in bfloat16 against plain torch: weights with an exact copy, or rounded
stochastically without one (`master: false`), and moments of four, two or one bytes, which the
cores, the accelerator and the streaming lane update.

Gradients of bfloat16 differ by a few last bits where sums are made in another order, and then each
weight that is rounded could fall on the other side. So losses and gradients are compared within a
bound (`NEAR`), and the plain optimizer then takes the engine's gradients. From these, weights and
moments come out the same: to the rounding of a float32 (`SAME`), but for one element in 50 that
such a rounding lets fall on the other side.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import nn

from evener.base.optimizers import Run
from evener.zero import states, units
from evener.zero.rules import SGD, AdamW, Rule
from evener.zero.states import States
from evener.zero.updates import Updates
from tests.twins import _moments
from tests.twins import zero as one
from tests.twins.harness import Twin

NEAR: dict[str, Any] = {"rtol": 0.05, "atol": 0.03, "equal_nan": True}
SAME: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
BIT = {"rtol": 1 / 64, "atol": 1e-3}
"""What a weight of bfloat16 may be apart that fell on the other side, perhaps some steps ago when
it was larger."""


class Pair(one.Pair):
    """Evener's model in bfloat16, and torch's. `exact`: what the plain optimizer steps: float32."""

    near = NEAR

    @property
    def master(self) -> bool:
        found: bool = self.program["master"]
        return found

    def _copy(self, model: one.Net) -> None:
        super()._copy(model)
        self.exact = {
            name: nn.Parameter(p.detach() if self.master else p.detach().bfloat16().float())
            for name, p in self.plain.named_parameters()
        }
        self.plain.bfloat16()
        self._show()

    @torch.no_grad()
    def _show(self) -> None:
        """The plain model computes with the upper half, or with the whole weight."""
        for name, parameter in self.plain.named_parameters():
            parameter.copy_(_moments.half(self.exact[name]) if self.master else self.exact[name])

    def _trained(self) -> dict[str, nn.Parameter]:
        return self.exact

    def _plain_optimizer(self) -> None:
        self.plain_optimizer = one._optimizer(self.program["optimizer"], self.exact.values())
        self.plain_scheduler = self._schedule(self.plain_optimizer)
        _moments.coarse(
            self.plain_optimizer,
            self.exact,
            lambda: self.engine,
            moments=self.program["moments"],
            master=self.master,
        )

    def _config(self) -> dict[str, Any]:
        found = super()._config()
        found["evener"]["master"] = self.master
        return {**found, "bf16": {"enabled": True}}

    def _start(self, model: one.Net) -> None:
        super()._start(model)
        self.engine._lanes._slice = states.BLOCK  # more than one slice of a chunk

    def train(self, call: Callable[[Any, one.Net], torch.Tensor]) -> None:
        accumulate, clip = self.program["accumulate"], self.program["clip"]
        self.taken: dict[str, torch.Tensor] = {}
        with mock.patch.object(Updates, "begin", self._taking(Updates.begin)):
            for _ in range(accumulate):
                mine, theirs = self.both(call)
                self.engine.backward(mine)
                self.engine.step()
                (theirs / accumulate).backward()
        for name, parameter in self.plain.named_parameters():
            if name in self.exact:
                given = parameter.grad
                self.exact[name].grad = None if given is None else given.float()
        if clip:
            torch.nn.utils.clip_grad_norm_(self.exact.values(), clip)
        theirs_by_name = {n: p.grad for n, p in self.exact.items() if p.grad is not None}
        assert self.taken.keys() == theirs_by_name.keys()
        for name, gradient in theirs_by_name.items():
            torch.testing.assert_close(self.taken[name], gradient, **self.near)
            self.exact[name].grad = self.taken[name]
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()
        self.plain.zero_grad()
        self._show()
        if self.plain_scheduler is not None:
            self.plain_scheduler.step()

    def _taking(self, begin: Callable[..., None]) -> Callable[..., None]:
        """Keep the gradients that an update takes."""

        def taking(updates: Updates, chunks: Any, moving: Any, groups: Any, scale: float) -> None:
            self.engine.device.synchronize()
            for chunk, places in zip(chunks, moving, strict=True):
                for place in places:
                    piece = chunk.group.pieces[place]
                    flat = chunk.gradient[piece.offset : piece.offset + piece.numel]
                    self.taken[piece.name] = (flat.float() * scale).view(piece.shape).to(one.PLACE)
            begin(updates, chunks, moving, groups, scale)

        return taking

    def run(self, step: list[Any]) -> None:
        super().run(step)
        self.plain.zero_grad()  # the plain optimizer knows of none of these

    def compare(self) -> None:
        found = self.model.state_dict()
        names = {id(parameter): name for name, parameter in self.plain.named_parameters()}
        theirs = {
            name: self.exact[names[id(parameter)]].detach().cpu()
            for name, parameter in self.plain.named_parameters(remove_duplicate=False)
        }
        mine = {name: value.float().cpu() for name, value in found.items()}
        codes = self.program["moments"] == "int8"
        _moments.close(mine, theirs, _moments.FAR if codes or self.master else BIT, **SAME)
        self.compare_moments(**SAME)

    def _kept(self) -> Any:
        return super()._kept(), {name: p.detach() for name, p in self.exact.items()}

    def _back(self, saved: Any) -> None:
        rest, exact = saved
        super()._back(rest)
        with torch.no_grad():
            for name, value in exact.items():
                self.exact[name].copy_(value)
        self._show()


def check(program: dict[str, Any]) -> None:
    """Run it with both."""
    small = mock.patch.object(units, "LEAST", _moments.LEAST)
    with tempfile.TemporaryDirectory() as folder, small:
        pair = Pair(program, folder)
        try:
            for step in program["steps"]:
                pair.run(step)
            for seed in (1, 2):
                pair.do_train(*pair.data(seed), "plain")
            pair.compare()
        finally:
            pair.close()


PROGRAMS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 1000),
        "blocks": st.integers(1, 3),
        "norm": st.sampled_from(["none", "layer"]),
        "tied": st.booleans(),
        "optimizer": st.sampled_from(["SGD", "AdamW"]),
        "schedule": st.sampled_from(["", "warm", "milestones", "steps"]),
        "moments": st.sampled_from(["fp32", "bf16", "int8"]),
        "master": st.sampled_from([True, False, False]),
        "streaming": st.booleans(),
        "accumulate": st.integers(1, 2),
        "clip": st.sampled_from([0.0, 0.5]),
        "recompute": st.booleans(),
        "resident": st.integers(0, 2),
        "steps": st.lists(one.STEPS, min_size=1, max_size=7),
    }
)


@contextlib.contextmanager
def _by_formula(*faults: AbstractContextManager[Any]) -> Iterator[None]:
    """The cores compute by torch operations, where faults can be put in."""
    with contextlib.ExitStack() as stack:
        for rule in (AdamW, SGD):
            stack.enter_context(mock.patch.object(rule, "on_host", Rule.on_host))
        for fault in faults:
            stack.enter_context(fault)
        yield


def _in_formula(target: Any, name: str, value: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: _by_formula(mock.patch.object(target, name, value))


@contextlib.contextmanager
def _cores_draw(change: Callable[[Run], Run]) -> Iterator[None]:
    """The fused kernels get other bits."""
    with contextlib.ExitStack() as stack:
        for rule in (AdamW, SGD):

            def on_host(
                self: Rule, found: States, gradient: Any, hyper: Any, step: int, scale: float,
                run: Run, kernel: Any = rule.on_host,
            ) -> None:  # fmt: skip
                kernel(self, found, gradient, hyper, step, scale, change(run))

            stack.enter_context(mock.patch.object(rule, "on_host", on_host))
        yield


def _neighbours(moment: Any, place: str) -> torch.Tensor:
    """The moments of the block before."""
    found = _unpacked(moment, place)
    return found.view(-1, states.BLOCK).roll(1, 0).view(-1) if isinstance(moment, tuple) else found


def _other_scale(moment: Any, place: str) -> torch.Tensor:
    """Codes by the scale of the block before."""
    if not isinstance(moment, tuple):
        return _unpacked(moment, place)
    return states.decode(place, moment[0], moment[1].roll(1))


_unpacked, _bits, _key = states.unpacked, states.random_bits, states.random_key
FAULTS = {
    "rounding is to the nearest": _in_formula(
        states, "_rounded", lambda x, _: x.to(torch.bfloat16)
    ),
    "weights are rounded by the bits of the moments": _in_formula(states, "_mix_all", lambda x: x),
    "each step draws the same bits": _in_formula(
        states, "random_key", lambda seed, _step, stream: _key(seed, 1, stream)
    ),
    "each slice draws the same bits": _in_formula(
        states, "random_bits", lambda numel, key, _, device: _bits(numel, key, 0, device)
    ),
    "moments are those of the block before": _in_formula(states, "unpacked", _neighbours),
    "moments have the scale of the block before": _in_formula(states, "unpacked", _other_scale),
    "there is no lower half": _in_formula(States, "full", lambda self: self.weights.float()),
    "the cores draw other bits": lambda: _cores_draw(
        lambda run: Run(run.threads, run.instructions, run.seed + 1, run.stream, run.offset)
    ),
    "the cores draw the bits of the first slice": lambda: _cores_draw(
        lambda run: Run(run.threads, run.instructions, run.seed, run.stream, 0)
    ),
}
TWIN = Twin("zero_half", PROGRAMS, check, FAULTS, programs_per_round=150)
