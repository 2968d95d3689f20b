"""`evener.comm.codecs.differences` on a GPU, in Triton.

A program is one warp that codes a tile: its lanes are the 32 lanes of the stream, so where the next
words of all lanes lie is a sum over the warp. Nothing is shared between programs and nothing is
atomic. Headers come first (`plan`), since a program has to know where its words begin: a lane's
words are its bits over 32, so they are counted without coding.

A group of a lane's steps is written out: four steps (`rice.GROUP`), whose weights are loaded at
once.
"""

# Triton's kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from evener.comm.codecs.rice import (
    ESCAPE,
    EXPONENT,
    HIGHEST,
    LANES,
    LOWEST,
    STEPS,
    tiles,
)

# Headers that `_places` adds up at a time.
BLOCK = 2048


@triton.jit
def _raw(weights):
    """The same memory as whole numbers: a view of the host's costs as much as a launch."""
    return weights.to(tl.pointer_type(tl.int16), bitcast=True)


@triton.jit
def _bits(weights, at, inside):
    return tl.load(_raw(weights) + at, inside, other=0).to(tl.int32) & 0xFFFF


@triton.jit
def _ordered(bits):
    return bits ^ tl.where(bits >= 0x8000, 0xFFFF, 0x8000)


@triton.jit
def _zigzag(new, old):
    distance = (_ordered(new) - _ordered(old)) & 0xFFFF
    distance = distance - ((distance & 0x8000) << 1)
    return ((distance << 1) ^ (distance >> 31)) & 0xFFFF


