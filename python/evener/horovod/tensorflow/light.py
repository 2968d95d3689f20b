"""The LIGHT_* variables in a TensorFlow process: what the engine is told, and for which tensors.

The work is done natively (`crates/collectives/src/light.rs`). Two levels are for every sum of all
ranks. Top-k is for gradients alone, those of a tape or an optimizer: what a program reduces itself,
a metric say, arrives whole. So a gradient has a *mark*, a number that says which one it is: what
was not sent waits for the next step under it.

The guard is native too. Its limit depends on the optimizer, as in torch (`evener.comm.guard`), and
a tape does not know who uses its gradients: then all optimizers of the process are looked at.

A variable that has a meaning for torch alone is named once, in one line.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from evener.base import settings
from evener.base.log import info0, logger, once
from evener.comm.world import meeting, topology
from evener.horovod.common.reductions import Average, Sum
from evener.horovod.tensorflow._library import call
from evener.horovod.tensorflow.compression import Compression

_SERVED = (
    settings.LIGHT_2D_ALLREDUCE,
    settings.LIGHT_INTRA_SIZE,
    settings.LIGHT_HIERARCHICAL_THRESHOLD,
    settings.LIGHT_TOPK_ALLREDUCE,
    settings.LIGHT_TOPK_RATIO,
    settings.LIGHT_TOPK_THRESHOLD,
    settings.LIGHT_TOPK_FP16,
    settings.EVENER_TOPK_WARMUP,
    settings.EVENER_GUARD_STEPS,
    settings.EVENER_GUARD_RESIDUAL,
)
_FOR_TORCH = (
    settings.EVENER_PARTITION_BYTES,
    settings.EVENER_ROWS_THRESHOLD,
    settings.EVENER_TRIAL_STEPS,
    settings.EVENER_GUARD_COSINE,
    settings.EVENER_OUTER,
    settings.HOROVOD_AUTOTUNE,
)
# The kernels and the negotiation know a mark as an unsigned 32-bit number; the lowest bit says that
# values are sent as float16.
_MARKS: dict[tuple[str, ...], int] = {}
_NAMES: dict[int, str] = {}
_JUDGED: set[int] = set()  # marks of which this engine knows what it is to know
_NUMBERS = itertools.count(1)
_looked: tuple[float, bool] | None = None  # when, and `_all_linear`
# The torch door's limits for top-k (`evener.comm.wires.topk`, which would import torch).
_LINEAR, _STRICT = 100.0, 0.25
# Classes whose updates are linear in the gradients: of Keras 3, Keras 2 and TensorFlow 1.
_LINEAR_CLASSES = {"SGD", "GradientDescentOptimizer", "MomentumOptimizer"}
_OPTIMIZERS = {"BaseOptimizer", "Optimizer", "OptimizerV2"}


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
    _JUDGED.clear()
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
            "top-k on: %g%% of the entries of gradients of at least %d bytes%s",
            100 * mine["LIGHT_TOPK_RATIO"],
            mine["LIGHT_TOPK_THRESHOLD"],
            ", as FP16" if mine["LIGHT_TOPK_FP16"] else "",
        )
    own = mine["EVENER_GUARD_RESIDUAL"]
    return {
        "inner": list(levels.inner),
        "outer": list(levels.outer),
        "sizes": list(levels.sizes),
        "two_level_max": mine["LIGHT_HIERARCHICAL_THRESHOLD"],
        "topk": {
            "ratio": mine["LIGHT_TOPK_RATIO"],
            "least": mine["LIGHT_TOPK_THRESHOLD"],
            "halves": mine["LIGHT_TOPK_FP16"],
            "warmup": mine["EVENER_TOPK_WARMUP"],
            "guard_steps": mine["EVENER_GUARD_STEPS"],
            "guard_linear": own or _LINEAR,
            "guard_strict": own or _STRICT,
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
        once(f"not used with TensorFlow: {', '.join(others)}")


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def marked(
    variables: Sequence[Any],
    compression: Any,
    op: int,
    everywhere: bool,
    linear: bool | None = None,
) -> tuple[int, Any]:
    """The mark of the gradients of these variables, which are reduced as one, 0 for none; and how

    they are compressed then. everywhere: they are reduced over all ranks. linear: whether who uses
    them is linear in them, None where it is not known.
    """
    if not settings.LIGHT_TOPK_ALLREDUCE.get():
        return 0, compression
    if op not in (Average, Sum) or not everywhere:
        what = "a process set" if op in (Average, Sum) else "Adasum"
        once(f"LIGHT_TOPK_ALLREDUCE does not apply to {what}: these gradients are sent whole")
        return 0, compression
    half = compression is Compression.fp16
    if half:
        once("LIGHT_TOPK_ALLREDUCE with Compression.fp16: top-k sends its values as FP16")
    elif compression is not Compression.none:
        name = getattr(compression, "__name__", str(compression))
        once(f"LIGHT_TOPK_ALLREDUCE does not apply with {name}: these gradients are sent whole")
        return 0, compression
    names = tuple(_identity(variable) for variable in variables)
    if names not in _MARKS:
        _MARKS[names] = next(_NUMBERS)
        logger.debug("gradient %d: %s", _MARKS[names], ", ".join(names[:4]))
    mark = 2 * _MARKS[names] + half
    _NAMES[mark] = ", ".join(
        str(getattr(each, "path", None) or getattr(each, "name", "?")) for each in variables[:3]
    )
    if mark not in _JUDGED:
        _JUDGED.add(mark)
        if _all_linear() if linear is None else linear:
            call("linear", mark=mark)
    return mark, Compression.none


def is_linear(optimizer: Any) -> bool:
    """Whether an optimizer's updates are linear in the gradients, as far as its class tells."""
    return bool(_LINEAR_CLASSES.intersection(_classes(type(optimizer))))


def _all_linear() -> bool:
    """Whether all optimizers of this process are linear, and there is one."""
    global _looked
    if _looked is None or time.monotonic() - _looked[0] > 1:
        kinds = _optimizer_classes()
        linear = all(_LINEAR_CLASSES.intersection(_classes(kind)) for kind in kinds)
        _looked = (time.monotonic(), bool(kinds) and linear)
    return _looked[1]


def _optimizer_classes() -> set[type]:
    kinds = {type(each) for each in gc.get_objects()}
    return {kind for kind in kinds if _OPTIMIZERS.intersection(_classes(kind))}


def _classes(kind: type) -> list[str]:
    known = ("keras", "tf_keras", "tensorflow")
    found = [each for each in kind.__mro__ if str(each.__module__).partition(".")[0] in known]
    return [each.__name__ for each in found]


def fell(mark: int, step: int, ratio: float, limit: float) -> str:
    """The line for a gradient that goes whole from now on."""
    return (
        f"step {step}: the gradient of {_NAMES.get(mark, mark)} falls back from top-k to exact: "
        f"residual {ratio:.3g} of the gradient (limit {limit:.3g}"
        + ("" if limit >= _LINEAR else ", for optimizers that are not linear in the gradients")
        + "); EVENER_GUARD_RESIDUAL gives another limit"
    )


def _identity(variable: Any) -> str:
    """A text that no other variable of this process has."""
    return str(getattr(variable, "_unique_id", None) or f"{id(variable)}")
