"""The optimizer's step on one chunk: by the fused CPU kernels, or in torch operations where the
states are. Both do the same operations in the same order, each rounded once, so a chunk's place
does not change a bit of it (see crates/kernels/src/adam.rs for the formulas)."""

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


def _root(x: torch.Tensor) -> torch.Tensor:
    # float32 sqrt on the CPU is MKL's, which is not rounded correctly; on CUDA it is.
    return x.double().sqrt().float() if x.device.type == "cpu" else x.sqrt()


def _float32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float64).float().item())


def update_on_device(
    kind: str,
    states: States,
    gradient: torch.Tensor,
    hyper: dict[str, Any],
    step: int,
    scale: float,
) -> None:
    """The same step in torch operations, on whatever device the tensors are; float32 moments."""
    w = states.full()
    if w is states.weights or w is states.master:
        w = w.clone()
    g = gradient.float() * scale
    decay, lr = hyper["weight_decay"], hyper["lr"]
    if kind == "sgd":
        _sgd(states, w, g, hyper, step)
    else:
        beta1, beta2 = hyper["betas"]
        m, v = states.first, states.second
        assert m is not None and v is not None
        if kind == "adamw":
            w.mul_(1 - lr * decay)
        elif decay != 0:
            g += w * decay
        m.mul_(beta1).add_(g * (1 - beta1))
        v.mul_(beta2).add_((g * g).mul_(1 - beta2))
        root = _float32(1 / (1 - beta2**step) ** 0.5)
        change = m / _root(v).mul_(root).add_(hyper["eps"])
        w.sub_(change.mul_(lr / (1 - beta1**step)))
    states.store(w)


def _sgd(
    states: States, w: torch.Tensor, g: torch.Tensor, hyper: dict[str, Any], step: int
) -> None:
    momentum = hyper["momentum"]
    if hyper["weight_decay"] != 0:
        g += w * hyper["weight_decay"]
    if momentum != 0:
        m = states.first
        assert m is not None
        m.mul_(momentum).add_(g * (1 if step == 1 else 1 - hyper["dampening"]))
        g = g + m * momentum if hyper["nesterov"] else m
    w.sub_(g * hyper["lr"])
