"""Exact top-k with error feedback on a GPU, in Triton: one pass, two where a guess was wrong.

The k-th largest magnitude changes little from step to step. So the pass that adds the gradient also
notes every entry from a `guess` up, a little below the threshold of the step before: a few per cent
of all. The exact threshold is then found among the noted ones: a radix search over the 31 magnitude
bits, with digits of 8, 8, 8 and 7 bits. Each digit is one kernel: all programs count, and the one
that ends last descends to the digit in which the k-th largest lies.

Where the guess was too high (fewer than k noted), or there is none yet, a second pass counts all
entries by exponent, and notes those from the exponent of the k-th up. Where more were noted than
there is room for (equal values), the search reads the whole residual in place of the notes. All of
that is decided on the device: nothing returns to the host, and the result is exact in every case.

What is selected is the same on every machine: the largest magnitudes, of equal ones the lowest
indices. The order in which a GPU writes it is not: programs take places as they come.

In bytes of memory traffic an entry, float32: 12, and 8 for each one noted.

Loops over blocks are `while`: Triton's interpreter, which the tests use where there is no GPU,
cannot take the bounds of a `range` from a tensor with current numpy.
"""

# Triton's kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
# `tl.histogram` costs time in proportion to its bins.
BINS = 256
# Programs of the counting passes: a few waves on any GPU, so that few of them add to one histogram.
PROGRAMS = 1024
# (shift of this digit, shift of the prefix above it)
DIGITS = ((23, 31), (15, 23), (7, 15), (0, 7))
# One in so many entries can be noted.
ROOM = 8
NO_GUESS = 0x7F800000

# The words of `state`, zero at first.
NOTED = tl.constexpr(0)  # entries noted
TAKEN = tl.constexpr(1)  # places taken in the output
PREFIX = tl.constexpr(2)  # the threshold's bits that are found
WANTED = tl.constexpr(3)  # entries still wanted among those with this prefix
EQUAL = tl.constexpr(4)  # entries with this prefix
TICKETS = tl.constexpr(5)  # programs that have counted
AGAIN = tl.constexpr(6)  # 1: the guess was wrong
WORDS = 16


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _note(bits, at, taken, state, noted_bits, noted_at, room):
    """Append entries to the notes, as far as there is room; count all."""
    taken = taken.to(tl.int32)
    first = tl.atomic_add(state + NOTED, tl.sum(taken, 0), sem="relaxed")
    place = first + tl.cumsum(taken, 0) - taken
    fits = (taken > 0) & (place < room)
    tl.store(noted_bits + place, bits, fits)
    tl.store(noted_at + place, at.to(tl.int32), fits)


@triton.jit
def _accumulate(
    gradient, residual, guess, state, noted_bits, noted_at, n, room, BLOCK: tl.constexpr
):
    """residual += gradient, and note what is not below the guess."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(residual + at, inside, other=0.0)
    total += tl.load(gradient + at, inside, other=0.0).to(tl.float32)
    tl.store(residual + at, total, inside)
    bits = _magnitude(total)
    _note(bits, at, (bits >= tl.load(guess)) & inside, state, noted_bits, noted_at, room)


@triton.jit
def _descend(counts, state, wanted, prefix, SHIFT: tl.constexpr, BINS: tl.constexpr):
    """Put the digit of the wanted-th largest into the prefix; leave the counts at zero."""
    bins = tl.arange(0, BINS)
    # An exchange reads what the other programs' additions left in the second-level cache.
    count = tl.atomic_xchg(counts + bins, tl.zeros([BINS], tl.int32), sem="relaxed")
    at_least = tl.sum(count, 0) - tl.cumsum(count, 0) + count  # entries in this bin or above
    digit = tl.max(tl.where(at_least >= wanted, bins, 0), 0)
    tl.store(state + PREFIX, prefix | (digit << SHIFT))
    tl.store(state + WANTED, wanted - tl.sum(tl.where(bins > digit, count, 0), 0))
    tl.store(state + EQUAL, tl.sum(tl.where(bins == digit, count, 0), 0))
    tl.store(state + TICKETS, 0)


@triton.jit
def _ended_last(counts, histogram, state, BINS: tl.constexpr):
    """Add this program's histogram; whether all others have done so before."""
    tl.atomic_add(counts + tl.arange(0, BINS), histogram, sem="relaxed")
    tl.debug_barrier()
    return tl.atomic_add(state + TICKETS, 1, sem="acq_rel") == tl.num_programs(0) - 1