@triton.jit
def _log2(x):
    # From 1 to 2^24, which a float holds.
    return (x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _clamp(x):
    return tl.minimum(tl.maximum(x, 0), 15)


@triton.jit
def _length(z, k, ESCAPE: tl.constexpr):
    q = z >> k
    return tl.where(q < ESCAPE, q + 1 + k, ESCAPE + 16)


@triton.jit
def _distance(new, old, at, n, SHIFT: tl.constexpr, MASK: tl.constexpr):
    """Zigzag, exponent, and whether there is such a weight; 0 where there is none."""
    inside = at < n
    before = _bits(old, at, inside)
    return _zigzag(_bits(new, at, inside), before), (before >> SHIFT) & MASK, inside


@triton.jit
def _want(z, exponent):
    return tl.sum(tl.where(z > 0, _log2(tl.maximum(z, 1)) + exponent, 0))


@triton.jit
def _bits_of(z, exponent, inside, chosen, quiet, ESCAPE: tl.constexpr):
    """How many bits each weight takes; rare ones in a `quiet` group take none."""
    skipped = quiet & (exponent > chosen)
    length = _length(z, _clamp(chosen - exponent), ESCAPE)
    return tl.where(inside & (skipped == 0), length, 0)


@triton.jit
def _choose(
    new,
    old,
    headers,
    n,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    ESCAPE: tl.constexpr,
    LOWEST: tl.constexpr,
    TRIES: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """The header of each tile: K and kind with the fewest bits, and its words."""
    tile = tl.program_id(0)
    group = tl.arange(0, STEPS // 4)[:, None]
    at = tile.to(tl.int64) * (STEPS * LANES) + group * (4 * LANES) + tl.arange(0, LANES)[None, :]
    z0, e0, i0 = _distance(new, old, at, n, SHIFT, MASK)
    z1, e1, i1 = _distance(new, old, at + LANES, n, SHIFT, MASK)
    z2, e2, i2 = _distance(new, old, at + 2 * LANES, n, SHIFT, MASK)
    z3, e3, i3 = _distance(new, old, at + 3 * LANES, n, SHIFT, MASK)
    changed = (z0 > 0).to(tl.int32) + (z1 > 0).to(tl.int32)
    changed += (z2 > 0).to(tl.int32) + (z3 > 0).to(tl.int32)
    count = tl.sum(changed)
    wanted = _want(z0, e0) + _want(z1, e1) + _want(z2, e2) + _want(z3, e3)
    middle = wanted // tl.maximum(count, 1)
    best = tl.full([], 1 << 30, tl.int32)
    header = tl.zeros([], tl.int32)
    for at_ in tl.static_range(2 * TRIES):
        shift = LOWEST + at_ // 2
        grouped = at_ % 2
        chosen = tl.maximum(middle + shift, 0)
        # Without groups nothing is rare.
        limit = chosen if grouped else 1 << 20
        flagged = (e0 > limit) | (e1 > limit) | (e2 > limit) | (e3 > limit)
        moved = ((e0 > limit) & (z0 > 0)) | ((e1 > limit) & (z1 > 0))
        moved |= ((e2 > limit) & (z2 > 0)) | ((e3 > limit) & (z3 > 0))
        quiet = flagged & (moved == 0)
        bits = _bits_of(z0, e0, i0, chosen, quiet, ESCAPE)
        bits += _bits_of(z1, e1, i1, chosen, quiet, ESCAPE)
        bits += _bits_of(z2, e2, i2, chosen, quiet, ESCAPE)
        bits += _bits_of(z3, e3, i3, chosen, quiet, ESCAPE) + flagged.to(tl.int32)
        lanes = tl.sum(bits, 0)
        total = tl.sum(lanes)
        words = tl.sum((lanes + 31) >> 5)
        header = tl.where(total < best, words * 1024 + grouped * 512 + chosen, header)
        best = tl.minimum(total, best)
    tl.store(headers + tile, tl.where(count > 0, header, 0))


@triton.jit
def _places(headers, first, said, count, SAID: tl.constexpr, BLOCK: tl.constexpr):
    """Where each tile's words begin; the message's size, and zeros behind it. One program."""
    taken = tl.zeros([], tl.int64) + count
    start = tl.zeros([], tl.int32)
    while start < count:
        at = start + tl.arange(0, BLOCK)
        words = (tl.load(headers + at, at < count, other=0) >> 10).to(tl.int64)
        tl.store(first + at, taken + tl.cumsum(words, 0) - words, at < count)
        taken += tl.sum(words)
        start += BLOCK
    if SAID:
        place = tl.arange(0, 4)
        tl.store(said + place, tl.where(place == 0, taken, 0), place < SAID)


@triton.jit
def _put(
    z, exponent, inside, chosen, quiet, flagged, moved, held, filled, here, taken, out,
    ESCAPE: tl.constexpr,
):  # fmt: skip
    """Append a weight's bits, behind its group's bit where it is `flagged`; write full words."""
    k = _clamp(chosen - exponent)
    length = _bits_of(z, exponent, inside, chosen, quiet, ESCAPE)
    q = z >> k
    capped = tl.minimum(q, ESCAPE)
    ones = (1 << capped) - 1
    low = (z & ((1 << k) - 1)) << (capped + 1)
    code = tl.where(q < ESCAPE, ones | low, ones | (z << ESCAPE))
    code = (tl.where(length > 0, code, 0) << flagged) | (moved & flagged)
    held = held | (code.to(tl.int64) << filled.to(tl.int64))
    filled += length + flagged
    full = filled > 32
    needs = full.to(tl.int32)
    tl.store(out + here, held.to(tl.int32), full & (here >= 0))
    held = tl.where(full, held >> 32, held)
    filled -= 32 * needs
    here = tl.where(full, taken + tl.cumsum(needs, 0) - 1, here)
    return held, filled, here, taken + tl.sum(needs)


@triton.jit
def _encode(
    new,
    old,
    headers,
    first,
    out,
    n,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    ESCAPE: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
):
    tile = tl.program_id(0)
    header = tl.load(headers + tile)
    tl.store(out + tile, header)
    if header >= 1024:
        chosen = header & 511
        limit = tl.where((header & 512) > 0, chosen, 1 << 20)
        start = tile.to(tl.int64) * (STEPS * LANES) + tl.arange(0, LANES)
        taken = tl.load(first + tile)
        # The word that a lane fills. Before the first one it is a full one that lies nowhere.
        held = tl.zeros([LANES], tl.int64)
        filled = tl.full([LANES], 32, tl.int32)
        here = tl.full([LANES], -1, tl.int64)
        none = tl.zeros([LANES], tl.int32)
        for group in range(STEPS // 4):
            at = start + group * (4 * LANES)
            z0, e0, i0 = _distance(new, old, at, n, SHIFT, MASK)
            z1, e1, i1 = _distance(new, old, at + LANES, n, SHIFT, MASK)
            z2, e2, i2 = _distance(new, old, at + 2 * LANES, n, SHIFT, MASK)
            z3, e3, i3 = _distance(new, old, at + 3 * LANES, n, SHIFT, MASK)
            flagged = (e0 > limit) | (e1 > limit) | (e2 > limit) | (e3 > limit)
            moved = ((e0 > limit) & (z0 > 0)) | ((e1 > limit) & (z1 > 0))
            moved |= ((e2 > limit) & (z2 > 0)) | ((e3 > limit) & (z3 > 0))
            quiet = flagged & (moved == 0)
            held, filled, here, taken = _put(
                z0, e0, i0, chosen, quiet, flagged.to(tl.int32), moved.to(tl.int32),
                held, filled, here, taken, out, ESCAPE,
            )  # fmt: skip
            held, filled, here, taken = _put(
                z1, e1, i1, chosen, quiet, none, none, held, filled, here, taken, out, ESCAPE
            )
            held, filled, here, taken = _put(
                z2, e2, i2, chosen, quiet, none, none, held, filled, here, taken, out, ESCAPE
            )
            held, filled, here, taken = _put(
                z3, e3, i3, chosen, quiet, none, none, held, filled, here, taken, out, ESCAPE
            )
        tl.store(out + here, held.to(tl.int32), here >= 0)


@triton.jit
def _parse(held, k, ESCAPE: tl.constexpr):
    """The distance that `held` begins with, and its bits."""
    low12 = (held & ((1 << ESCAPE) - 1)).to(tl.int32)
    q = _log2(~low12 & (low12 + 1))
    low = ((held >> (q + 1).to(tl.int64)).to(tl.int32)) & ((1 << k) - 1)
    escaped = (held >> ESCAPE).to(tl.int32) & 0xFFFF
    z = tl.where(q < ESCAPE, (q << k) | low, escaped)
    return z, tl.where(q < ESCAPE, q + 1 + k, ESCAPE + 16)


@triton.jit
def _take(
    before, at, inside, chosen, limit, flagged, quiet, held, have, taken, message, weights,
    SHIFT: tl.constexpr, MASK: tl.constexpr, ESCAPE: tl.constexpr,
):  # fmt: skip
    """Read a weight, behind its group's bit where it is `flagged`, and write it."""
    exponent = (before >> SHIFT) & MASK
    k = _clamp(chosen - exponent)
    rare = exponent > limit
    # What is not there reads as zeros, so a code that is cut says more bits than there are.
    silent = tl.where(flagged > 0, (held & 1) == 0, quiet)
    z, length = _parse(held >> flagged.to(tl.int64), k, ESCAPE)
    length = tl.where(inside & ((silent & rare) == 0), length, 0) + flagged
    lacks = length > have
    needs = lacks.to(tl.int32)
    place = taken + tl.cumsum(needs, 0) - 1
    word = tl.load(message + place, lacks, other=0).to(tl.int64) & 0xFFFFFFFF
    held = held | (word << have.to(tl.int64))
    have += 32 * needs
    silent = tl.where(flagged > 0, (held & 1) == 0, quiet)
    z, length = _parse(held >> flagged.to(tl.int64), k, ESCAPE)
    there = inside & ((silent & rare) == 0)
    z = tl.where(there, z, 0)
    length = tl.where(there, length, 0) + flagged
    number = (_ordered(before) + ((z >> 1) ^ -(z & 1))) & 0xFFFF
    after = number ^ tl.where(number >= 0x8000, 0x8000, 0xFFFF)
    tl.store(_raw(weights) + at, after.to(tl.int16), inside)
    return silent, held >> length.to(tl.int64), have - length, taken + tl.sum(needs)


@triton.jit
def _decode(
    message,
    first,
    weights,
    n,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    ESCAPE: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
):
    tile = tl.program_id(0)
    header = tl.load(message + tile)
    if header >= 1024:
        chosen = header & 511
        limit = tl.where((header & 512) > 0, chosen, 1 << 20)
        start = tile.to(tl.int64) * (STEPS * LANES) + tl.arange(0, LANES)
        taken = tl.load(first + tile)
        have = tl.zeros([LANES], tl.int32)
        held = tl.zeros([LANES], tl.int64)
        none = tl.zeros([LANES], tl.int32)
        for group in range(STEPS // 4):
            at0 = start + group * (4 * LANES)
            at1, at2, at3 = at0 + LANES, at0 + 2 * LANES, at0 + 3 * LANES
            i0, i1, i2, i3 = at0 < n, at1 < n, at2 < n, at3 < n
            b0, b1 = _bits(weights, at0, i0), _bits(weights, at1, i1)
            b2, b3 = _bits(weights, at2, i2), _bits(weights, at3, i3)
            flagged = (((b0 >> SHIFT) & MASK) > limit) | (((b1 >> SHIFT) & MASK) > limit)
            flagged |= (((b2 >> SHIFT) & MASK) > limit) | (((b3 >> SHIFT) & MASK) > limit)
            # Without a rare weight, whether they are quiet is not asked.
            quiet, held, have, taken = _take(
                b0, at0, i0, chosen, limit, flagged.to(tl.int32), flagged, held, have, taken,
                message, weights, SHIFT, MASK, ESCAPE,
            )  # fmt: skip
            _, held, have, taken = _take(
                b1, at1, i1, chosen, limit, none, quiet, held, have, taken,
                message, weights, SHIFT, MASK, ESCAPE,
            )  # fmt: skip
            _, held, have, taken = _take(
                b2, at2, i2, chosen, limit, none, quiet, held, have, taken,
                message, weights, SHIFT, MASK, ESCAPE,
            )  # fmt: skip
            _, held, have, taken = _take(
                b3, at3, i3, chosen, limit, none, quiet, held, have, taken,
                message, weights, SHIFT, MASK, ESCAPE,
            )  # fmt: skip


def plan(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """`differences.plan` for CUDA tensors: only enqueues, on the current stream."""
    n, count = old.numel(), tiles(old.numel())
    headers = torch.empty(count, dtype=torch.int32, device=old.device)
    if not count:
        return headers
    shift, mask = EXPONENT[old.dtype]
    tries = HIGHEST - LOWEST + 1
    _choose[(count,)](
        new, old, headers, n, shift, mask, ESCAPE, LOWEST, tries, STEPS, LANES, num_warps=8
    )
    return headers


def places(headers: torch.Tensor, said: torch.Tensor) -> torch.Tensor:
    """`differences.places` for CUDA tensors: one launch, on the current stream."""
    first = torch.empty(headers.numel(), dtype=torch.int64, device=headers.device)
    _places[(1,)](headers, first, said, headers.numel(), said.numel(), BLOCK, num_warps=8)
    return first


def write(
    new: torch.Tensor,
    old: torch.Tensor,
    headers: torch.Tensor,
    first: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """`differences.write` for CUDA tensors: one launch, on the current stream."""
    count = headers.numel()
    if not count:
        return
    shift, mask = EXPONENT[old.dtype]
    _encode[(count,)](
        new, old, headers, first, out, old.numel(), shift, mask, ESCAPE, STEPS, LANES, num_warps=1
    )


def read(message: torch.Tensor, weights: torch.Tensor) -> None:
    """`differences.read` for CUDA tensors: only enqueues, on the current stream."""
    n, count = weights.numel(), tiles(weights.numel())
    if not count:
        return
    shift, mask = EXPONENT[weights.dtype]
    first = torch.empty(count, dtype=torch.int64, device=message.device)
    _places[(1,)](message, first, first, count, 0, BLOCK, num_warps=8)
    _decode[(count,)](message, first, weights, n, shift, mask, ESCAPE, STEPS, LANES, num_warps=1)
