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
from evener.zero.states import Noise, States


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

    def of_shape(self, shape: torch.Size | None) -> Rule:
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