@triton.jit
def _count_exponents(residual, guess, counts, state, n, k, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """Where the guess was wrong: find the exponent of the k-th largest, and guess that."""
    if tl.load(state + NOTED) < k:
        histogram = tl.zeros([BINS], tl.int32)
        block = tl.program_id(0)
        while block.to(tl.int64) * BLOCK < n:
            at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = at < n
            bits = _magnitude(tl.load(residual + at, inside, other=0.0))
            histogram += tl.histogram(bits >> 23, BINS, mask=inside)
            block += tl.num_programs(0)
        if _ended_last(counts, histogram, state, BINS):
            _descend(counts, state, k, 0, 23, BINS)
            tl.debug_barrier()
            # What is not finite must be found wherever the threshold lies: it is never kept.
            tl.store(guess, tl.minimum(tl.load(state + PREFIX), 0x7F800000))
            tl.store(state + PREFIX, 0)
            tl.store(state + AGAIN, 1)
            tl.store(state + NOTED, 0)


@triton.jit
def _note_again(residual, guess, state, noted_bits, noted_at, n, room, BLOCK: tl.constexpr):
    """Where the guess was wrong: note from the new one up."""
    if tl.load(state + AGAIN) > 0:
        block = tl.program_id(0)
        while block.to(tl.int64) * BLOCK < n:
            at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = at < n
            bits = _magnitude(tl.load(residual + at, inside, other=0.0))
            _note(bits, at, (bits >= tl.load(guess)) & inside, state, noted_bits, noted_at, room)
            block += tl.num_programs(0)


@triton.jit
def _candidates(residual, state, noted_bits, at, n, room):
    """Magnitude bits of the entries at `at` of the notes, or of the residual; and which exist."""
    noted = tl.load(state + NOTED)
    complete = noted <= room
    inside = at < tl.where(complete, noted, n)
    bits = tl.load(noted_bits + at, inside & complete, other=0)
    bits |= _magnitude(tl.load(residual + at, inside & (noted > room), other=0.0))
    return bits, inside


@triton.jit
def _count_digit(
    residual,
    counts,
    state,
    noted_bits,
    n,
    k,
    room,
    SHIFT: tl.constexpr,
    ABOVE: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """One digit of the search, over the candidates whose higher bits are the prefix."""
    prefix = tl.load(state + PREFIX)
    wanted = tl.load(state + WANTED)
    if SHIFT == 23:
        prefix = prefix * 0
        wanted = wanted * 0 + k
    noted = tl.load(state + NOTED)
    total = tl.where(noted <= room, noted, n)
    histogram = tl.zeros([BINS], tl.int32)
    block = tl.program_id(0)
    while block.to(tl.int64) * BLOCK < total:
        at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        bits, inside = _candidates(residual, state, noted_bits, at, n, room)
        digit = (bits >> SHIFT) & ((1 << (ABOVE - SHIFT)) - 1)
        if SHIFT == 23:
            histogram += tl.histogram(digit, BINS, mask=inside)
        else:
            histogram += tl.histogram(
                digit, BINS, mask=inside & ((bits >> ABOVE) == (prefix >> ABOVE))
            )
        block += tl.num_programs(0)
    if _ended_last(counts, histogram, state, BINS):
        _descend(counts, state, wanted, prefix, SHIFT, BINS)


@triton.jit
def _take(residual, state, noted_bits, noted_at, values, indices, n, room, BLOCK: tl.constexpr):
    """Write the candidates above the threshold; those that equal it too, where all are wanted."""
    threshold = tl.load(state + PREFIX)
    all_equal = tl.load(state + EQUAL) == tl.load(state + WANTED)
    noted = tl.load(state + NOTED)
    complete = noted <= room
    total = tl.where(complete, noted, n)
    block = tl.program_id(0)
    while block.to(tl.int64) * BLOCK < total:
        at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        bits, inside = _candidates(residual, state, noted_bits, at, n, room)
        taken = inside & ((bits > threshold) | ((bits == threshold) & all_equal))
        one = taken.to(tl.int32)
        first = tl.atomic_add(state + TAKEN, tl.sum(one, 0), sem="relaxed")
        place = first + tl.cumsum(one, 0) - one
        index = tl.load(noted_at + at, inside & complete, other=0)
        index = tl.where(complete, index, at.to(tl.int32))
        value = tl.load(residual + index, taken, other=0.0)
        tl.store(values + place, value.to(values.dtype.element_ty), taken)
        tl.store(indices + place, index, taken)
        block += tl.num_programs(0)


@triton.jit
def _take_ties(residual, state, values, indices, n, BLOCK: tl.constexpr):
    """One program: of the entries that equal the threshold, those with the lowest indices."""
    wanted = tl.load(state + WANTED)
    if tl.load(state + EQUAL) != wanted:
        threshold = tl.load(state + PREFIX)
        first = tl.load(state + TAKEN)
        block = tl.program_id(0)
        while (block.to(tl.int64) * BLOCK < n) & (wanted > 0):
            at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = at < n
            value = tl.load(residual + at, inside, other=0.0)
            same = ((_magnitude(value) == threshold) & inside).to(tl.int32)
            before = tl.cumsum(same, 0) - same
            taken = (same > 0) & (before < wanted)
            tl.store(values + first + before, value.to(values.dtype.element_ty), taken)
            tl.store(indices + first + before, at.to(tl.int32), taken)
            count = tl.minimum(tl.sum(same, 0), wanted)
            first += count
            wanted -= count
            block += 1


@triton.jit
def _settle(residual, state, guess, values, indices, n, k, BLOCK: tl.constexpr):
    """Leave what rounding took from what is sent, and nothing that is not finite."""
    infinity = 0x7F800000
    block = tl.program_id(0)
    while block.to(tl.int64) * BLOCK < k:
        entry = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = entry < k
        at = tl.load(indices + entry, inside, other=0)
        left = tl.load(residual + at, inside, other=0.0)
        left -= tl.load(values + entry, inside, other=0.0).to(tl.float32)
        tl.store(residual + at, tl.where(_magnitude(left) < infinity, left, 0.0), inside)
        block += tl.num_programs(0)
    threshold = tl.load(state + PREFIX)
    if threshold >= infinity:  # there may be more of them than were sent
        block = tl.program_id(0)
        while block.to(tl.int64) * BLOCK < n:
            at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = at < n
            bad = _magnitude(tl.load(residual + at, inside, other=0.0)) >= infinity
            tl.store(residual + at, tl.zeros([BLOCK], tl.float32), inside & bad)
            block += tl.num_programs(0)
    if tl.program_id(0) == 0:
        lower = threshold.to(tl.float32, bitcast=True) * 0.75
        usable = (threshold > 1 << 23) & (threshold < infinity)
        tl.store(guess, tl.where(usable, _magnitude(lower), infinity))


@triton.jit
def _add_entries(out, values, indices, scale, k, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < k
    at = tl.load(indices + entry, inside, other=0)
    value = tl.load(values + entry, inside, other=0.0).to(tl.float32)
    tl.store(out + at, tl.load(out + at, inside, other=0.0) + value * scale, inside)


def first_guess(device: torch.device) -> torch.Tensor:
    """What `select` keeps from one step to the next: int32 [1]."""
    return torch.full((1,), NO_GUESS, dtype=torch.int32, device=device)


def select(
    gradient: torch.Tensor,
    residual: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
    guess: torch.Tensor | None = None,
) -> None:
    """`evener.comm.topk.select` for CUDA tensors: only enqueues, on the current stream.

    `guess`: from `first_guess`, the same tensor for the same residual in every step; it changes the
    time, never the result.
    """
    n, k = residual.numel(), values.numel()
    if not 0 < k <= n < 2**31:
        raise ValueError(f"k={k} of n={n} entries: need 0 < k <= n < 2**31")
    device = residual.device
    if guess is None:
        guess = first_guess(device)
    blocks = triton.cdiv(n, BLOCK)
    programs = (min(PROGRAMS, blocks),)
    few = (min(PROGRAMS, triton.cdiv(blocks, ROOM)),)
    room = max(k, n // ROOM)
    zeros = torch.zeros(BINS + WORDS, dtype=torch.int32, device=device)
    counts, state = zeros[:BINS], zeros[BINS:]
    noted = torch.empty(2, room, dtype=torch.int32, device=device)
    bits, at = noted[0], noted[1]
    _accumulate[(blocks,)](gradient, residual, guess, state, bits, at, n, room, BLOCK, num_warps=8)
    _count_exponents[programs](residual, guess, counts, state, n, k, BLOCK, BINS, num_warps=8)
    _note_again[programs](residual, guess, state, bits, at, n, room, BLOCK, num_warps=8)
    for shift, above in DIGITS:
        _count_digit[few](
            residual, counts, state, bits, n, k, room, shift, above, BLOCK, BINS, num_warps=8
        )
    _take[few](residual, state, bits, at, values, indices, n, room, BLOCK, num_warps=8)
    _take_ties[(1,)](residual, state, values, indices, n, BLOCK, num_warps=8)
    _settle[few](residual, state, guess, values, indices, n, k, BLOCK, num_warps=8)


def add_entries(
    out: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, scale: float
) -> None:
    """`evener.comm.topk.add_entries` for CUDA tensors."""
    k = values.numel()
    _add_entries[(triton.cdiv(k, 1024),)](out, values, indices, float(scale), k, 1024)
