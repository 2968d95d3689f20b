"""What an expert does between its two matrices: act(gate) * up * weight, in one pass each way.

The routing weight multiplies here, before the second matrix, not after it: (w h) D = w (h D), and
so the gradient of the weight needs no output of the second matrix, which then is kept nowhere, and
rows are added up as they are. h itself is made again in backward, in the same pass as its gradient.

SiLU (SwiGLU, arXiv 2002.05202) has a kernel; any other activation runs as torch operations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from evener.moe.positions import Positions

Activation = Callable[[torch.Tensor], torch.Tensor]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _weights(weights: torch.Tensor, at: Positions, like: torch.Tensor) -> torch.Tensor:
    """[room, 1]: each row's weight; 0 in rows without an entry."""
    chosen = weights.reshape(-1)[at.source.long().clamp(min=0)]
    return chosen.masked_fill(at.source < 0, 0).unsqueeze(1).to(like.dtype)


def is_silu(activation: Activation) -> bool:
    """Whether it is SiLU: torch's function or module, or transformers' class of that name."""
    return activation in (functional.silu, torch.nn.functional.silu) or type(
        activation
    ).__name__ in ("SiLU", "SiLUActivation")


def forward(
    both: torch.Tensor, weights: torch.Tensor, at: Positions, activation: Activation
) -> torch.Tensor:
    """both [room, 2 inner] (gate, then up), weights [tokens, slots] > [room, inner].

    Computed in float32 (float64 for float64), rounded once. On a GPU rows past the last entry
    hold anything.
    """
    if both.is_cuda and is_silu(activation):
        from evener.moe import triton_gate

        return triton_gate.forward(both, weights, at)
    return forward_reference(both, weights, at, activation)


def forward_reference(
    both: torch.Tensor, weights: torch.Tensor, at: Positions, activation: Activation
) -> torch.Tensor:
    """See `forward`."""
    gate, up = _wide(both).chunk(2, -1)
    return (activation(gate) * up * _weights(weights, at, gate)).to(both.dtype)


def backward(
    both: torch.Tensor, weights: torch.Tensor, at: Positions, activation: Activation,
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """What `forward` gave, made again, and the gradients of `both` and of `weights`.

    gradient: [room, inner], of what `forward` gave; on a GPU what comes first is written over it.
    """
    if both.is_cuda and is_silu(activation):
        from evener.moe import triton_gate

        return triton_gate.backward(both, weights, at, gradient)
    return backward_reference(both, weights, at, activation, gradient)


def backward_reference(
    both: torch.Tensor, weights: torch.Tensor, at: Positions, activation: Activation,
    gradient: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """See `backward`."""
    with torch.enable_grad():
        given = both.detach().requires_grad_()
        gate, up = _wide(given).chunk(2, -1)
        bare = activation(gate) * up
    weight, wanted = _weights(weights, at, bare), _wide(gradient)
    (to_both,) = torch.autograd.grad(bare, given, wanted * weight)
    bare = bare.detach()
    of_row = (bare * wanted).sum(1)
    to_weights = torch.zeros(weights.numel(), dtype=bare.dtype, device=both.device)
    used = at.source >= 0
    to_weights[at.source[used].long()] = of_row[used]
    hidden = (bare * weight).to(both.dtype)
    return hidden, to_both, to_weights.view_as(weights).to(weights.dtype)
