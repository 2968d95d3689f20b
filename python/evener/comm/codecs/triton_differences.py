"""`evener.comm.codecs.differences` on a GPU, in Triton.

A program is one warp that codes a tile: its lanes are the 32 lanes of the stream, so where the next
words of all lanes lie is a sum over the warp. Nothing is shared between programs and nothing is
atomic. Headers come first (`plan`), since a program has to know where its words begin.
"""

# Triton's kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from evener.comm.codecs.rice import ESCAPE, EXPONENT, HIGHEST, LANES, LOWEST, STEPS, TILE, tiles


@triton.jit
def _bits(weights, at, inside):
    return tl.load(weights + at, inside, other=0).to(tl.int32) & 0xFFFF


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
    TILE: tl.constexpr,
):
    """K of each tile, with its lowest word bit set where something changed."""
    tile = tl.program_id(0)
    at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < n
    before = _bits(old, at, inside)
    z = _zigzag(_bits(new, at, inside), before)
    exponent = (before >> SHIFT) & MASK
    changed = z > 0
    count = tl.sum(changed.to(tl.int32))
    wanted = tl.where(changed, _log2(tl.maximum(z, 1)) + exponent, 0)
    middle = tl.sum(wanted) // tl.maximum(count, 1)
    best = tl.full([], 1 << 30, tl.int32)
    chosen = tl.zeros([], tl.int32)
    for shift in tl.static_range(TRIES):
        tried = tl.maximum(middle + LOWEST + shift, 0)
        length = tl.where(inside, _length(z, _clamp(tried - exponent), ESCAPE), 0)
        bits = tl.sum(length)
        chosen = tl.where(bits < best, tried, chosen)
        best = tl.minimum(bits, best)
    tl.store(headers + tile, chosen | tl.where(count > 0, 512, 0))


