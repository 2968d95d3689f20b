"""Rows in the order of where they go, without a sort, and back.

An **entry** is one destination of one token: token t, slot s. `positions` gives each entry a row so
that rows of one destination lie together, in the order of the tokens: a counting sort, whose counts
per block and prefix sums are all on the device. The host learns nothing, so nothing waits. `gather`
copies tokens to their rows, `combine` adds up each token's rows. Each is the other's gradient.

The same three serve experts (a destination is an expert), ranks and nodes (`exchange`).

The references here are plain torch, which runs on CPUs; `triton_permute` does it on GPUs. The
counting sort: as MegaBlocks (arXiv 2211.15841) and Megatron do it with kernels of their own.
"""

from __future__ import annotations

import torch

from evener.moe.positions import Positions


def positions(to: torch.Tensor, destinations: int, capacity: int | None = None) -> Positions:
    """Give each entry of `to` a row.

    to: integers [tokens, slots], below `destinations`; what is negative goes nowhere. capacity: of
    each destination; who comes later in the order of the tokens has no row.
    """
    if to.is_cuda:
        from evener.moe import triton_permute

        return triton_permute.positions(to, destinations, capacity)
    return positions_reference(to, destinations, capacity)


def positions_reference(
    to: torch.Tensor, destinations: int, capacity: int | None = None
) -> Positions:
    """See `positions`. It sorts: the definition, not the way of the kernels."""
    flat = to.reshape(-1).long()
    key = torch.where(flat < 0, destinations, flat)
    counts = torch.bincount(key, minlength=destinations + 1)[:destinations]
    starts = counts.cumsum(0) - counts
    order = torch.argsort(key, stable=True)[: int(counts.sum())]
    within = torch.arange(len(order), device=to.device) - starts[key[order]]
    if capacity is not None:
        order, within = order[within < capacity], within[within < capacity]
        counts = counts.clamp(max=capacity)
        starts = counts.cumsum(0) - counts
    rows = torch.full_like(flat, -1)
    rows[order] = starts[key[order]] + within
    source = torch.full_like(flat, -1)
    source[: len(order)] = order
    return Positions(rows.view(to.shape).int(), source.int(), counts.cumsum(0).int())


def gather(x: torch.Tensor, at: Positions) -> torch.Tensor:
    """x [tokens, width] > [room, width]: each row's token; zeros in rows without an entry."""
    if x.is_cuda:
        from evener.moe import triton_permute

        return triton_permute.gather(x, at.source, at.slots)
    return gather_reference(x, at)


def gather_reference(x: torch.Tensor, at: Positions) -> torch.Tensor:
    """See `gather`."""
    token = at.source.long().div(at.slots, rounding_mode="floor")
    if token.numel() and not x.shape[0]:
        return x.new_zeros(len(token), x.shape[1])
    out = x.index_select(0, token.clamp(min=0))
    return out.masked_fill_((token < 0).unsqueeze(1), 0)


def combine(y: torch.Tensor, at: Positions) -> torch.Tensor:
    """y [room, width] > [tokens, width]: the sum of each token's rows.

    16-bit rows are added in float32, in the order of the slots, and rounded once.
    """
    if y.is_cuda:
        from evener.moe import triton_permute

        return triton_permute.combine(y, at.rows)
    return combine_reference(y, at)


def combine_reference(y: torch.Tensor, at: Positions) -> torch.Tensor:
    """See `combine`."""
    wide = y.dtype if y.dtype in (torch.float32, torch.float64) else torch.float32
    out = torch.zeros(at.rows.shape[0], y.shape[1], dtype=wide, device=y.device)
    for slot in range(at.slots):
        row = at.rows[:, slot].long()
        token = (row >= 0).nonzero().squeeze(1)
        # Each token once: the order of the additions is that of the slots.
        out[token] += y[row[token]].to(wide)
    return out.to(y.dtype)
