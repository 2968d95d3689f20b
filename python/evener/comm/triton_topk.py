"""Exact top-k with error feedback on a GPU, in Triton.

The radix search of crates/kernels/src/topk.rs with digits of 8, 8, 8 and 7 bits: each pass counts
one digit of the entries that share the prefix found so far, and a kernel of one program descends to
the digit in which the k-th largest lies. Nothing returns to the host. Then one pass counts what
each block will take, a prefix sum gives every block its place, and one pass writes. In float32
words of memory traffic an entry: 3 for the first pass (the residual is added in it), 1 for each of
the others: 8 with 4 digits.

Loops over blocks are `while`: Triton's interpreter, which the tests use where there is no GPU,
cannot take the bounds of a `range` from a tensor with current numpy.

Digits have 256 bins because `tl.histogram` costs time in proportion to its bins; wider digits would
save passes over memory and lose more in the histogram.
"""

# Triton's kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
BINS = 256
# Programs of the counting passes: a few waves on any GPU, so that few of them add to one histogram.
PROGRAMS = 1024
# (shift of this digit, shift of the prefix above it)
DIGITS = ((23, 31), (15, 23), (7, 15), (0, 7))


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _accumulate(gradient, residual, counts, n, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """residual += gradient, and a histogram of the highest digit."""
    histogram = tl.zeros([BINS], tl.int32)
    block = tl.program_id(0)
    while block.to(tl.int64) * BLOCK < n:
        at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        total = tl.load(residual + at, inside, other=0.0)
        total += tl.load(gradient + at, inside, other=0.0).to(tl.float32)
        tl.store(residual + at, total, inside)
        histogram += tl.histogram(_magnitude(total) >> 23, BINS, mask=inside)
        block += tl.num_programs(0)
    tl.atomic_add(counts + tl.arange(0, BINS), histogram, sem="relaxed")


@triton.jit
def _count_digit(
    residual,
    counts,
    state,
    n,
    SHIFT: tl.constexpr,
    ABOVE: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """A histogram of one digit, over the entries whose higher bits are the prefix in `state`."""
    prefix = tl.load(state) >> ABOVE
    histogram = tl.zeros([BINS], tl.int32)
    block = tl.program_id(0)
    while block.to(tl.int64) * BLOCK < n:
        at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        bits = _magnitude(tl.load(residual + at, inside, other=0.0))
        digit = (bits >> SHIFT) & ((1 << (ABOVE - SHIFT)) - 1)
        histogram += tl.histogram(digit, BINS, mask=inside & ((bits >> ABOVE) == prefix))
        block += tl.num_programs(0)
    tl.atomic_add(counts + tl.arange(0, BINS), histogram, sem="relaxed")


@triton.jit
def _descend(counts, state, SHIFT: tl.constexpr, BINS: tl.constexpr):
    """Put the digit of the k-th largest into the prefix; `state` is [prefix, entries wanted]."""
    prefix = tl.load(state)
    wanted = tl.load(state + 1)
    bins = tl.arange(0, BINS)
    count = tl.load(counts + bins)
    at_least = tl.sum(count, 0) - tl.cumsum(count, 0) + count  # entries in this bin or above
    digit = tl.max(tl.where(at_least >= wanted, bins, 0), 0)
    above = tl.sum(tl.where(bins > digit, count, 0), 0)
    tl.store(state, prefix | (digit << SHIFT))
    tl.store(state + 1, wanted - above)
    tl.store(counts + bins, tl.zeros([BINS], tl.int32))  # ready for the next digit


@triton.jit
def _count_taken(residual, state, above, equal, n, BLOCK: tl.constexpr):
    """How many entries of each block are above the threshold, and how many equal it."""
    threshold = tl.load(state)
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = _magnitude(tl.load(residual + at, at < n, other=0.0))
    tl.store(above + block, tl.sum((bits > threshold).to(tl.int32), 0))
    tl.store(equal + block, tl.sum(((bits == threshold) & (at < n)).to(tl.int32), 0))


@triton.jit
def _take(residual, state, above, equal, values, indices, n, BLOCK: tl.constexpr):
    """Write what is taken, ascending, and clear it. `above`, `equal`: inclusive sums by block."""
    threshold = tl.load(state)
    ties = tl.load(state + 1)
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    kept = tl.load(residual + at, inside, other=0.0)
    bits = _magnitude(kept)
    over = ((bits > threshold) & inside).to(tl.int32)
    same = ((bits == threshold) & inside).to(tl.int32)
    over_before = tl.load(above + block) - tl.sum(over, 0) + tl.cumsum(over, 0) - over
    same_before = tl.load(equal + block) - tl.sum(same, 0) + tl.cumsum(same, 0) - same
    taken = (over > 0) | ((same > 0) & (same_before < ties))
    place = over_before + tl.minimum(same_before, ties)
    tl.store(values + place, kept, taken)
    tl.store(indices + place, at.to(tl.int32), taken)
    infinity = 0x7F800000
    tl.store(residual + at, tl.zeros([BLOCK], tl.float32), taken | ((bits >= infinity) & inside))


@triton.jit
def _add_entries(out, values, indices, scale, k, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < k
    at = tl.load(indices + entry, inside, other=0)
    value = tl.load(values + entry, inside, other=0.0).to(tl.float32)
    tl.store(out + at, tl.load(out + at, inside, other=0.0) + value * scale, inside)


def select(
    gradient: torch.Tensor, residual: torch.Tensor, values: torch.Tensor, indices: torch.Tensor
) -> None:
    """`evener.comm.topk.select` for CUDA tensors: only enqueues, on the current stream."""
    n, k = residual.numel(), values.numel()
    if not 0 < k <= n < 2**31:
        raise ValueError(f"k={k} of n={n} entries: need 0 < k <= n < 2**31")
    blocks = triton.cdiv(n, BLOCK)
    programs = (min(PROGRAMS, blocks),)
    counts = torch.zeros(BINS, dtype=torch.int32, device=residual.device)
    state = torch.zeros(2, dtype=torch.int32, device=residual.device)
    state[1].fill_(k)
    _accumulate[programs](gradient, residual, counts, n, BLOCK, BINS, num_warps=8)
    for shift, above in DIGITS:
        if shift != DIGITS[0][0]:
            _count_digit[programs](
                residual, counts, state, n, shift, above, BLOCK, BINS, num_warps=8
            )
        _descend[(1,)](counts, state, shift, BINS, num_warps=4)
    taken = torch.empty(2, blocks, dtype=torch.int32, device=residual.device)
    _count_taken[(blocks,)](residual, state, taken[0], taken[1], n, BLOCK, num_warps=8)
    sums = torch.cumsum(taken, 1, dtype=torch.int32)
    _take[(blocks,)](residual, state, sums[0], sums[1], values, indices, n, BLOCK, num_warps=8)


def add_entries(
    out: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, scale: float
) -> None:
    """`evener.comm.topk.add_entries` for CUDA tensors."""
    k = values.numel()
    _add_entries[(triton.cdiv(k, 1024),)](out, values, indices, scale, k, 1024)
