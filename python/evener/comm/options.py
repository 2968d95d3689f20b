"""What a reduction may do: algorithm, form, sizes.

The default is lossless. Whatever changes the arithmetic is asked for, by an argument or by
LightCC's variables (`evener.base.settings`). A LIGHT_* variable that is set wins over the argument:
a job can be changed without touching its script, and the log says so.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from evener.base import settings
from evener.base.log import info0, say_idle
from evener.comm import forms
from evener.comm.world.topology import Algorithm
from evener.errors import UsageError

logger = logging.getLogger("evener.comm")

_TOPK = (
    settings.LIGHT_TOPK_RATIO,
    settings.LIGHT_TOPK_THRESHOLD,
    settings.LIGHT_TOPK_FP16,
    settings.EVENER_TOPK_WARMUP,
)


@dataclass(frozen=True)
class Options:
    """One consistent set of choices; equal on all ranks, which is checked when they meet.

    `algorithm`: "2d" reduces inside the node first, "flat" does not, "auto" takes "2d" where there
    are several nodes with several ranks each. `wire`: the form in which data crosses between nodes,
    one of `evener.comm.wires.names()`; `floor`: the least exact one that a planner may choose.
    `ratio`: share of entries that top-k sends, reached within `warmup_steps`. `momentum`: applied
    by the reducer, not the optimizer; top-k then applies it before it selects. `guard_steps`: steps
    between two checks of the accuracy guard, 0 for none; `guard_residual` 0 and `guard_cosine` -1
    stand for each form's own limits. Sizes are bytes; `bucket_bytes` 0 means one bucket a tensor.
    A tensor of more than `partition_bytes` goes in parts; 0: in one.
    An embedding of at least `rows_bytes` is exchanged by rows (`evener.comm.parts`); 0: none is.
    `average`: divide by the world size. `predivide`: gradients are divided by it before they are
    summed, and the sum by world size / predivide (both only where `average`). `outer`: what carries
    the exchange between nodes (`evener.comm.transport`). `timeout`: seconds that a rank waits for
    its peers; 0: as long as the process group would.
    """

    algorithm: Algorithm = "auto"
    wire: str = "exact"
    floor: str = "exact"
    ratio: float = 0.01
    warmup_steps: int = 0
    momentum: float = 0.0
    guard_steps: int = 200
    guard_residual: float = 0.0
    guard_cosine: float = -1.0
    topk_min_bytes: int = 1 << 20
    topk_fp16: bool = False
    two_level_max_bytes: int = 1 << 30
    intra_size: int = 8
    bucket_bytes: int = 25 << 20
    partition_bytes: int = 0
    rows_bytes: int = 0
    average: bool = True
    predivide: float = 1.0
    timeout: float = 0.0
    outer: str = "auto"
    every: int = 0
    overlap: int = 0
    auto: bool = False
    outer_lr: float = 0.0
    outer_momentum: float = 0.0

    def __post_init__(self) -> None:
        _one_of("algorithm", self.algorithm, get_args(Algorithm))
        forms.require(self.wire, "wire")
        forms.require(self.floor, "floor")
        _one_of("outer", self.outer, settings.OUTER)
        _require("warmup_steps", self.warmup_steps, self.warmup_steps >= 0, "0 or more steps")
        _require("momentum", self.momentum, 0 <= self.momentum < 1, "at least 0 and below 1")
        _require("ratio", self.ratio, 0 < self.ratio <= 1, "a number above 0 and at most 1")
        _require("bucket_bytes", self.bucket_bytes, self.bucket_bytes >= 0, "0 or more bytes")
        least = self.partition_bytes == 0 or self.partition_bytes >= 256
        _require("partition_bytes", self.partition_bytes, least, "0, or 256 bytes or more")
        _require("intra_size", self.intra_size, self.intra_size >= 1, "1 or more ranks")
        _require("predivide", self.predivide, self.predivide > 0, "a number above 0")
        _require("every", self.every, self.every >= 0, "0, or a number of steps")
        if self.every:
            fits = 0 <= self.overlap < self.every
            _require("overlap", self.overlap, fits, f"0 or more, and below every={self.every}")
            _require("outer_lr", self.outer_lr, 0 < self.outer_lr <= 2, "above 0 and at most 2")
            least = 0 <= self.outer_momentum < 1
            _require("outer_momentum", self.outer_momentum, least, "at least 0 and below 1")
        if self.predivide != 1.0 and not self.average:
            raise UsageError(
                f"predivide={self.predivide} makes no sense for a sum",
                "average the gradients, or leave predivide at 1",
            )

    @classmethod
    def of_mode(
        cls, mode: str | None, floor: str | None, wire: str | None = None, **given: Any
    ) -> Options:
        """`resolve`, for doors whose `mode` is a form that is forced, "auto", or None.

        `floor`: how far "auto" may go, by default "bf16". Raises UsageError for names that are not
        known, and for two that say the same.
        """
        if mode is not None:
            forms.require(mode, "mode", besides=("auto",))
        if floor is not None and mode != "auto":
            raise UsageError(
                f"floor={floor!r} says how far mode='auto' may go, and mode is {mode!r}",
                "leave it out, or give mode='auto'",
            )
        if mode is not None and wire is not None:
            raise UsageError(
                f"mode={mode!r} and wire={wire!r} both say what is sent", "give one of them"
            )
        if mode not in (None, "exact", "auto"):
            wire = mode
        if mode == "auto":
            given["floor"] = floor or "bf16"
        made = cls.resolve(wire=wire, **given)
        made.say_idle(given)
        return made

    def say_idle(self, given: Mapping[str, Any]) -> None:
        """Without top-k: say which of `given` (arguments) and of the variables are for it."""
        if any(forms.described(form).late == "sparse" for form in (self.wire, self.floor)):
            return
        for name in ("ratio", "warmup_steps"):
            if given.get(name) is not None:
                info0("%s=%s has no effect: it is top-k's", name, given[name])
        say_idle("it is top-k's", *_TOPK)

    @classmethod
    def resolve(
        cls,
        *,
        algorithm: Algorithm | None = None,
        wire: str | None = None,
        ratio: float | None = None,
        warmup_steps: int | None = None,
        momentum: float = 0.0,
        floor: str = "exact",
        bucket_bytes: int = 25 << 20,
        partition_bytes: int | None = None,
        average: bool = True,
        predivide: float = 1.0,
        default_algorithm: Algorithm = "auto",
        env: Mapping[str, str] | None = None,
    ) -> Options:
        """The LIGHT_* variable where it is set, else the argument where one was given, else the

        default. Raises SettingError or UsageError for a value that cannot be.
        """
        limit = settings.EVENER_TIMEOUT
        two_level, topk = settings.LIGHT_2D_ALLREDUCE, settings.LIGHT_TOPK_ALLREDUCE
        if two_level.is_set(env):
            from_env: Algorithm = "2d" if two_level.get(env) else "flat"
            algorithm = _overruled("algorithm", algorithm, from_env, two_level.name)
        late = "" if wire is None else forms.described(forms.require(wire, "wire")).late
        sparse = late == "sparse"
        if topk.is_set(env):
            if topk.get(env):
                # Both top-k forms are what the variable asks for.
                named = wire if sparse else "topk"
                wire = _overruled("wire", wire, named, topk.name)
            elif sparse:
                wire = _overruled("wire", wire, "exact", topk.name)
        if settings.LIGHT_TOPK_RATIO.is_set(env):
            name = settings.LIGHT_TOPK_RATIO.name
            ratio = _overruled("ratio", ratio, settings.LIGHT_TOPK_RATIO.get(env), name)
        if warmup_steps is None:
            warmup_steps = settings.EVENER_TOPK_WARMUP.get(env)
        if partition_bytes is None:
            # Encoding a part takes as many launches as the whole, to send little.
            whole = wire is not None and forms.described(wire).late
            partition_bytes = 0 if whole else settings.EVENER_PARTITION_BYTES.get(env)
        return cls(
            algorithm=default_algorithm if algorithm is None else algorithm,
            wire="exact" if wire is None else wire,
            ratio=settings.LIGHT_TOPK_RATIO.default if ratio is None else ratio,
            warmup_steps=warmup_steps,
            momentum=momentum,
            floor=floor,
            guard_steps=settings.EVENER_GUARD_STEPS.get(env),
            guard_residual=settings.EVENER_GUARD_RESIDUAL.get(env),
            guard_cosine=settings.EVENER_GUARD_COSINE.get(env),
            topk_min_bytes=settings.LIGHT_TOPK_THRESHOLD.get(env),
            topk_fp16=settings.LIGHT_TOPK_FP16.get(env),
            two_level_max_bytes=settings.LIGHT_HIERARCHICAL_THRESHOLD.get(env),
            intra_size=settings.LIGHT_INTRA_SIZE.get(env),
            bucket_bytes=bucket_bytes,
            partition_bytes=partition_bytes,
            rows_bytes=settings.EVENER_ROWS_THRESHOLD.get(env),
            average=average,
            predivide=predivide,
            timeout=limit.get(env) if limit.is_set(env) else 0.0,
            outer=settings.EVENER_OUTER.get(env),
        )


def _overruled(what: str, argument: Any, variable: Any, name: str) -> Any:
    if argument is not None and argument != variable:
        logger.info("%s=%s is overruled by %s: %s", what, argument, name, variable)
    return variable


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    _require(name, value, value in allowed, "one of " + ", ".join(map(str, allowed)))


def _require(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise UsageError(f"{name}={value!r} cannot be", f"{name} must be {allowed}")
