"""`evener.moe.permute` on a GPU, in Triton.

Two passes over the entries in blocks: each block counts its entries for each destination, a prefix
sum over (destination, block) says where each block's rows begin, and the second pass places them.
An entry's place inside its block is the number of equal ones before it, by comparing all pairs of
the block: no shared memory, no atomics, the same result every time.
"""

# Triton's kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from evener.moe.positions import Positions

BLOCK = 128


@triton.jit
def _count(to, within, counts, n, blocks, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    at = block * BLOCK + place
    mine = tl.load(to + at, at < n, other=-1).to(tl.int32)
    equal = (mine[:, None] == mine[None, :]).to(tl.int32)
    before = tl.where(place[None, :] < place[:, None], equal, 0)
    tl.store(within + at, tl.sum(before, 1), at < n)
    # Equal entries write the same number.
    where = mine.to(tl.int64) * blocks + block
    tl.store(counts + where, tl.sum(equal, 1), mine >= 0)


@triton.jit
def _place(
    to, within, starts, firsts, rows, source, n, blocks, capacity,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    mine = tl.load(to + at, at < n, other=-1).to(tl.int32)
    there = mine >= 0
    where = mine.to(tl.int64) * blocks
    row = tl.load(starts + where + block, there, other=0) + tl.load(within + at, at < n, other=0)
    if CAPPED:
        inside = row - tl.load(starts + where, there, other=0)
        there = there & (inside < capacity)
        row = tl.load(firsts + mine, there, other=0) + inside
    tl.store(rows + at, tl.where(there, row, -1), at < n)
    tl.store(source + row, at, there)


@triton.jit
def _gather(x, source, out, width, stride, slots, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(source + row)
    token = (entry // slots).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = tl.where(entry >= 0, width, 0)
    value = tl.load(x + token * stride + at, at < there, other=0.0)
    tl.store(out + row * width + at, value, at < width)


@triton.jit
def _combine(
    y, rows, out, width, stride, SLOTS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], WIDE)
    for slot in tl.static_range(SLOTS):
        row = tl.load(rows + token * SLOTS + slot).to(tl.int64)
        there = tl.where(row >= 0, width, 0)
        total += tl.load(y + row * stride + at, at < there, other=0.0).to(WIDE)
    tl.store(out + token * width + at, total.to(out.dtype.element_ty), at < width)


def positions(to: torch.Tensor, destinations: int, capacity: int | None = None) -> Positions:
    """See `permute.positions`: only enqueues, on the current stream."""
    to = to.contiguous()
    n, blocks = to.numel(), max(1, triton.cdiv(to.numel(), BLOCK))
    whole, device = torch.int32, to.device
    counts = torch.zeros(destinations, blocks, dtype=whole, device=device)
    rows = torch.empty(to.shape, dtype=whole, device=device)
    source = torch.full((n,), -1, dtype=whole, device=device)
    within = torch.empty(n, dtype=whole, device=device)
    if n:
        _count[(blocks,)](to, within, counts, n, blocks, BLOCK)
    ends = counts.view(-1).cumsum(0, dtype=torch.int32)
    starts = ends - counts.view(-1)
    ends = firsts = ends.view(destinations, blocks)[:, -1].contiguous()
    if capacity is not None:
        held = counts.sum(1, dtype=torch.int32).clamp_(max=capacity)
        ends = held.cumsum(0, dtype=torch.int32)
        firsts = ends - held
    if n:
        _place[(blocks,)](
            to, within, starts, firsts, rows, source, n, blocks, capacity or 0,
            capacity is not None, BLOCK,
        )  # fmt: skip
    return Positions(rows, source, ends)


def _block(width: int) -> int:
    return min(2048, max(16, int(triton.next_power_of_2(width))))


def gather(x: torch.Tensor, source: torch.Tensor, slots: int) -> torch.Tensor:
    """See `permute.gather`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty(len(source), x.shape[1], dtype=x.dtype, device=x.device)
    if out.numel():
        width, block = x.shape[1], _block(x.shape[1])
        _gather[(len(source), triton.cdiv(width, block))](
            x, source, out, width, x.stride(0), slots, block, num_warps=4
        )
    return out


def combine(y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """See `permute.combine`."""
    y = y if y.stride(-1) == 1 else y.contiguous()
    tokens, slots = rows.shape
    out = torch.empty(tokens, y.shape[1], dtype=y.dtype, device=y.device)
    if out.numel():
        width, wide = y.shape[1], tl.float64 if y.dtype == torch.float64 else tl.float32
        block = min(1024, _block(width))
        _combine[(tokens, triton.cdiv(width, block))](
            y, rows, out, width, y.stride(0), slots, wide, block, num_warps=4
        )
    return out
