"""SGD with momentum, as torch has it; crates/kernels/src/sgd.rs has the formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from evener.base import optimizers as _optimizers
from evener.zero.rules.base import Rule
from evener.zero.states import States


class SGD(Rule):
    """Sutskever et al., "On the importance of initialization and momentum in deep learning"."""

    name = "sgd"
    title = "SGD"
    defaults = {  # noqa: RUF012 - a class attribute that nobody changes
        "lr": 1e-3,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
    }
    optional = True
    moments = {"momentum_buffer": "first"}  # noqa: RUF012
    only = {"maximize": False}  # noqa: RUF012

    def formula(
        self,
        w: torch.Tensor,
        g: torch.Tensor,
        moments: list[torch.Tensor],
        hyper: Mapping[str, Any],
        step: int,
    ) -> None:
        """See `Rule.formula`."""
        momentum = hyper["momentum"]
        if hyper["weight_decay"] != 0:
            g += w * hyper["weight_decay"]
        if momentum != 0:
            (m,) = moments
            m.mul_(momentum).add_(g * (1 if step == 1 else 1 - hyper["dampening"]))
            g = g + m * momentum if hyper["nesterov"] else m
        w.sub_(g * hyper["lr"])

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
        _optimizers.sgd(
            states.master_copy,
            gradient,
            states.moment("first"),
            states.output,
            step=step,
            scale=scale,
            run=run,
            **hyper,
        )
