"""Gradients that wait for the optimizer's step, as a parameter that torch's tools understand.

A table has no dense weight, so there is no `nn.Parameter` for `clip_grad_norm_`, GradScaler or
`zero_grad` to look at. `Waiting` stands in: its `.grad` is [n, dim], a row for each key that
backward passes have met since the last step, and None where there was none. It is never part of
`model.parameters()`: an optimizer that does not know the store would step it in vain, and
DistributedDataParallel would put it into a bucket.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def summed(keys: torch.Tensor, gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys once each, ascending, and the sums of their gradients, added in a fixed order."""
    unique, inverse = torch.unique(keys, return_inverse=True)
    if unique.numel() == keys.numel():
        order = torch.empty_like(inverse)
        order[inverse] = torch.arange(keys.numel(), device=keys.device)
        return unique, gradients[order]
    return unique, add_rows(gradients, inverse, unique.numel())


def add_rows(rows: torch.Tensor, to: torch.Tensor, n: int) -> torch.Tensor:
    """[n, dim]: row i of `rows` [m, dim] is added to row `to[i]`, the same way in every run.

    `index_add_` on a GPU adds in the order in which threads come. The backward pass of
    `nn.Embedding` is the same sum, sorted, and without atomics.
    """
    if not n:
        return rows.new_zeros(0, rows.shape[1])
    added: torch.Tensor = torch.ops.aten.embedding_dense_backward(
        rows.contiguous(), to, n, -1, False
    )
    return added


class Waiting(nn.Parameter):
    """See the head of this file. `pieces`: (keys, gradients) in the order in which they came."""

    pieces: list[tuple[torch.Tensor, torch.Tensor]]

    def __new__(cls, dim: int, device: torch.device) -> Waiting:
        made = torch.Tensor._make_subclass(cls, torch.empty(0, dim, device=device), True)
        made.pieces = []
        return made

    def receive(self, keys: torch.Tensor, gradients: torch.Tensor) -> None:
        """More gradients; the same keys may be there."""
        self.pieces.append((keys, gradients))

    def merged(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All of them, each key once. There must be some."""
        keys = torch.cat([keys for keys, _ in self.pieces])
        gradients = torch.cat([gradients for _, gradients in self.pieces])
        self.pieces = [summed(keys, gradients)]
        return self.pieces[0]

    @property
    def grad(self) -> torch.Tensor | None:
        """float32 [n, dim], each key once; changes in place count."""
        return self.merged()[1] if self.pieces else None

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            self.pieces = []
            return
        keys, gradients = self.merged() if self.pieces else (None, None)
        if keys is None or gradients is None or value.shape != gradients.shape:
            shape = None if gradients is None else tuple(gradients.shape)
            raise ValueError(f"gradients of shape {tuple(value.shape)} where {shape} wait")
        self.pieces = [(keys, value)]

    @grad.deleter
    def grad(self) -> None:
        self.pieces = []

    def __deepcopy__(self, memo: Any) -> Waiting:
        raise TypeError("gradients that wait for a step cannot be copied")

    def __repr__(self) -> str:  # type: ignore[override]
        n = sum(keys.numel() for keys, _ in self.pieces)
        return f"Waiting({n} gradients of dim {self.shape[1]})"
