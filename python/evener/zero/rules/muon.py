"""Muon: torch's own arithmetic, matrix by matrix."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from evener.base import optimizers as _optimizers
from evener.base import torch_names
from evener.errors import UsageError
from evener.zero.rules.base import Rule
from evener.zero.states import Noise, States, pack_into, random_bits, random_key


class Muon(Rule):
    """Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024: the momentum
    of a matrix is made nearly orthogonal by Newton-Schulz steps in bfloat16 and is then the change.
    One moment, so 4 bytes per parameter fewer than AdamW.

    Products of matrices differ in their last bits between devices, and between a GPU's libraries.
    """

    name = "muon"
    title = "Muon"
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": (3.4445, -4.7750, 2.0315),
        "eps": 1e-7,
        "ns_steps": 5,
        "adjust_lr_fn": None,
    }
    moments = {"momentum_buffer": "first"}  # noqa: RUF012 - a class attribute nobody changes
    whole = True

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._shape: torch.Size | None = None

    @classmethod
    def read(cls, title: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """See `Rule.read`. What a torch of later has besides must be off."""
        for option, value in defaults.items():
            if option not in cls.defaults and value not in (None, False):
                raise UsageError(
                    f"{title}({option}={value!r}): Evener does not know {option}",
                    f"leave {option} out, or use the torch of docs/guide/install.md",
                )
        torch_names.muon()
        return super().read(title, defaults)

    def of_shape(self, shape: torch.Size | None) -> Muon:
        """See `Rule.of_shape`."""
        made = copy.copy(self)
        made._shape = shape
        return made

    def flops(self, shape: torch.Size) -> float:
        """See `Rule.flops`: three products in each step of Newton-Schulz."""
        rows, columns = min(shape), max(shape)
        steps: int = self.values["ns_steps"]
        return steps * (4.0 * rows**2 * columns + 2.0 * rows**3)

    def formula(
        self,
        w: torch.Tensor,
        g: torch.Tensor,
        moments: list[torch.Tensor],
        hyper: Mapping[str, Any],
        step: int,
    ) -> None:
        """See `Rule.formula`; `w` is the whole matrix, flat."""
        if self._shape is None or self._shape.numel() != w.numel():
            raise RuntimeError(f"{w.numel()} elements are no matrix of {self._shape}")
        one, gradient, momentum = ([x.view(self._shape)] for x in (w, g, *moments))
        torch_names.muon()(one, gradient, momentum, has_complex=False, **hyper)

    def first_half(
        self,
        momentum: torch.Tensor,
        gradient: torch.Tensor,
        hyper: Mapping[str, Any],
        step: int,
        scale: float,
        noise: Noise,
    ) -> torch.Tensor:
        """Move any elements' momentum; what the products take of them, bfloat16 [n]. With
        `products` and `second_half` it is `on_device`, where no rank has a matrix as a whole."""
        g, m = gradient.float() * scale, momentum.float()
        m.lerp_(g, 1 - hyper["momentum"])  # in place, where it is float32
        change = g.lerp_(m, hyper["momentum"]) if hyper["nesterov"] else m
        if momentum.dtype != torch.float32:
            key = random_key(noise.seed, step, noise.stream)
            random = random_bits(m.numel(), key, noise.offset, m.device)
            pack_into(momentum, "first", m, random)
        return change.bfloat16()

    def products(self, change: torch.Tensor, hyper: Mapping[str, Any]) -> torch.Tensor:
        """The products of a whole matrix in bfloat16, which is overwritten."""
        found: torch.Tensor = torch_names.newton_schulz()(
            change, hyper["ns_coefficients"], hyper["ns_steps"], hyper["eps"]
        )
        return found

    def second_half(
        self,
        states: States,
        change: torch.Tensor,
        hyper: Mapping[str, Any],
        step: int,
        noise: Noise,
    ) -> None:
        """Move any elements' weights by what the products made of them, after `of_shape`."""
        lr = hyper["lr"]
        rate = torch_names.adjusted_rate()(lr, hyper["adjust_lr_fn"], self._shape)
        w = states.full()
        if w is states.weights or w is states.master:
            w = w.clone()
        w.mul_(1 - lr * hyper["weight_decay"]).add_(change, alpha=-rate)
        random = None
        if states.rounded:
            key = random_key(noise.seed, step, noise.stream)
            random = random_bits(w.numel(), key, noise.offset, w.device)
        states.store(w, random)

    def on_host(
        self,
        states: States,
        gradient: torch.Tensor,
        hyper: Mapping[str, Any],
        step: int,
        scale: float,
        run: _optimizers.Run,
    ) -> None:
        """Never: the cores would take minutes for the products of a large matrix."""
        raise RuntimeError("matrices are updated on the accelerator")

    def _by_formula(
        self,
        states: States,
        gradient: torch.Tensor,
        hyper: Mapping[str, Any],
        step: int,
        scale: float,
        noise: Noise,
    ) -> None:
        self._slice(states, gradient, hyper, step, scale, noise)
