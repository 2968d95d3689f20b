"""The accuracy guard: does what is sent still point where the gradients point?

Every `EVENER_GUARD_STEPS` steps, and some before (`due`), each compressed bucket is reduced twice,
compressed and dense, and two figures come out, over all ranks:

- `cosine` of the compressed result against the dense one of the same step, of the whole bucket,
  and for forms of little range of each parameter by itself: a layer of small gradients does not
  show beside one of large ones;
- `residual_ratio`: the norm of what is not sent yet over that of the gradient.

A bucket past its limits (the form's own, or EVENER_GUARD_COSINE and EVENER_GUARD_RESIDUAL) falls
back to the form's milder one from the next step on, on all ranks, with a line in the log; a
residual goes over into the milder form, or into the next exact gradient. Nothing goes back up by
itself. A form of which nothing came although there was something to send falls back whatever its
limits. A step with gradients that are not finite (an overflow, which a loss scaler skips) is not
judged; one in which only the form has overflowed is.

Limits depend on the optimizer. Error feedback makes a gradient late, not wrong, so whatever is
linear in the gradients (SGD, with momentum too) gets the same sum in the end. Adam and its kin
divide by what they saw of the gradient's size: what comes rarely and then at once moves a parameter
by about as much as one ordinary gradient would have (Tang et al., 1-bit Adam, arXiv 2102.02888, on
why error feedback needs linearity). There forms may name stricter limits, which hold too where the
optimizer is not known (`Optimizers`). What was measured: docs/benchmarks/accuracy.md, "The guard's
limits".
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from evener.comm.exchange import Exchange
from evener.comm.groups import Communicators
from evener.comm.options import Options
from evener.comm.wires import Limits, Wire

logger = logging.getLogger("evener.comm")

# What goes wrong does so early: a form that is past its limits from the start has cost few steps
# by the sixth, and leaves a small residual to the milder one, which sends it at once; after 25
# steps of top-k 1% it was 17 gradients (docs/benchmarks/accuracy.md). Not earlier, because a second
# reduction would disturb the steps that are profiled and the first that a planner holds against
# its plan.
_FIRST = 6
# Parts of EVENER_GUARD_STEPS after which is looked too while strict limits hold for a form that is
# in use: its ratio may still be on its way down (`EVENER_TOPK_WARMUP`).
_EARLY = (8, 2)


@dataclass(frozen=True)
class Figures:
    """Figures of one bucket in one checked step, over all ranks.

    `gain`: of the squared norm, what the optimizer gets over the dense gradient's. `least_cosine`:
    of the parameters by themselves the least. `finite`: whether the gradients are.
    """

    residual_ratio: float
    cosine: float
    least_cosine: float
    gain: float
    finite: bool

    @classmethod
    def of(cls, sums: Sequence[float]) -> Figures:
        """`sums`: `Exchange.measured`, added up over the ranks."""
        residual, gradient, *rest = sums
        each = list(zip(rest[0::3], rest[1::3], rest[2::3], strict=True))
        product, result, dense = (math.fsum(of) for of in zip(*each, strict=True))
        finite = all(map(math.isfinite, (gradient, dense)))
        if not finite:
            return cls(math.nan, math.nan, math.nan, math.nan, finite)
        return cls(
            math.sqrt(residual / gradient) if gradient > 0 else 0.0,
            _cosine(product, result, dense),
            min(_cosine(*one) for one in each),
            result / dense if dense > 0 else 1.0,
            finite,
        )

    def past(self, limits: Limits) -> bool:
        """Whether the form has to go."""
        within = (
            self.residual_ratio <= limits.residual
            and self.cosine >= limits.cosine
            and self.least_cosine >= limits.each
            and self.gain > 0  # something came
        )
        return self.finite and not within

    def beside(self, limits: Limits) -> str:
        """In words, for a form that has to go."""
        return (
            f"residual {self.residual_ratio:.3g} of the gradient (limit {limits.residual:.3g}), "
            f"cosine against dense {self.cosine:.3g} (limit {limits.cosine:.3g}), of one parameter "
            f"{self.least_cosine:.3g} (limit {limits.each:.3g})"
        )


def _cosine(product: float, result: float, dense: float) -> float:
    """1 where there was nothing to send; 0 where nothing came of it, or what is not finite."""
    if dense <= 0:
        return 1.0
    if not (math.isfinite(result) and math.isfinite(product)) or result <= 0:
        return 0.0
    return product / math.sqrt(result) / math.sqrt(dense)


@dataclass(frozen=True)
class Verdict:
    """The verdict on a bucket in a checked step. `falls_to`: the milder form, "" where it stays."""

    step: int
    bucket: int
    title: str
    form: str
    residual_ratio: float
    cosine: float
    falls_to: str = ""


def due(step: int, every: int, strict: bool = False) -> bool:
    """Whether `step`, from 1, is checked: every `every`-th, and the sixth, if that is before them.

    `strict`: and some more, as `Optimizers.strict` says.
    """
    if every <= 0 or step % every == 0:
        return every > 0
    early = [_FIRST, *(every // part for part in _EARLY if strict)]
    return 1 < step < every and step in early


def limits(options: Options, form: Wire | type[Wire], linear: bool) -> Limits:
    """The form's own, where the user gave none. `linear`: the optimizer's updates are."""
    own = form.limits if linear or form.strict is None else form.strict
    return Limits(
        options.guard_residual if options.guard_residual > 0 else own.residual,
        options.guard_cosine if options.guard_cosine > -1 else own.cosine,
        own.each,
    )


def is_linear(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its updates are linear in the gradients: SGD's, and what a door has made of one."""
    return isinstance(optimizer, torch.optim.SGD)


