"""Exact top-k with error feedback on a GPU, in Triton: one pass, and a search in a few entries.

1. `_sample` looks at 16,384 entries of gradient + residual, each at a hashed place of its stretch,
   and takes as `guess` the magnitude that safely more than k of all entries reach: six standard
   deviations of the sample's error above k.
2. `_accumulate`, the pass: adds the gradient to the residual, and notes value and index of what is
   not below the guess, about 1.6 k entries at 1%. A block takes its places by one atomic addition.
3. `_count_digit`, four times: a radix search for the k-th magnitude over its 31 bits, among the
   notes. All programs count a digit; the one that ends last descends to where the k-th lies.
4. `_take` writes what lies above the threshold, and takes it out of the residual.
5. Of those that equal it, the lowest indices: `_count_ties` finds them in one program where they
   are few. Where they are many, it counts them by stretch, and `_take_ties` writes them.

Where fewer than k were noted, or more than there is room for (equal values: most of an embedding's
gradient is 0), steps 3 and 4 read the whole residual instead of the notes, and `_settle` takes
what was sent out of it at the end. All of that is decided on the device, by kernels that return at
once where they have nothing to do: nothing returns to the host, and the result is always exact.

What is selected is the same on every machine: the largest magnitudes, of equal ones the lowest
indices. The order in which a GPU writes it is not: programs take places as they come.

In bytes of memory traffic an entry, float32: 12, and about 20 for each one noted.

Loops over blocks are `while`: Triton's interpreter, which the tests use where there is no GPU,
cannot take the bounds of a `range` from a tensor with current numpy.
"""

# Triton's kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, attr-defined"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

# The pass: entries and warps a program, and entries that a thread loads at once (1 or 4).
# benchmarks/compress_kernels.py measures it.
STREAM = (2048, 8, 1)
# Everything after it; and `_take` alone.
BLOCK, WARPS = 4096, 8
TAKE = (1024, 4)
# (shift of this digit, shift of the prefix above it); `tl.histogram`'s time grows with its bins.
DIGITS = ((23, 31), (15, 23), (7, 15), (0, 7))
BINS = 256
# Programs of the passes over notes: a few waves on any GPU. A power of two.
PROGRAMS = 512
SAMPLES, SAMPLES_EACH = 16384, 512
# Up to this many entries equal to the threshold are sorted out by one program.
TIES = 4096

# The words of `state`, zero at first.
NOTED = tl.constexpr(0)  # entries noted
TAKEN = tl.constexpr(1)  # places taken in the output
PREFIX = tl.constexpr(2)  # the threshold's bits that are found
WANTED = tl.constexpr(3)  # entries still wanted among those with this prefix
EQUAL = tl.constexpr(4)  # entries with this prefix
TICKETS = tl.constexpr(5)  # programs that have counted
GUESS = tl.constexpr(6)  # magnitude bits from which entries are noted
TIED = tl.constexpr(7)  # entries in the list of ties
WORDS = 16


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _left(value, sent):
    """What stays of `value`: nothing that is not finite."""
    left = value - sent.to(tl.float32)
    return tl.where(_magnitude(left) < 0x7F800000, left, 0.0)


@triton.jit
def _ended_last(state):
    """Whether all other programs have come here before; what they wrote is then visible."""
    tl.debug_barrier()
    last = tl.atomic_add(state + TICKETS, 1, sem="acq_rel") == tl.num_programs(0) - 1
    tl.debug_barrier()
    return last


