"""The optimizer's step on one chunk: by the fused CPU kernels, or in torch operations where the
states are, or in one Triton kernel on a GPU. All do the same operations in the same order, each
rounded once, so a chunk's place does not change a bit of it (see crates/kernels/src/adam.rs for the
formulas)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from evener import _optimizers
from evener.errors import UsageError

KINDS = ("adamw", "adam", "sgd")


@dataclass(frozen=True)
class Rule:
    """Which optimizer, and its defaults."""

    kind: str = "adamw"
    defaults: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(
                f"optimizer {self.kind!r} is not known", f"use one of {', '.join(KINDS)}"
            )

    @property
    def moments(self) -> int:
        """How many tensors of states a parameter has."""
        return 1 if self.kind == "sgd" else 2

    def values(self) -> dict[str, Any]:
        """All hyper-parameters, defaults filled in (torch's)."""
        if self.kind == "sgd":
            base: dict[str, Any] = {
                "lr": 1e-3,
                "momentum": 0.0,
                "dampening": 0.0,
                "weight_decay": 0.0,
                "nesterov": False,
            }
        else:
            decay = 0.01 if self.kind == "adamw" else 0.0
            base = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": decay}
        if unknown := set(self.defaults) - set(base):
            raise UsageError(
                f"{self.kind} has no parameter {', '.join(sorted(unknown))}",
                f"it has {', '.join(base)}",
            )
        return {**base, **self.defaults}


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


def update_on_host(
    kind: str,
    states: States,
    gradient: torch.Tensor,
    hyper: dict[str, Any],
    step: int,
    scale: float,
    run: _optimizers.Run,
) -> None:
    """One fused step; all tensors are CPU tensors."""
    output = None
    master: _optimizers.Master = states.weights
    if states.lower is not None:
        master = (states.weights, states.lower)
    elif states.master is not None:
        master, output = states.master, states.weights
    if kind == "sgd":
        _optimizers.sgd(
            master, gradient, states.first, output, step=step, scale=scale, run=run, **hyper
        )
        return
    assert states.first is not None and states.second is not None
    _optimizers.adam(
        master,
        gradient,
        states.first,
        states.second,
        output,
        step=step,
        scale=scale,
        decoupled=kind == "adamw",
        run=run,
        **hyper,
    )


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


def _random(numel: int, key: int, offset: int, device: torch.device) -> torch.Tensor:
    """32 random bits an element, as int64 [numel]."""
    x = torch.arange(offset, offset + numel, dtype=torch.int64, device=device)
    x = (x * 0x9E3779B9 + key) & _MASK
    x ^= x >> 16
    x = (x * 0x7FEB352D) & _MASK
    return x ^ (x >> 15)


def _store(to: torch.Tensor, x: torch.Tensor, random: torch.Tensor | None) -> None:
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


def scalars(kind: str, hyper: dict[str, Any], step: int, scale: float) -> dict[str, float]:
    """The scalars of Adam's loop, computed in float64; each is rounded to float32 once."""
    (beta1, beta2), lr, decay = hyper["betas"], hyper["lr"], hyper["weight_decay"]
    return {
        "scale": scale,
        "coupled": decay if kind == "adam" else 0.0,
        "shrink": 1 - lr * decay if kind == "adamw" else 1.0,
        "beta1": beta1,
        "rest1": 1 - beta1,
        "beta2": beta2,
        "rest2": 1 - beta2,
        "root": 1 / (1 - beta2**step) ** 0.5,
        "epsilon": hyper["eps"],
        "rate": lr / (1 - beta1**step),
    }


def _root(x: torch.Tensor) -> torch.Tensor:
    # float32 sqrt on the CPU is MKL's, which is not rounded correctly; on CUDA it is.
    return x.double().sqrt().float() if x.device.type == "cpu" else x.sqrt()


def _float32(x: float) -> float:
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


def update_on_device(
    kind: str,
    states: States,
    gradient: torch.Tensor,
    hyper: dict[str, Any],
    step: int,
    scale: float,
    noise: Noise | None = None,
) -> None:
    """The same step where the states are: one Triton kernel for Adam on a GPU, torch operations
    otherwise, `SLICE` elements at a time."""
    noise = noise or Noise()
    if kind != "sgd" and states.weights.is_cuda:
        from evener.zero import triton_adam

        assert states.first is not None and states.second is not None
        master, other = "float32", None
        if states.lower is not None:
            master, other = "split", states.lower
        elif states.master is not None:
            master, other = "float16", states.master
        triton_adam.adam(
            master,
            states.weights,
            other,
            gradient,
            states.first,
            states.second,
            scalars(kind, hyper, step, scale),
            coupled=kind == "adam" and hyper["weight_decay"] != 0,
            key=random_key(noise.seed, step, noise.stream),
            offset=noise.offset,
        )
        return
    for begin in range(0, gradient.numel(), SLICE):
        end = min(begin + SLICE, gradient.numel())
        at = Noise(noise.seed, noise.stream, noise.offset + begin)
        _in_torch(kind, part(states, begin, end), gradient[begin:end], hyper, step, scale, at)


def _in_torch(
    kind: str,
    states: States,
    gradient: torch.Tensor,
    hyper: dict[str, Any],
    step: int,
    scale: float,
    noise: Noise,
) -> None:
    w = states.full()
    if w is states.weights or w is states.master:
        w = w.clone()
    g = gradient.float() * scale
    random = None
    if states.first is not None and states.first.dtype == torch.bfloat16:
        key = random_key(noise.seed, step, noise.stream)
        random = _random(w.numel(), key, noise.offset, w.device)
    if kind == "sgd":
        _sgd(states, w, g, hyper, step, random)
        states.store(w)
        return
    s = scalars(kind, hyper, step, scale)
    assert states.first is not None and states.second is not None
    m, v = states.first.float(), states.second.float()
    if kind == "adamw":
        w.mul_(s["shrink"])
    elif hyper["weight_decay"] != 0:
        g += w * hyper["weight_decay"]
    m.mul_(s["beta1"]).add_(g * s["rest1"])
    v.mul_(s["beta2"]).add_((g * g).mul_(s["rest2"]))
    change = m / _root(v).mul_(_float32(s["root"])).add_(s["epsilon"])
    w.sub_(change.mul_(s["rate"]))
    if m is not states.first:
        _store(states.first, m, random)
        _store(states.second, v, None if random is None else random >> 16)
    states.store(w)


def _sgd(
    states: States,
    w: torch.Tensor,
    g: torch.Tensor,
    hyper: dict[str, Any],
    step: int,
    random: torch.Tensor | None,
) -> None:
    momentum = hyper["momentum"]
    if hyper["weight_decay"] != 0:
        g += w * hyper["weight_decay"]
    if momentum != 0:
        assert states.first is not None
        m = states.first.float()
        m.mul_(momentum).add_(g * (1 if step == 1 else 1 - hyper["dampening"]))
        g = g + m * momentum if hyper["nesterov"] else m
        if m is not states.first:
            _store(states.first, m, random)
    w.sub_(g * hyper["lr"])
