"""Lion, as its authors' library has it; crates/kernels/src/lion.rs has the formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from evener.base import optimizers as _optimizers
from evener.zero.rules.base import Rule
from evener.zero.states import States


class Lion(Rule):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675: the sign of
    a mix of momentum and gradient. One moment, so 4 bytes per parameter fewer than AdamW."""

    name = "lion"
    title = "Lion"
    aliases = frozenset({"fusedlion", "deepspeedcpulion", "cpulion"})
    defaults = {  # noqa: RUF012 - a class attribute that nobody changes
        "lr": 1e-4,
        "betas": (0.9, 0.99),
        "weight_decay": 0.0,
    }
    moments = {"exp_avg": "first"}  # noqa: RUF012
    only = {  # noqa: RUF012 - options of lion-pytorch and timm
        "maximize": False,
        "caution": False,
        "cautious_factor": 1.0,
        "decoupled_weight_decay": False,
        "corrected_weight_decay": False,
    }

    def formula(
        self,
        w: torch.Tensor,
        g: torch.Tensor,
        moments: list[torch.Tensor],
        hyper: Mapping[str, Any],
        step: int,
    ) -> None:
        """See `Rule.formula`."""
        (beta1, beta2), lr = hyper["betas"], hyper["lr"]
        (m,) = moments
        w.mul_(1 - lr * hyper["weight_decay"])
        mixed = (m * beta1).add_(g * (1 - beta1))
        w.sub_(mixed.sign_().mul_(lr))
        m.mul_(beta2).add_(g * (1 - beta2))

    def on_host(
        self,
        states: States,
        gradient: torch.Tensor,
        hyper: Mapping[str, Any],
        step: int,
        scale: float,
        run: _optimizers.Run,
    ) -> None:
        """See `Rule.on_host`: one fused pass."""
        _optimizers.lion(
            states.master_copy,
            gradient,
            states.moment("first"),
            states.output,
            step=step,
            scale=scale,
            run=run,
            **hyper,
        )
