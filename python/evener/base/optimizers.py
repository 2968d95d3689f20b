"""Fused CPU optimizers on torch tensors: checks, then hands addresses to `evener._native`.

One call updates one flat piece of a model: master weights, moments and the copy that the
accelerator computes with, from a gradient in whatever dtype it came. Formats:

- master weights: float32; a pair (upper bfloat16, lower int16) that together is a float32
  (the upper half is the bfloat16 weight, rounded half away from zero); or bfloat16, rounded
  stochastically.
- moments: float32; or rounded stochastically by a hash of (seed, step, stream, index): bfloat16, or
  a pair (codes int8 [n], scales uint8 [n / 256]) of one byte each (crates/kernels/src/formats.rs).
- gradient: float32, bfloat16 or float16. Output: bfloat16 or float16, to nearest even.

The bits do not depend on the number of threads or on the machine's vector instructions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from evener import _native

_FORMATS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

BLOCK = 256
"""Moments of one byte that share a scale."""

Master = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Moment = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


@dataclass(frozen=True)
class Run:
    """How a step runs.

    threads: 0 for one a CPU that this process may use. instructions: one of
    `instruction_sets()`, None for the best. seed, stream: of the random bits; give each tensor a
    stream of its own. offset: index of the first element in its stream.
    """

    threads: int = 0
    instructions: str | None = None
    seed: int = 0
    stream: int = 0
    offset: int = 0

    def _native(self) -> tuple[int, str | None, int, int, int]:
        return self.threads, self.instructions, self.seed, self.stream, self.offset


def instruction_sets() -> list[str]:
    """The vector instruction sets that the kernels can use here, best first."""
    return _native.instruction_sets()


def threads() -> int:
    """Threads of the default pool: the affinity mask, and the cgroup's CPU quota where smaller."""
    return _native.optimizer_threads()


def _address(
    tensor: torch.Tensor | None, name: str, numel: int, allowed: Iterable[torch.dtype]
) -> tuple[str, int]:
    if tensor is None:
        return "none", 0
    allowed = list(allowed)
    if tensor.device.type != "cpu" or tensor.dtype not in allowed or not tensor.is_contiguous():
        kinds = " or ".join(str(dtype) for dtype in allowed)
        raise ValueError(
            f"{name} must be a contiguous {kinds} tensor on the CPU, "
            f"got {tensor.dtype} on {tensor.device}, contiguous={tensor.is_contiguous()}"
        )
    if tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements, expected {numel}")
    return _FORMATS.get(tensor.dtype, "i16"), tensor.data_ptr()


def _master(master: Master) -> tuple[int, tuple[str, int, int]]:
    if isinstance(master, torch.Tensor):
        numel = master.numel()
        kind, address = _address(master, "master weights", numel, [torch.float32, torch.bfloat16])
        return numel, (kind, address, 0)
    upper, lower = master
    numel = upper.numel()
    _, first = _address(upper, "the upper half", numel, [torch.bfloat16])
    _, second = _address(lower, "the lower half", numel, [torch.int16])
    return numel, ("split", first, second)


def _moment(moment: Moment, name: str, numel: int) -> tuple[str, int, int]:
    if not isinstance(moment, tuple):
        return (*_address(moment, name, numel, _MOMENTS), 0)
    codes, scales = moment
    if numel % BLOCK:
        raise ValueError(f"{name} of one byte each has {numel} elements: give whole blocks of 256")
    _, where = _address(codes, name, numel, [torch.int8])
    _, there = _address(scales, f"{name}'s scales", numel // BLOCK, [torch.uint8])
    return "int8", where, there


def _apart(*given: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None) -> None:
    """Refuses tensors that share memory: the kernels write through one while they read another."""
    tensors = [t for each in given for t in (each if isinstance(each, tuple) else (each,))]
    ranges = sorted(
        (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size())
        for t in tensors
        if t is not None and t.numel()
    )
    for (_, end), (start, _) in itertools.pairwise(ranges):
        if start < end:
            raise ValueError("two of the tensors share memory: each must have its own")


_MOMENTS = (torch.float32, torch.bfloat16)
_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)
_OUTPUTS = (torch.bfloat16, torch.float16)


def adam(
    master: Master,
    gradient: torch.Tensor,
    first: Moment,
    second: Moment,
    output: torch.Tensor | None = None,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled: bool = True,
    scale: float = 1.0,
    run: Run | None = None,
) -> None:
    """One step of AdamW (`decoupled`) or Adam, in place; all tensors are flat, [n].

    `step` counts from 1. The gradient is multiplied by `scale` first (clip coefficient divided by
    loss scale). Raises ValueError with nothing written.
    """
    numel, where = _master(master)
    _apart(master, gradient, first, second, output)
    _native.adam_step(
        numel,
        where,
        _address(gradient, "gradient", numel, _GRADIENTS),
        _moment(first, "first", numel),
        _moment(second, "second", numel),
        _address(output, "output", numel, _OUTPUTS),
        [lr, *betas, eps, weight_decay, scale],
        decoupled,
        step,
        (run or Run())._native(),
    )


def sgd(
    master: Master,
    gradient: torch.Tensor,
    first: Moment = None,
    output: torch.Tensor | None = None,
    *,
    step: int,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    scale: float = 1.0,
    run: Run | None = None,
) -> None:
    """One step of SGD, in place; `first` is the momentum buffer. Otherwise as `adam`."""
    numel, where = _master(master)
    _apart(master, gradient, first, output)
    _native.sgd_step(
        numel,
        where,
        _address(gradient, "gradient", numel, _GRADIENTS),
        _moment(first, "first", numel),
        _address(output, "output", numel, _OUTPUTS),
        [lr, momentum, dampening, weight_decay, scale],
        nesterov,
        step,
        (run or Run())._native(),
    )


def lion(
    master: Master,
    gradient: torch.Tensor,
    first: Moment,
    output: torch.Tensor | None = None,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    scale: float = 1.0,
    run: Run | None = None,
) -> None:
    """One step of Lion, in place; `first` is the momentum. Otherwise as `adam`."""
    numel, where = _master(master)
    _apart(master, gradient, first, output)
    _native.lion_step(
        numel,
        where,
        _address(gradient, "gradient", numel, _GRADIENTS),
        _moment(first, "first", numel),
        _address(output, "output", numel, _OUTPUTS),
        [lr, *betas, weight_decay, scale],
        step,
        (run or Run())._native(),
    )


def sum_of_squares(gradient: torch.Tensor, threads: int = 0) -> float:
    """The sum of squares of a flat gradient in float64; not finite where an entry is not."""
    numel = gradient.numel()
    where = _address(gradient, "gradient", numel, _GRADIENTS)
    return _native.sum_of_squares(numel, where, threads)


def split(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The halves (bfloat16, int16) of float32 weights; NaN becomes one quiet pattern."""
    # No bit pattern that is left overflows: the largest is infinity, and -0.0 is the smallest.
    bits = torch.where(weights.isnan(), torch.nan, weights).view(torch.int32)
    upper = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return upper, bits.to(torch.int16)


def join(upper: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """The float32 weights of two halves, bit for bit; any device."""
    bits = (upper.view(torch.int16).to(torch.int32) << 16) + lower.to(torch.int32)
    return bits.view(torch.float32)
