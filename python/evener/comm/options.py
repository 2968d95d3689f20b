"""What a reduction may do: algorithm, form on the wire, sizes. Arguments win over the environment.

The default is lossless. Whatever changes the arithmetic is asked for, by an argument of the front
door or by LightCC's variables (`evener.settings`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from evener import settings
from evener.errors import UsageError

Algorithm = Literal["auto", "flat", "2d"]
Wire = Literal["exact", "fp16", "bf16", "topk"]


@dataclass(frozen=True)
class Options:
    """One consistent set of choices; equal on all ranks, which is checked when they meet.

    `algorithm`: "2d" reduces inside the node first, "flat" does not, "auto" takes "2d" where there
    are several nodes with several ranks each. `wire`: the form in which data crosses between nodes.
    `ratio`: share of entries that top-k sends. Sizes are bytes; `bucket_bytes` 0 means one bucket a
    tensor. `average`: divide by the world size. `predivide`: gradients are divided by it before
    they are summed, and the sum by world size / predivide (both only where `average`).
    """

    algorithm: Algorithm = "auto"
    wire: Wire = "exact"
    ratio: float = 0.01
    topk_min_bytes: int = 1 << 20
    topk_fp16: bool = False
    two_level_max_bytes: int = 1 << 30
    intra_size: int = 8
    bucket_bytes: int = 25 << 20
    average: bool = True
    predivide: float = 1.0
    timeout: float = 300.0

    def __post_init__(self) -> None:
        _one_of("algorithm", self.algorithm, get_args(Algorithm))
        _one_of("wire", self.wire, get_args(Wire))
        _require("ratio", self.ratio, 0 < self.ratio <= 1, "a number above 0 and at most 1")
        _require("bucket_bytes", self.bucket_bytes, self.bucket_bytes >= 0, "0 or more bytes")
        _require("intra_size", self.intra_size, self.intra_size >= 1, "1 or more ranks")
        _require("predivide", self.predivide, self.predivide > 0, "a number above 0")
        if self.predivide != 1.0 and not self.average:
            raise UsageError(
                f"predivide={self.predivide} makes no sense for a sum",
                "average the gradients, or leave predivide at 1",
            )

    @classmethod
    def resolve(
        cls,
        *,
        algorithm: Algorithm | None = None,
        wire: Wire | None = None,
        ratio: float | None = None,
        bucket_bytes: int = 25 << 20,
        average: bool = True,
        predivide: float = 1.0,
        default_algorithm: Algorithm = "auto",
        env: Mapping[str, str] | None = None,
    ) -> Options:
        """The argument where one was given, else the variable where it is set, else the default.

        Raises SettingError or UsageError for a value that cannot be.
        """
        if algorithm is None:
            two_level = settings.LIGHT_2D_ALLREDUCE
            from_env: Algorithm = "2d" if two_level.get(env) else "flat"
            algorithm = from_env if two_level.is_set(env) else default_algorithm
        if wire is None:
            wire = "topk" if settings.LIGHT_TOPK_ALLREDUCE.get(env) else "exact"
        return cls(
            algorithm=algorithm,
            wire=wire,
            ratio=settings.LIGHT_TOPK_RATIO.get(env) if ratio is None else ratio,
            topk_min_bytes=settings.LIGHT_TOPK_THRESHOLD.get(env),
            topk_fp16=settings.LIGHT_TOPK_FP16.get(env),
            two_level_max_bytes=settings.LIGHT_HIERARCHICAL_THRESHOLD.get(env),
            intra_size=settings.LIGHT_INTRA_SIZE.get(env),
            bucket_bytes=bucket_bytes,
            average=average,
            predivide=predivide,
            timeout=settings.EVENER_TIMEOUT.get(env),
        )


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    _require(name, value, value in allowed, "one of " + ", ".join(map(str, allowed)))


def _require(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise UsageError(f"{name}={value!r} cannot be", f"{name} must be {allowed}")