@triton.jit(do_not_specialize=["target"])
def _sample(
    gradient, residual, sampled, state, n, target, SAMPLES: tl.constexpr, EACH: tl.constexpr
):
    """Guess: the largest magnitude that at least `target` samples reach, or a little below it."""
    i = tl.program_id(0) * EACH + tl.arange(0, EACH)
    first = i.to(tl.int64) * n // SAMPLES
    span = (i.to(tl.int64) + 1) * n // SAMPLES - first
    mixed = i.to(tl.uint32) * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA6B
    mixed = mixed ^ (mixed >> 13)
    at = first + mixed.to(tl.int64) % tl.maximum(span, 1)
    total = tl.load(residual + at) + tl.load(gradient + at).to(tl.float32)
    tl.store(sampled + i, _magnitude(total))
    if _ended_last(state):
        bits = tl.load(sampled + tl.arange(0, SAMPLES), cache_modifier=".cg")
        guess = tl.zeros([], tl.int32)
        bit = tl.full([], 1 << 30, tl.int32)
        while bit > 0:
            tried = guess | bit
            count = tl.sum((bits >= tried).to(tl.int32), 0)
            guess = tl.where(count >= target, tried, guess)
            near = (count >= target) & (count <= target + target // 16)
            bit = tl.where(near, 0, bit >> 1)
        # What is not finite must be found wherever the threshold lies: it is never kept.
        tl.store(state + GUESS, tl.minimum(guess, 0x7F800000))
        tl.store(state + TICKETS, 0)


@triton.jit
def _append(taken, counter, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Places of what is taken of a block, from the counter on, in any order: int32 [BLOCK].

    As a tile of which a thread holds whole columns: only their sums are scanned across threads.
    """
    one = tl.reshape(taken.to(tl.int32), [BLOCK // WIDTH, WIDTH])
    column = tl.sum(one, 0)
    before = tl.cumsum(column, 0) - column
    first = tl.atomic_add(counter, tl.sum(column, 0), sem="relaxed")
    return tl.reshape((first + before)[None, :] + tl.cumsum(one, 0) - one, [BLOCK])


@triton.jit(do_not_specialize=["room"])
def _accumulate(
    gradient,
    residual,
    state,
    noted,
    noted_at,
    n,
    room,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    EACH: tl.constexpr,
):
    """residual += gradient, and note what is not below the guess.

    EACH 1 hides from the compiler that loads could be of 16 bytes: it then keeps one layout
    throughout, and need not bring the entries into that of the notes through shared memory.
    """
    first = tl.program_id(0).to(tl.int64) * BLOCK
    entry = tl.arange(0, BLOCK)
    if EACH == 1:
        entry += tl.num_programs(1) - 1  # zero
    inside = entry < tl.minimum(n - first, BLOCK).to(tl.int32)
    total = tl.load(residual + first + entry, inside, other=0.0)
    total += tl.load(gradient + first + entry, inside, other=0.0).to(tl.float32)
    tl.store(residual + first + entry, total, inside)
    taken = (_magnitude(total) >= tl.load(state + GUESS)) & inside
    place = _append(taken, state + NOTED, BLOCK, WIDTH)
    fits = taken & (place < room)
    tl.store(noted + place, total, fits)
    tl.store(noted_at + place, first.to(tl.int32) + entry, fits)


@triton.jit
def _complete(state, k, room):
    """Whether the k largest are among the notes."""
    noted = tl.load(state + NOTED)
    return (noted >= k) & (noted <= room)


@triton.jit(do_not_specialize=["k", "room"])
def _count_digit(
    residual,
    counts,
    state,
    noted,
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
    if ABOVE == 31:
        wanted = wanted * 0 + k
    complete = _complete(state, k, room)
    total = tl.where(complete, tl.load(state + NOTED), n)
    histogram = tl.zeros([BINS], tl.int32)
    block = tl.program_id(0)
    while block.to(tl.int64) * BLOCK < total:
        at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < total
        value = tl.load(noted + at, inside & complete, other=0.0)
        whole = tl.load(residual + at, inside & (complete == 0), other=0.0)
        value = tl.where(complete, value, whole)
        bits = _magnitude(value)
        digit = (bits >> SHIFT) & ((1 << (ABOVE - SHIFT)) - 1)
        if ABOVE == 31:
            histogram += tl.histogram(digit, BINS, mask=inside)
        else:
            histogram += tl.histogram(
                digit, BINS, mask=inside & ((bits >> ABOVE) == (prefix >> ABOVE))
            )
        block += tl.num_programs(0)
    bins = tl.arange(0, BINS)
    tl.atomic_add(counts + bins, histogram, histogram > 0, sem="relaxed")
    if _ended_last(state):
        # An exchange reads what the other programs' additions left in the second-level cache.
        count = tl.atomic_xchg(counts + bins, tl.zeros([BINS], tl.int32), sem="relaxed")
        at_least = tl.sum(count, 0) - tl.cumsum(count, 0) + count  # entries in this bin or above
        found = tl.max(tl.where(at_least >= wanted, bins, 0), 0)
        tl.store(state + PREFIX, prefix | (found << SHIFT))
        tl.store(state + WANTED, wanted - tl.sum(tl.where(bins > found, count, 0), 0))
        tl.store(state + EQUAL, tl.sum(tl.where(bins == found, count, 0), 0))
        tl.store(state + TICKETS, 0)


@triton.jit
def _direct(state, k, room, TIES: tl.constexpr):
    """Whether nobody reads the residual any more: then it is settled at once."""
    equal = tl.load(state + EQUAL)
    return _complete(state, k, room) & ((equal == tl.load(state + WANTED)) | (equal <= TIES))


@triton.jit(do_not_specialize=["k", "room"])
def _take(
    residual,
    state,
    noted,
    noted_at,
    tied,
    values,
    indices,
    n,
    k,
    room,
    TIES: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the candidates above the threshold; those that equal it too, where all are wanted."""
    threshold = tl.load(state + PREFIX)
    equal = tl.load(state + EQUAL)
    all_equal = equal == tl.load(state + WANTED)
    lists = (all_equal == 0) & (equal <= TIES)
    complete = _complete(state, k, room)
    direct = _direct(state, k, room, TIES)
    total = tl.where(complete, tl.load(state + NOTED), n)
    entry = tl.arange(0, BLOCK) + tl.num_programs(1) - 1  # see `_accumulate`
    block = tl.program_id(0)
    while block.to(tl.int64) * BLOCK < total:
        at = block.to(tl.int64) * BLOCK + entry
        inside = at < total
        value = tl.load(noted + at, inside & complete, other=0.0)
        whole = tl.load(residual + at, inside & (complete == 0), other=0.0)
        value = tl.where(complete, value, whole)
        index = tl.load(noted_at + at, inside & complete, other=0)
        index = tl.where(complete, index, at.to(tl.int32))
        bits = _magnitude(value)
        same = inside & (bits == threshold)
        taken = (inside & (bits > threshold)) | (same & all_equal)
        place = _append(taken, state + TAKEN, BLOCK, WIDTH)
        sent = value.to(values.dtype.element_ty)
        tl.store(values + place, sent, taken)
        tl.store(indices + place, index, taken)
        tl.store(residual + index, _left(value, sent), taken & direct)
        if lists:
            tl.store(tied + _append(same, state + TIED, BLOCK, WIDTH), index, same)
        block += tl.num_programs(0)


@triton.jit(do_not_specialize=["k", "room"])
def _count_ties(
    residual,
    state,
    counts,
    tied,
    values,
    indices,
    n,
    k,
    room,
    TIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where only some of those that equal the threshold are wanted.

    Few: one program takes those with the lowest indices. Many: count them by stretch.
    """
    wanted = tl.load(state + WANTED)
    equal = tl.load(state + EQUAL)
    if equal != wanted:
        if equal <= TIES:
            if tl.program_id(0) == 0:
                entry = tl.arange(0, TIES)
                index = tl.load(tied + entry, entry < equal, other=0x7FFFFFFF)
                # The largest index below which no more than the wanted ones lie.
                cut = tl.zeros([], tl.int32)
                bit = tl.full([], 1 << 30, tl.int32)
                while bit > 0:
                    tried = cut | bit
                    count = tl.sum((index < tried).to(tl.int32), 0)
                    cut = tl.where(count <= wanted, tried, cut)
                    bit = tl.where(count == wanted, 0, bit >> 1)
                taken = index < cut
                place = k - wanted + tl.cumsum(taken.to(tl.int32), 0) - 1
                value = tl.load(residual + index, taken, other=0.0)
                sent = value.to(values.dtype.element_ty)
                tl.store(values + place, sent, taken)
                tl.store(indices + place, index, taken)
                direct = _direct(state, k, room, TIES)
                tl.store(residual + index, _left(value, sent), taken & direct)
        else:
            threshold = tl.load(state + PREFIX)
            each = tl.cdiv(tl.cdiv(n, BLOCK), tl.num_programs(0))
            found = tl.zeros([], tl.int32)
            done = tl.zeros([], tl.int32)
            while done < each:
                block = (tl.program_id(0) * each + done).to(tl.int64)
                at = block * BLOCK + tl.arange(0, BLOCK)
                bits = _magnitude(tl.load(residual + at, at < n, other=0.0))
                found += tl.sum(((bits == threshold) & (at < n)).to(tl.int32), 0)
                done += 1
            tl.store(counts + tl.program_id(0), found)


@triton.jit(do_not_specialize=["k"])
def _take_ties(
    residual,
    state,
    counts,
    values,
    indices,
    n,
    k,
    TIES: tl.constexpr,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Where many equal the threshold: write the lowest indices, each program from its stretch."""
    wanted = tl.load(state + WANTED)
    equal = tl.load(state + EQUAL)
    if (equal != wanted) & (equal > TIES):
        threshold = tl.load(state + PREFIX)
        program = tl.arange(0, PROGRAMS)
        first = tl.sum(tl.load(counts + program, program < tl.program_id(0), other=0), 0)
        each = tl.cdiv(tl.cdiv(n, BLOCK), tl.num_programs(0))
        done = tl.zeros([], tl.int32)
        while (done < each) & (first < wanted):
            block = (tl.program_id(0) * each + done).to(tl.int64)
            at = block * BLOCK + tl.arange(0, BLOCK)
            value = tl.load(residual + at, at < n, other=0.0)
            same = ((_magnitude(value) == threshold) & (at < n)).to(tl.int32)
            place = first + tl.cumsum(same, 0) - same
            taken = (same > 0) & (place < wanted)
            tl.store(values + k - wanted + place, value.to(values.dtype.element_ty), taken)
            tl.store(indices + k - wanted + place, at.to(tl.int32), taken)
            first += tl.sum(same, 0)
            done += 1


@triton.jit(do_not_specialize=["k", "room"])
def _settle(residual, state, values, indices, n, k, room, TIES: tl.constexpr, BLOCK: tl.constexpr):
    """Take what is sent out of the residual, where that was not done; and all not finite."""
    if _direct(state, k, room, TIES) == 0:
        block = tl.program_id(0)
        while block.to(tl.int64) * BLOCK < k:
            entry = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = entry < k
            at = tl.load(indices + entry, inside, other=0)
            value = tl.load(residual + at, inside, other=0.0)
            sent = tl.load(values + entry, inside, other=0.0)
            tl.store(residual + at, _left(value, sent), inside)
            block += tl.num_programs(0)
    if tl.load(state + PREFIX) >= 0x7F800000:  # there may be more of them than were sent
        block = tl.program_id(0)
        while block.to(tl.int64) * BLOCK < n:
            at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            inside = at < n
            bad = _magnitude(tl.load(residual + at, inside, other=0.0)) >= 0x7F800000
            tl.store(residual + at, tl.zeros([BLOCK], tl.float32), inside & bad)
            block += tl.num_programs(0)


@triton.jit
def _add_entries(out, values, indices, scale, n, k, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    at = tl.load(indices + entry, entry < k, other=-1)
    # What a network that has failed leaves behind must not be written just anywhere.
    inside = (at >= 0) & (at < n)
    value = tl.load(values + entry, inside, other=0.0).to(tl.float32)
    tl.store(out + at, tl.load(out + at, inside, other=0.0) + value * scale, inside)


def notes(n: int, k: int) -> tuple[int, int]:
    """How many samples are to reach the guess, and how many entries may then be noted.

    The number of samples that reach a magnitude which a share p of all entries reaches is binomial,
    of a variance below SAMPLES * p. Six standard deviations each way, and 16 for small numbers.
    """

    def up(samples: float) -> int:
        return math.ceil(samples + 6 * math.sqrt(samples) + 16)

    target = up(SAMPLES * k / n)
    if n <= SAMPLES or target >= SAMPLES // 2:
        return SAMPLES + 1, n  # no sample reaches that: a guess of zero
    return target, min(n, max(k, math.ceil(up(target * 17 / 16) * n / SAMPLES)))


def select(
    gradient: torch.Tensor, residual: torch.Tensor, values: torch.Tensor, indices: torch.Tensor
) -> None:
    """`evener.comm.codecs.topk.select` for CUDA tensors: only enqueues, on the current stream."""
    n, k = residual.numel(), values.numel()
    if not 0 < k <= n < 2**31:
        raise ValueError(f"k={k} of n={n} entries: need 0 < k <= n < 2**31")
    device = residual.device
    target, room = notes(n, k)
    zeros = torch.zeros(WORDS + BINS, dtype=torch.int32, device=device)
    state, counts = zeros[:WORDS], zeros[WORDS:]
    # Samples, ties and their counts are never wanted at the same time.
    words = torch.empty(max(SAMPLES, TIES) + PROGRAMS, dtype=torch.int32, device=device)
    few, tie_counts = words[:-PROGRAMS], words[-PROGRAMS:]
    noted = torch.empty(room, dtype=torch.float32, device=device)
    noted_at = torch.empty(room, dtype=torch.int32, device=device)
    if room < n:
        _sample[(SAMPLES // SAMPLES_EACH,)](
            gradient, residual, few, state, n, target, SAMPLES, SAMPLES_EACH, num_warps=16
        )
    block, warps, each = STREAM
    _accumulate[(triton.cdiv(n, block),)](
        gradient,
        residual,
        state,
        noted,
        noted_at,
        n,
        room,
        block,
        32 * warps * each,
        each,
        num_warps=warps,
    )
    programs = (min(PROGRAMS, triton.cdiv(n, BLOCK)),)
    for shift, above in DIGITS:
        _count_digit[programs](
            residual, counts, state, noted, n, k, room, shift, above, BLOCK, BINS, num_warps=WARPS
        )
    block, warps = TAKE
    _take[(min(PROGRAMS * BLOCK // block, triton.cdiv(n, block)),)](
        residual, state, noted, noted_at, few, values, indices, n, k, room, TIES,
        block, 32 * warps, num_warps=warps,
    )  # fmt: skip
    _count_ties[programs](
        residual, state, tie_counts, few, values, indices, n, k, room, TIES, BLOCK, num_warps=WARPS
    )
    _take_ties[programs](
        residual, state, tie_counts, values, indices, n, k, TIES, BLOCK, PROGRAMS, num_warps=WARPS
    )
    _settle[programs](residual, state, values, indices, n, k, room, TIES, BLOCK, num_warps=WARPS)


def add_entries(
    out: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, scale: float
) -> None:
    """`evener.comm.codecs.topk.add_entries` for CUDA tensors."""
    k = values.numel()
    _add_entries[(triton.cdiv(k, 1024),)](out, values, indices, float(scale), out.numel(), k, 1024)
