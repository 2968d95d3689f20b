"""The states of one rank's share of a chunk, and the roundings that all optimizers share.

A step is computed in float32. Weights, master copies and moments may be stored in fewer bits; how
they are rounded is said here once, as crates/kernels/src/formats.rs says it for the fused kernels
and `rules/triton_adam.py` for GPUs: the bits do not depend on the place of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evener.base import optimizers as _optimizers


@dataclass
class States:
    """One rank's share of a chunk. All flat and of one length, on one device.

    weights: what the model computes with. lower: the rest of a float32 master copy whose upper
    half `weights` is (bfloat16). master: a float32 copy (float16). Neither: `weights` is float32.
    """

    weights: torch.Tensor
    lower: torch.Tensor | None
    master: torch.Tensor | None
    first: torch.Tensor | None
    second: torch.Tensor | None

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
        return self.weights if self.master is None else self.master

    def store(self, weights: torch.Tensor) -> None:
        """Set the float32 weights."""
        if self.lower is not None:
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


def random_bits(numel: int, key: int, offset: int, device: torch.device) -> torch.Tensor:
    """32 random bits an element, as int64 [numel]."""
    x = torch.arange(offset, offset + numel, dtype=torch.int64, device=device)
    x = (x * 0x9E3779B9 + key) & _MASK
    x ^= x >> 16
    x = (x * 0x7FEB352D) & _MASK
    return x ^ (x >> 15)


def round_into(to: torch.Tensor, x: torch.Tensor, random: torch.Tensor | None) -> None:
    """Into float32 as it is, into bfloat16 rounded stochastically by the low 16 bits."""
    if random is None:
        to.copy_(x)
        return
    bits = x.view(torch.int32).to(torch.int64) & _MASK
    magnitude = bits & 0x7FFFFFFF
    rounded = (bits + (random & 0xFFFF)) >> 16
    special = (bits >> 16) | torch.where(magnitude > 0x7F800000, 0x40, 0)
    rounded = torch.where(magnitude >= 0x7F800000, special, rounded)
    to.copy_(rounded.to(torch.int16).view(torch.bfloat16))


def root(x: torch.Tensor) -> torch.Tensor:
    """The square root, rounded to nearest on every device."""
    # float32 sqrt on the CPU is MKL's, which is not rounded correctly; on CUDA it is.
    return x.double().sqrt().float() if x.device.type == "cpu" else x.sqrt()


def float32(x: float) -> float:
    """x rounded to float32 once."""
    return float(torch.tensor(x, dtype=torch.float64).float().item())


def part(states: States, begin: int, end: int) -> States:
    """Views of elements [begin, end)."""

    def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor[begin:end]

    return States(
        states.weights[begin:end],
        cut(states.lower),
        cut(states.master),
        cut(states.first),
        cut(states.second),
    )
