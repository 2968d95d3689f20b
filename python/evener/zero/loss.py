"""Cross-entropy that never holds the logits in float32.

`functional.cross_entropy(logits.float(), ...)` takes 16 bytes of memory a logit with its backward
pass: 4 GB for 8,192 tokens of a vocabulary of 32,000. Here float32 exists for `SLAB` rows at a
time, and what stays is the logits as they came and their gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from evener.zero.tiles import in_vocabulary
from evener.zero.vocabulary import LazyLogits, linear_cross_entropy

SLAB = 1024
"""Rows of logits that are widened to float32 at a time."""


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, ignore: int) -> torch.Tensor:
        losses = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        norms = torch.empty_like(losses)
        kept = targets != ignore
        in_vocabulary(targets, kept, logits.shape[-1])
        at = torch.where(kept, targets, 0)
        for begin in range(0, logits.shape[0], SLAB):
            rows = slice(begin, begin + SLAB)
            wide = logits[rows].float()
            norms[rows] = torch.logsumexp(wide, 1)
            losses[rows] = norms[rows] - wide.gather(1, at[rows, None]).squeeze(1)
        count = kept.sum()
        ctx.save_for_backward(logits, at, kept, norms, count)
        return losses.mul_(kept).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits, at, kept, norms, count = ctx.saved_tensors
        found = torch.empty_like(logits)
        weights = torch.where(kept, gradient / count, 0.0)
        for begin in range(0, logits.shape[0], SLAB):
            rows = slice(begin, begin + SLAB)
            wide = (logits[rows].float() - norms[rows, None]).exp_()
            wide.scatter_add_(1, at[rows, None], wide.new_full((wide.shape[0], 1), -1.0))
            found[rows] = wide.mul_(weights[rows, None])
        return found, None, None


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, ignore_index: int = -100
) -> torch.Tensor:
    """The mean cross-entropy (float32, scalar), as `torch.nn.functional.cross_entropy` of the
    logits in float32, to rounding.

    logits: [..., classes], any floating dtype; targets: [...], int64. Rows with `ignore_index`
    count for nothing; to predict the next token, give the targets shifted, `ignore_index` last,
    rather than a slice of the logits, which would be a copy.
    """
    if isinstance(logits, LazyLogits):
        rows = logits.reshape(-1, logits.shape[-1])
        if isinstance(rows, LazyLogits) and rows.parts and rows.logs is None:
            return linear_cross_entropy(rows, targets.reshape(-1), ignore_index)
        logits = logits.whole()
    found: torch.Tensor = _CrossEntropy.apply(
        logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index
    )
    return found
