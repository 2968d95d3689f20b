"""A mixture of experts as a loop over experts, each over all tokens: what ours must equal."""

from __future__ import annotations

import torch
from torch.nn import functional

from evener.moe import Experts


def dense(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, layer: Experts
) -> torch.Tensor:
    """Every expert computes every token; weights of 0 make the choice."""
    out = torch.zeros_like(x)
    for expert in range(layer.num_experts):
        gate, up = functional.linear(x, layer.gate_up_proj[expert]).chunk(2, -1)
        given = functional.linear(layer.activation(gate) * up, layer.down_proj[expert])
        share = (weights * (experts == expert)).sum(1, keepdim=True)
        out = out + given * share.to(given.dtype)
    return out


def case(
    tokens: int, width: int, inner: int, experts: int, top_k: int, dtype: torch.dtype,
    device: str = "cpu", absent: bool = False,
) -> tuple[Experts, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """A layer, tokens, choices, weights. absent: some entries choose nobody."""
    torch.manual_seed(tokens + experts)
    layer = Experts(width, inner, experts).to(device, dtype)
    x = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    scores = torch.rand(tokens, experts, device=device)
    scores[:, 0] = 0  # nobody goes there, unless all do
    chosen = scores.topk(top_k, -1).indices
    if absent:
        chosen[torch.rand(chosen.shape, device=device) < 0.3] = -1
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    weights = torch.rand(chosen.shape, device=device, dtype=kind, requires_grad=True)
    return layer, x, chosen, weights


def gradients(out: torch.Tensor, seed: torch.Tensor, *of: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of sum(out * seed)."""
    return torch.autograd.grad((out * seed).sum(), of)
