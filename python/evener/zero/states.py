"""The states of one rank's share of a chunk, and the roundings that all optimizers share.

A step is computed in float32. Weights, master copies and moments may be stored in fewer bits; how
they are rounded is said here once, as crates/kernels/src/formats.rs says it for the fused kernels
and `rules/triton_adam.py` for GPUs: the bits do not depend on the place of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from evener.base import optimizers as _optimizers

BLOCK = _optimizers.BLOCK
"""Elements that have one scale, where moments have one byte."""
SCALE = "_scale"
"""Ends the names of scales."""


def stride(name: str) -> int:
    """Elements of a share that one entry of the states of this name is for."""
    return BLOCK if name.endswith(SCALE) else 1


@dataclass
class States:
    """One rank's share of a chunk. All flat and of one length (but scales, see `stride`), on one
    device.

    weights: what the model computes with. lower: the rest of a float32 master copy whose upper
    half `weights` is (bfloat16). master: a float32 copy (float16). Neither: `weights` is float32,
    or bfloat16 that has no exact copy.
    first_scale, second_scale: of moments that are codes of one byte (int8).
    """

    weights: torch.Tensor
    lower: torch.Tensor | None
    master: torch.Tensor | None
    first: torch.Tensor | None
    second: torch.Tensor | None
    first_scale: torch.Tensor | None = None
    second_scale: torch.Tensor | None = None

    def moment(self, place: str) -> _optimizers.Moment:
        """The moment at this place, as the fused kernels take it."""
        tensor: torch.Tensor | None = getattr(self, place)
        scale: torch.Tensor | None = getattr(self, place + SCALE)
        return tensor if tensor is None or scale is None else (tensor, scale)

    @property
    def master_copy(self) -> _optimizers.Master:
        """What the fused kernels update: the float32 master copy in the form that it has."""
        if self.lower is not None:
            return self.weights, self.lower
        return self.weights if self.master is None else self.master

    @property
    def output(self) -> torch.Tensor | None:
        """What the fused kernels also write: weights that are no part of the master copy."""
        return None if self.master is None else self.weights

    def full(self) -> torch.Tensor:
        """The float32 weights (a copy, unless they are stored so)."""
        if self.lower is not None:
            return _optimizers.join(self.weights, self.lower)
        return self.weights.float() if self.master is None else self.master

    @property
    def rounded(self) -> bool:
        """Whether the weights have no exact copy."""
        exact = self.weights.dtype == torch.float32
        return not exact and self.lower is None and self.master is None

    def store(self, weights: torch.Tensor, random: torch.Tensor | None = None) -> None:
        """Set the float32 weights. Without an exact copy: rounded stochastically by `random`, 32
        bits an element, to nearest without."""
        if self.rounded and random is not None:
            # The moments have used up these bits: mix them once more.
            self.weights.copy_(_rounded(weights, _mix_all(random)))
        elif self.lower is not None:
            upper, lower = _optimizers.split(weights)
            self.weights.copy_(upper)
            self.lower.copy_(lower)
        else:
            if self.master is not None:
                self.master.copy_(weights)
            self.weights.copy_(weights)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What there is, by name."""
        named = {
            "weights": self.weights,
            "lower": self.lower,
            "master": self.master,
            "first": self.first,
            "second": self.second,
            "first_scale": self.first_scale,
            "second_scale": self.second_scale,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}


@dataclass(frozen=True)
class Noise:
    """Where the bits of stochastic rounding come from: as `_optimizers.Run` has them."""

    seed: int = 0
    stream: int = 0
    offset: int = 0


_MASK = 0xFFFFFFFF
SLICE = 8 << 20
"""Elements that are updated at a time on the accelerator: bounds what torch operations need beside
the states, and the slots through which states of the host stream."""


def _mix(x: int) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    x = x * 0x846CA68B & _MASK
    return x ^ (x >> 16)


def random_key(seed: int, step: int, stream: int) -> int:
    """The key of one tensor's random bits in one step, as crates/kernels/src/formats.rs has it."""
    key = _mix(stream & _MASK ^ 0x9E3779B9)
    for word in (seed, seed >> 32, step, step >> 32):
        key = _mix(key ^ word & _MASK) + 0x9E3779B9 & _MASK
    return key


def _mix_all(x: torch.Tensor) -> torch.Tensor:
    """`_mix` of each, int64 [n]."""
    x = x ^ x >> 16
    x = x * 0x7FEB352D & _MASK
    x = x ^ x >> 15
    x = x * 0x846CA68B & _MASK
    return x ^ x >> 16


def random_bits(numel: int, key: int, offset: int, device: torch.device) -> torch.Tensor:
    """32 random bits an element, as int64 [numel]."""
    x = torch.arange(offset, offset + numel, dtype=torch.int64, device=device)
    x = (x * 0x9E3779B9 + key) & _MASK
    x ^= x >> 16
    x = (x * 0x7FEB352D) & _MASK
    return x ^ (x >> 15)


