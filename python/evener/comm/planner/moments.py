"""What an optimizer's moments say about sparse forms."""

from __future__ import annotations

import logging

import torch

from evener.comm import wires
from evener.comm.planner.live import Planner
from evener.comm.reducer import Reducer

logger = logging.getLogger("evener.comm")


def look_at_moments(
    reducer: Reducer, optimizer: torch.optim.Optimizer | None, planner: Planner | None
) -> None:
    """What comes late is not for Adam's kin: no planner chooses it, and who forces it is told.

    Their second moments see a gradient that comes rarely and then at once; what that cost is in
    docs/benchmarks/accuracy.md. The guard is told too, which has stricter limits for
    them; where no optimizer was given, it looks for one while such a form may be sent.
    """
    if optimizer is not None:
        reducer.optimizers.given(optimizer)
    elif any(wires.get(form).strict for form in (reducer.options.wire, reducer.options.floor)):
        reducer.optimizers.watch()
    if optimizer is None or not any("betas" in group for group in optimizer.param_groups):
        return
    first, kind = reducer.communicators.rank == 0, type(optimizer).__name__
    if planner is not None and planner.forced is None:
        dense = tuple(form for form in planner.forms if not wires.get(form).late)
        if first and dense != planner.forms:
            logger.info(
                "floor=%s: no form below %s is planned, because %s loses accuracy by forms that "
                "send a gradient late (docs/benchmarks/accuracy.md); mode=%r forces it",
                planner.forms[-1],
                dense[-1],
                kind,
                planner.forms[-1],
            )
        planner.forms = dense
    elif first and wires.get(reducer.options.wire).late:
        logger.warning(
            "%s under %s: in our tests that cost accuracy (docs/benchmarks/accuracy.md), which "
            "INT8 did not; mode='int8' is a quarter of the bytes, and what the guard falls back to "
            "past its limits",
            reducer.options.wire,
            kind,
        )