@triton.jit
def _encode(
    new,
    old,
    headers,
    first,
    out,
    n,
    WRITE: tl.constexpr,
    SHIFT: tl.constexpr,
    MASK: tl.constexpr,
    ESCAPE: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Count a tile's words into its header, or write them."""
    tile = tl.program_id(0)
    header = tl.load(headers + tile)
    if header >= 512:
        chosen = header & 511
        lane = tl.arange(0, LANES)
        start = tile.to(tl.int64) * (STEPS * LANES)
        taken = tl.zeros([], tl.int64)
        if WRITE:
            taken = tl.load(first + tile)
        begun = taken
        have = tl.zeros([LANES], tl.int32)
        filled = tl.zeros([LANES], tl.int32)
        held = tl.zeros([LANES], tl.int64)
        here = tl.full([LANES], -1, tl.int64)
        after = tl.full([LANES], -1, tl.int64)
        for step in range(STEPS):
            at = start + step * LANES + lane
            inside = at < n
            before = _bits(old, at, inside)
            z = _zigzag(_bits(new, at, inside), before)
            k = _clamp(chosen - ((before >> SHIFT) & MASK))
            length = tl.where(inside, _length(z, k, ESCAPE), 0)
            needs = (have < 32).to(tl.int32)
            sums = tl.cumsum(needs, 0)
            if WRITE:
                place = taken + sums - needs
                q = z >> k
                capped = tl.minimum(q, ESCAPE)
                ones = (1 << capped) - 1
                low = (z & ((1 << k) - 1)) << (capped + 1)
                code = tl.where(q < ESCAPE, ones | low, ones | (z << ESCAPE))
                code = tl.where(inside, code, 0).to(tl.int64)
                empty = here < 0
                after = tl.where((needs > 0) & ~empty, place, after)
                here = tl.where((needs > 0) & empty, place, here)
                held = held | (code << filled.to(tl.int64))
                filled += length
                full = filled >= 32
                tl.store(out + here, held.to(tl.int32), full)
                held = tl.where(full, held >> 32, held)
                filled = tl.where(full, filled - 32, filled)
                here = tl.where(full, after, here)
                after = tl.where(full, -1, after)
            taken += tl.sum(needs)
            have += 32 * needs - length
        if WRITE:
            tl.store(out + here, held.to(tl.int32), here >= 0)
            tl.store(out + after, tl.zeros([LANES], tl.int32), after >= 0)
        else:
            tl.store(headers + tile, (taken - begun).to(tl.int32) * 512 + chosen)


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
    if header >= 512:
        chosen = header & 511
        lane = tl.arange(0, LANES)
        start = tile.to(tl.int64) * (STEPS * LANES)
        taken = tl.load(first + tile)
        have = tl.zeros([LANES], tl.int32)
        held = tl.zeros([LANES], tl.int64)
        for step in range(STEPS):
            at = start + step * LANES + lane
            inside = at < n
            before = _bits(weights, at, inside)
            k = _clamp(chosen - ((before >> SHIFT) & MASK))
            lacks = have < 32
            needs = lacks.to(tl.int32)
            place = taken + tl.cumsum(needs, 0) - needs
            word = tl.load(message + place, lacks, other=0).to(tl.int64) & 0xFFFFFFFF
            taken += tl.sum(needs)
            held = held | (word << have.to(tl.int64))
            have += 32 * needs
            low12 = (held & ((1 << ESCAPE) - 1)).to(tl.int32)
            q = _log2(~low12 & (low12 + 1))
            low = ((held >> (q + 1).to(tl.int64)).to(tl.int32)) & ((1 << k) - 1)
            escaped = (held >> ESCAPE).to(tl.int32) & 0xFFFF
            z = tl.where(q < ESCAPE, (q << k) | low, escaped)
            z = tl.where(inside, z, 0)
            length = tl.where(inside, _length(z, k, ESCAPE), 0)
            held = held >> length.to(tl.int64)
            have -= length
            number = (_ordered(before) + ((z >> 1) ^ -(z & 1))) & 0xFFFF
            after = number ^ tl.where(number >= 0x8000, 0x8000, 0xFFFF)
            tl.store(weights + at, after.to(tl.int16), inside)


def plan(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """`differences.plan` for CUDA tensors: only enqueues, on the current stream."""
    n, count = old.numel(), tiles(old.numel())
    headers = torch.empty(count, dtype=torch.int32, device=old.device)
    if not count:
        return headers
    shift, mask = EXPONENT[old.dtype]
    new, old = new.view(torch.int16), old.view(torch.int16)
    tries = HIGHEST - LOWEST + 1
    _choose[(count,)](new, old, headers, n, shift, mask, ESCAPE, LOWEST, tries, TILE, num_warps=8)
    _encode[(count,)](
        new,
        old,
        headers,
        headers,
        headers,
        n,
        False,
        shift,
        mask,
        ESCAPE,
        STEPS,
        LANES,
        num_warps=1,
    )
    return headers


def write(new: torch.Tensor, old: torch.Tensor, headers: torch.Tensor, out: torch.Tensor) -> None:
    """`differences.write` for CUDA tensors: only enqueues, on the current stream."""
    count = headers.numel()
    if not count:
        return
    out[:count].copy_(headers)
    shift, mask = EXPONENT[old.dtype]
    n, new, old = old.numel(), new.view(torch.int16), old.view(torch.int16)
    _encode[(count,)](
        new,
        old,
        headers,
        _first(headers),
        out,
        n,
        True,
        shift,
        mask,
        ESCAPE,
        STEPS,
        LANES,
        num_warps=1,
    )


def read(message: torch.Tensor, weights: torch.Tensor) -> None:
    """`differences.read` for CUDA tensors: only enqueues, on the current stream."""
    count = tiles(weights.numel())
    if not count:
        return
    shift, mask = EXPONENT[weights.dtype]
    n, bits = weights.numel(), weights.view(torch.int16)
    first = _first(message[:count])
    _decode[(count,)](message, first, bits, n, shift, mask, ESCAPE, STEPS, LANES, num_warps=1)


def _first(headers: torch.Tensor) -> torch.Tensor:
    """Where each tile's words begin in the message."""
    words = (headers >> 9).to(torch.int64)
    return words.cumsum(0) - words + headers.numel()