def unpacked(moment: _optimizers.Moment, place: str) -> torch.Tensor:
    """A moment as float32: not copied where it is float32 already. place: "first" or "second"."""
    assert moment is not None
    return decode(place, *moment) if isinstance(moment, tuple) else moment.float()


def pack_into(
    moment: _optimizers.Moment, place: str, x: torch.Tensor, random: torch.Tensor | None = None
) -> None:
    """Set a moment to float32 `x`: rounded stochastically by the low 16 bits of `random`, to
    nearest without."""
    assert moment is not None
    if isinstance(moment, tuple):
        for to, value in zip(moment, encode(place, x, random), strict=True):
            to.copy_(value)
    elif random is None or moment.dtype == torch.float32:
        moment.copy_(x)
    else:
        moment.copy_(_rounded(x, random))


def _rounded(x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """As bfloat16."""
    bits = x.view(torch.int32).to(torch.int64) & _MASK
    magnitude = bits & 0x7FFFFFFF
    rounded = (bits + (random & 0xFFFF)) >> 16
    special = (bits >> 16) | torch.where(magnitude > 0x7F800000, 0x40, 0)
    rounded = torch.where(magnitude >= 0x7F800000, special, rounded)
    return rounded.to(torch.int16).view(torch.bfloat16)


_CUT = 20  # mantissa bits of a float32 below those of a code
_TOP = {"first": 15, "second": 31}
"""The highest exponent of a code of one byte, by its moment."""


def _low(scales: torch.Tensor, top: int) -> torch.Tensor:
    """The float32 of a code's exponent 0, as bits, for each element."""
    exponents = scales.to(torch.int32).clamp(min=top + 3) - top
    return (exponents << 23).repeat_interleave(BLOCK)


def decode(place: str, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Moments of one byte each as float32 [n]: crates/kernels/src/formats.rs has the format.

    place: "first" or "second". codes: int8 [n], n a multiple of 256. scales: uint8 [n / 256].
    """
    low = _low(scales, _TOP[place])
    code = codes.view(torch.uint8).to(torch.int32)
    sign = code >> 7 << 31 if place == "first" else 0
    code = code & 0x7F if place == "first" else code
    one = low + (1 << 23)
    bits = code << _CUT
    small = (one + bits).view(torch.float32) - one.view(torch.float32)
    bits = torch.where(code < 8, small.view(torch.int32), low + bits) | sign
    found = bits.view(torch.float32)
    return found.masked_fill_((scales == 255).repeat_interleave(BLOCK), torch.nan)


def encode(
    place: str, x: torch.Tensor, random: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of float32 moments, n a multiple of 256: up or down by the low 16 bits of
    `random`, to nearest without."""
    top = _TOP[place]
    magnitude = x.view(torch.int32) & 0x7FFFFFFF
    largest = magnitude.view(-1, BLOCK).amax(1).to(torch.int64)
    scales = (largest + ((1 << _CUT) - 1) >> 23).clamp(top + 3, 255).to(torch.uint8)
    low = _low(scales, top)
    one = low + (1 << 23)
    small = (magnitude.view(torch.float32) + one.view(torch.float32)).view(torch.int32) - one
    bits = 1 << 15 if random is None else random.to(torch.int32) & 0xFFFF
    where = torch.where(magnitude < one, small, magnitude - low)
    code = where + (bits << _CUT - 16) >> _CUT
    if place == "second":
        code = torch.maximum(code, (magnitude != 0).to(torch.int32))
    code = code.masked_fill_((scales == 255).repeat_interleave(BLOCK), 0)
    if place == "first":
        code = code | (x.view(torch.int32) >> 24 & 0x80)
    return code.to(torch.uint8).view(torch.int8), scales


def root(x: torch.Tensor) -> torch.Tensor:
    """The square root, rounded to nearest on every device."""
    # float32 sqrt on the CPU is MKL's, which is not rounded correctly; on CUDA it is.
    return x.double().sqrt().float() if x.device.type == "cpu" else x.sqrt()


def float32(x: float) -> float:
    """x rounded to float32 once."""
    return float(torch.tensor(x, dtype=torch.float64).float().item())


def part(states: States, begin: int, end: int) -> States:
    """Views of elements [begin, end)."""

    named = states.tensors()
    return of({name: cut(name, tensor, begin, end) for name, tensor in named.items()})


def cut(name: str, tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """The view of the states of this name that is for elements [begin, end)."""
    each = stride(name)
    return tensor[begin // each : end // each]


def of(named: Mapping[str, torch.Tensor]) -> States:
    """The inverse of `States.tensors`."""
    rest = {"lower": None, "master": None, "first": None, "second": None, **named}
    return States(**rest)  # type: ignore[arg-type]  # `weights` is always among them
