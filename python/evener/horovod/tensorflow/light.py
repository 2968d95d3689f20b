"""The LIGHT_* variables in a TensorFlow process: what the engine is told, and for which tensors.

The work is done natively (`crates/collectives/src/light.rs`). Two levels are for every sum of all
ranks. Top-k is for gradients alone, those of a tape or an optimizer: what a program reduces itself,
a metric say, arrives whole. So a gradient has a *mark*, a number that says which one it is: what
was not sent waits for the next step under it.

A variable that has a meaning for torch alone is named once, in one line.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from evener import settings
from evener.comm.world import meeting, topology
from evener.horovod.common.reductions import Average, Sum
from evener.horovod.tensorflow.compression import Compression
from evener.log import info0, logger

_SERVED = (
    settings.LIGHT_2D_ALLREDUCE,
    settings.LIGHT_INTRA_SIZE,
    settings.LIGHT_HIERARCHICAL_THRESHOLD,
    settings.LIGHT_TOPK_ALLREDUCE,
    settings.LIGHT_TOPK_RATIO,
    settings.LIGHT_TOPK_THRESHOLD,
    settings.LIGHT_TOPK_FP16,
    settings.EVENER_TOPK_WARMUP,
)
_FOR_TORCH = (
    settings.EVENER_PARTITION_BYTES,
    settings.EVENER_ROWS_THRESHOLD,
    settings.EVENER_TRIAL_STEPS,
    settings.EVENER_GUARD_STEPS,
    settings.EVENER_GUARD_RESIDUAL,
    settings.EVENER_GUARD_COSINE,
    settings.EVENER_OUTER,
    settings.HOROVOD_AUTOTUNE,
)
# The kernels and the negotiation know a mark as an unsigned 32-bit number; the lowest bit says that
# values are sent as float16.
_MARKS: dict[tuple[str, ...], int] = {}
_NUMBERS = itertools.count(1)
_TOLD: set[str] = set()


def said() -> dict[str, Any]:
    """What must be the same on all ranks, for the meeting; and this rank's host."""
    return {
        "host": topology.host_identity(),
        "light": {setting.name: setting.get() for setting in _SERVED},
    }


def plan(rank: int, told: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What the engine gets, from what all ranks have `said`; None where nothing was asked for.

    Raises RendezvousError where the ranks do not have the same settings.
    """
    mine = told[rank]["light"]
    for other, each in enumerate(told):
        for name, value in each["light"].items():
            if value != told[0]["light"][name]:
                raise meeting.RendezvousError(
                    f"{name} is {told[0]['light'][name]} on rank 0 and {value} on rank {other}",
                    f"give all ranks the same: evener launch -x {name}={value}",
                )
    two_level, topk = settings.LIGHT_2D_ALLREDUCE.get(), settings.LIGHT_TOPK_ALLREDUCE.get()
    _name_others()
    if not two_level and not topk:
        return None
    levels = topology.levels(
        rank,
        [each["host"] for each in told],
        "2d" if two_level else "flat",
        settings.LIGHT_INTRA_SIZE.get(),
    )
    if two_level:
        info0("2-D all-reduce %s: %s", "on" if levels.two_level else "off", levels.reason)
    if topk:
        info0(
            "top-k on: %g%% of the entries of gradients of at least %d bytes%s, without a guard",
            100 * mine["LIGHT_TOPK_RATIO"],
            mine["LIGHT_TOPK_THRESHOLD"],
            ", as FP16" if mine["LIGHT_TOPK_FP16"] else "",
        )
    return {
        "inner": list(levels.inner),
        "outer": list(levels.outer),
        "two_level_max": mine["LIGHT_HIERARCHICAL_THRESHOLD"],
        "topk": {
            "ratio": mine["LIGHT_TOPK_RATIO"],
            "least": mine["LIGHT_TOPK_THRESHOLD"],
            "halves": mine["LIGHT_TOPK_FP16"],
            "warmup": mine["EVENER_TOPK_WARMUP"],
        }
        if topk
        else None,
    }


def _name_others() -> None:
    """Say which variables are set that have a meaning for torch alone."""
    others = [
        setting.name
        for setting in _FOR_TORCH
        if setting.is_set() and setting.get() != setting.default
    ]
    if others:
        _once(f"not used with TensorFlow: {', '.join(others)}")


def _once(text: str) -> None:
    if text not in _TOLD:
        _TOLD.add(text)
        info0("%s", text)


def marked(
    variables: Sequence[Any], compression: Any, op: int, everywhere: bool
) -> tuple[int, Any]:
    """The mark of the gradients of these variables, which are reduced as one, 0 for none; and how

    they are compressed then. everywhere: they are reduced over all ranks.
    """
    if not settings.LIGHT_TOPK_ALLREDUCE.get():
        return 0, compression
    if op not in (Average, Sum) or not everywhere:
        what = "a process set" if op in (Average, Sum) else "Adasum"
        _once(f"LIGHT_TOPK_ALLREDUCE does not apply to {what}: these gradients are sent whole")
        return 0, compression
    half = compression is Compression.fp16
    if half:
        _once("LIGHT_TOPK_ALLREDUCE with Compression.fp16: top-k sends its values as FP16")
    elif compression is not Compression.none:
        name = getattr(compression, "__name__", str(compression))
        _once(f"LIGHT_TOPK_ALLREDUCE does not apply with {name}: these gradients are sent whole")
        return 0, compression
    names = tuple(_identity(variable) for variable in variables)
    if names not in _MARKS:
        _MARKS[names] = next(_NUMBERS)
        logger.debug("gradient %d: %s", _MARKS[names], ", ".join(names[:4]))
    return 2 * _MARKS[names] + half, Compression.none


def _identity(variable: Any) -> str:
    """A text that no other variable of this process has."""
    return str(getattr(variable, "_unique_id", None) or f"{id(variable)}")