class Optimizers:
    """Which optimizers step `parameters`: those that a front door was given, or that were seen."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._found: dict[str, bool] = {}
        self._hook: RemovableHandle | None = None
        # Whether the last check judged a form by strict limits and left it: equal on all ranks.
        self.strict = False

    def given(self, optimizer: torch.optim.Optimizer) -> None:
        """This one steps them."""
        self._found[type(optimizer).__name__] = is_linear(optimizer)

    def watch(self) -> None:
        """See which do so from now on; a hook of torch's on every optimizer, until the first check.

        It only looks, so that steps with it can be deferred (`overlap.optimizers`).
        """
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(self._steps)

    def _steps(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        groups = optimizer.param_groups
        if any(id(p) in self._parameters for group in groups for p in group["params"]):
            self.given(optimizer)

    _steps.evener_observes = True  # type: ignore[attr-defined]

    def settle(self) -> None:
        """Look no longer. May be called twice."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @property
    def known(self) -> bool:
        """Whether there is one at all."""
        return bool(self._found)

    @property
    def linear(self) -> bool:
        """Whether all that are known are linear, and there is one."""
        return self.known and all(self._found.values())

    def __str__(self) -> str:
        return " and ".join(self._found) or "an optimizer that was not seen"


def judge(
    exchanges: Sequence[Exchange],
    step: int,
    options: Options,
    communicators: Communicators,
    optimizers: Optimizers,
) -> list[Verdict]:
    """One verdict a measured bucket, the same on all ranks. Collective; makes the host wait."""
    measured = [exchange for exchange in exchanges if exchange.measured is not None]
    if not measured:
        return []
    if optimizers.known:
        optimizers.settle()
    other = torch.tensor([0.0 if optimizers.linear else 1.0], dtype=torch.float64)
    rows = [e.measured.cpu() for e in measured if e.measured is not None]
    sums = torch.cat([other, *rows])
    dist.all_reduce(sums, group=communicators.control.handle)
    nonlinear = bool(sums[0] > 0)
    each = sums[1:].split([len(row) for row in rows])
    verdicts = []
    optimizers.strict = False
    for exchange, row in zip(measured, each, strict=True):
        exchange.measured = None
        wire, figures = exchange.wire, Figures.of(row.tolist())
        bound = limits(options, wire, linear=not nonlinear)
        falls = figures.past(bound)
        optimizers.strict |= wire.strict is not None and nonlinear and not falls
        verdicts.append(
            Verdict(
                step,
                exchange.bucket.index,
                exchange.title,
                wire.name,
                figures.residual_ratio,
                figures.cosine,
                wire.milder if falls else "",
            )
        )
        if falls and communicators.rank == 0:
            logger.warning(
                "step %d: %s falls back from %s to %s: %s%s",
                step,
                exchange.title,
                wire.name,
                wire.milder,
                figures.beside(bound),
                _why(wire, optimizers) if nonlinear else "",
            )
    return verdicts


def _why(wire: Wire, optimizers: Optimizers) -> str:
    if wire.strict is None:
        return ""
    who = "another rank's optimizer" if optimizers.linear else str(optimizers)
    return (
        f"; {wire.name}'s limits under {who}, not being linear in the gradients as SGD is: "
        "EVENER_GUARD_RESIDUAL gives others (docs/reference/forms.md)"
    )
