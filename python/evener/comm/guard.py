"""The accuracy guard: does what is sent still point where the gradients point?

Every `EVENER_GUARD_STEPS` steps each compressed bucket is reduced twice, compressed and dense, and
two figures come out, over all ranks:

- `cosine` of the compressed result against the dense one of the same step;
- `residual_ratio`: the norm of what is not sent yet over that of the gradient.

A bucket past its limits (the form's own, or EVENER_GUARD_COSINE and EVENER_GUARD_RESIDUAL) falls
back to the form's milder one from the next step on, on all ranks, with a line in the log; a
residual goes over into the milder form, or into the next exact gradient. Nothing goes back up by
itself. A step with figures that are not finite (an overflow, which a loss scaler skips) is not
judged.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from evener.comm.exchange import Exchange
from evener.comm.groups import Communicators
from evener.comm.options import Options
from evener.comm.wires import Limits

logger = logging.getLogger("evener.comm")


@dataclass(frozen=True)
class Verdict:
    """Of one bucket in one checked step. `falls_to`: the milder form, "" where it stays."""

    step: int
    bucket: int
    title: str
    form: str
    residual_ratio: float
    cosine: float
    falls_to: str = ""


def limits(options: Options, form: Limits) -> Limits:
    """The form's own, where the user gave none."""
    return Limits(
        options.guard_residual if options.guard_residual > 0 else form.residual,
        options.guard_cosine if options.guard_cosine > -1 else form.cosine,
    )


def judge(
    exchanges: Sequence[Exchange], step: int, options: Options, communicators: Communicators
) -> list[Verdict]:
    """One verdict a measured bucket, the same on all ranks. Collective; makes the host wait."""
    measured = [exchange for exchange in exchanges if exchange.measured is not None]
    if not measured:
        return []
    sums = torch.stack([e.measured.cpu() for e in measured if e.measured is not None])
    dist.all_reduce(sums, group=communicators.control.handle)
    verdicts = []
    for exchange, row in zip(measured, sums.tolist(), strict=True):
        exchange.measured = None
        product, result, dense, residual, gradient = row
        ratio = math.sqrt(residual / gradient) if gradient > 0 else 0.0
        cosine = product / math.sqrt(result * dense) if result > 0 and dense > 0 else 1.0
        bound = limits(options, exchange.wire.limits)
        bad = not (ratio <= bound.residual and cosine >= bound.cosine)
        finite = all(map(math.isfinite, row))
        verdicts.append(
            Verdict(
                step,
                exchange.bucket.index,
                exchange.title,
                exchange.wire.name,
                ratio,
                cosine,
                exchange.wire.milder if bad and finite else "",
            )
        )
        if bad and finite and communicators.rank == 0:
            logger.warning(
                "step %d: %s falls back from %s to %s: residual %.3g of the gradient (limit %.3g), "
                "cosine against dense %.3g (limit %.3g)",
                step,
                exchange.title,
                exchange.wire.name,
                exchange.wire.milder,
                ratio,
                bound.residual,
                cosine,
                bound.cosine,
            )
    return verdicts
