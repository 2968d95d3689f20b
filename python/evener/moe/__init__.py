"""Mixtures of experts: a layer, and the blocks of transformers.

layer = evener.moe.MoE(width=1024, inner=2816, experts=8, top_k=2)
model = evener.moe.convert(MixtralForCausalLM(config))
"""

from evener.moe.convert import convert
from evener.moe.layer import Experts, MoE, SharedExpert
from evener.moe.router import Router, Routing, load_balancing_loss

__all__ = ["Experts", "MoE", "Router", "Routing", "SharedExpert", "convert", "load_balancing_loss"]
