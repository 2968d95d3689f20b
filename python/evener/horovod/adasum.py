"""Adasum: a sum of gradients that does not overshoot where they point the same way.

Two vectors a and b are combined as

    (1 - a.b / (2 |a|^2)) a  +  (1 - a.b / (2 |b|^2)) b

which is their sum where they are orthogonal and their average where they are parallel; more than
two by a binary tree over the ranks (Maleki et al., "Scaling Distributed Training with Adaptive
Summation", 2020; upstream: horovod/common/ops/adasum/adasum.h). Here every rank exchanges the whole
vector with its partner of each level: log2(size) exchanges.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

# A squared norm up to this counts as zero: the vector then says nothing about a direction.
_ZERO = 1e-300


def combine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Two floating-point vectors of one shape, as above. Norms and products in float64."""
    wide_a, wide_b = a.double().flatten(), b.double().flatten()
    dot = float(torch.dot(wide_a, wide_b))
    norm_a, norm_b = float(torch.dot(wide_a, wide_a)), float(torch.dot(wide_b, wide_b))
    factor_a = 1.0 if norm_a <= _ZERO else 1.0 - dot / (2 * norm_a)
    factor_b = 1.0 if norm_b <= _ZERO else 1.0 - dot / (2 * norm_b)
    return (wide_a * factor_a + wide_b * factor_b).to(a.dtype).view(a.shape)


def adasum(vector: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The combination of all members' vectors, the same on each. Their number is a power of 2."""
    mine = vector.contiguous().clone()
    place, size = group.rank(), group.size()
    distance = 1
    while distance < size:
        partner = place ^ distance
        theirs = torch.empty_like(mine)
        if mine.numel():
            ours, other = mine.view(-1).view(torch.uint8), theirs.view(-1).view(torch.uint8)
            rows = [ours.numel() if member == partner else 0 for member in range(size)]
            dist.all_to_all_single(other, ours, rows, rows, group=group)
        lower = place & distance == 0
        mine = combine(mine, theirs) if lower else combine(theirs, mine)
        distance *= 2
    return mine
