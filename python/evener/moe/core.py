"""The experts of one device: rows in, sums out, and the same backwards.

    x > gather > times gate_up > act(gate) up weight > times down > combine > out

Kept for backward: the gathered rows and what the first matrix gave. The gradients of the matrices
are made last and apart (`Kept.of_matrices`), so that what others wait for can leave before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from evener.moe import gate, grouped, permute
from evener.moe.gate import Activation
from evener.moe.positions import Positions


@dataclass
class Kept:
    """What backward needs of one `run`."""

    at: Positions
    weights: torch.Tensor
    rows: torch.Tensor
    both: torch.Tensor
    activation: Activation
    # Set by `back`: gradients of what the matrices gave, and what the second one took.
    to_both: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    come: torch.Tensor | None = None

    def of_matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of gate_up and of down, after `back`. Frees what was kept."""
        assert self.to_both is not None and self.hidden is not None and self.come is not None
        to_down = grouped.outer(self.come, self.hidden, self.at.ends)
        self.come = self.hidden = None
        to_gate_up = grouped.outer(self.to_both, self.rows, self.at.ends)
        self.to_both = None
        return to_gate_up, to_down


def run(
    x: torch.Tensor, weights: torch.Tensor, at: Positions, gate_up: torch.Tensor,
    down: torch.Tensor, activation: Activation,
) -> tuple[torch.Tensor, Kept]:  # fmt: skip
    """out [tokens, width] = of each token, the sum over its entries of weight * expert(x).

    x [tokens, width]; weights [tokens, slots]; gate_up [experts, 2 inner, width] and down
    [experts, width, inner], as nn.Linear has them. No autograd.
    """
    rows = permute.gather(x, at)
    both = grouped.times(rows, gate_up, at.ends, transposed=True)
    hidden = gate.forward(both, weights, at, activation)
    given = grouped.times(hidden, down, at.ends, transposed=True)
    return permute.combine(given, at), Kept(at, weights, rows, both, activation)


def back(
    kept: Kept, gradient: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and of the weights; `gradient` [tokens, width] is that of `run`'s out."""
    at = kept.at
    kept.come = permute.gather(gradient, at)
    to_hidden = grouped.times(kept.come, down, at.ends, transposed=False)
    kept.hidden, kept.to_both, to_weights = gate.backward(
        kept.both, kept.weights, at, kept.activation, to_hidden
    )
    to_rows = grouped.times(kept.to_both, gate_up, at.ends, transposed=False)
    return permute.combine(to_rows, at), to_weights


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor,
        down: torch.Tensor, at: Positions, activation: Activation,
    ) -> torch.Tensor:  # fmt: skip
        out, kept = run(x, weights, at, gate_up, down, activation)
        ctx.save_for_backward(weights, gate_up, down, kept.rows, kept.both, at.rows, at.source,
                              at.ends)  # fmt: skip
        ctx.activation = activation
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        weights, gate_up, down, rows, both, *places = ctx.saved_tensors
        kept = Kept(Positions(*places), weights, rows, both, ctx.activation)
        to_x, to_weights = back(kept, gradient, gate_up, down)
        to_gate_up = to_down = None
        if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
            to_gate_up, to_down = kept.of_matrices()
        return to_x, to_weights, to_gate_up, to_down, None, None


def local(
    x: torch.Tensor, weights: torch.Tensor, at: Positions, gate_up: torch.Tensor,
    down: torch.Tensor, activation: Activation,
) -> torch.Tensor:  # fmt: skip
    """`run`, with autograd."""
    out: torch.Tensor = _Local.apply(x, weights, gate_up, down, at, activation)
    return out
