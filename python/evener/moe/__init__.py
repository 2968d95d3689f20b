"""Mixtures of experts: a layer, and the blocks of transformers.

layer = evener.moe.MoE(width=1024, inner=2816, experts=8, top_k=2)
model = evener.moe.convert(MixtralForCausalLM(config))
"""

from evener.moe.balance import balance, rebalance
from evener.moe.convert import convert
from evener.moe.layer import Experts, MoE, SharedExpert
from evener.moe.parallel import MoEError
from evener.moe.router import Router, Routing, load_balancing_loss
from evener.moe.spread import (
    average_gradients,
    clip_gradients,
    interleave,
    load_optimizer_state,
    optimizer_state,
    spread,
)

__all__ = [
    "Experts",
    "MoE",
    "MoEError",
    "Router",
    "Routing",
    "SharedExpert",
    "average_gradients",
    "balance",
    "clip_gradients",
    "convert",
    "interleave",
    "load_balancing_loss",
    "load_optimizer_state",
    "optimizer_state",
    "rebalance",
    "spread",
]
