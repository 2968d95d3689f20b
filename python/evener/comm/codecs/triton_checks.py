"""`evener.comm.codecs.checks` on a GPU: one pass, and one launch.

Sums modulo 2^64 come out alike in any order, so blocks add to the result as they end. Grids are
plain divisions: `triton.cdiv` takes the host as long as the launch.
"""

# Triton's kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _load(weights, at, n, KIND: tl.constexpr):
    bits = weights.to(tl.pointer_type(KIND), bitcast=True)
    return tl.load(bits + at, at < n, other=0).to(tl.int64)


@triton.jit
def _sum(weights, block, n, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """A block's share. It is loaded in words, or weight by weight where `EACH` make a word."""
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if EACH == 1:
        found = _load(weights, at, n, tl.int64) * (2 * at + 1)
    else:
        if EACH == 2:
            value = _load(weights, at, n, tl.int32)
        elif EACH == 4:
            value = _load(weights, at, n, tl.int16)
        else:
            value = _load(weights, at, n, tl.uint8)
        width: tl.constexpr = 64 // EACH
        part = (value & ((1 << width) - 1)) << (at % EACH * width)
        word, whole = at // EACH, n // EACH
        # What is left behind the last word counts by itself.
        rest = value * (3 + at - whole * EACH)
        found = tl.where(word < whole, part * (2 * word + 1), rest)
    return tl.sum(found)


@triton.jit
def _add(weights, into, n, EACH: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    tl.atomic_add(into, _sum(weights, block, n, EACH, BLOCK))


@triton.jit(do_not_specialize=["place"])
def _hold(weights, stated, off, place, n, EACH: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    total = _sum(weights, block, n, EACH, BLOCK)
    tl.atomic_add(off + place, total - tl.where(block == 0, tl.load(stated), 0))


@triton.jit
def _tell(weights, off, into, n, many, MANY: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    tl.atomic_add(into, _sum(weights, block, n, EACH, BLOCK))
    if block == 0:
        place = tl.arange(0, MANY)
        wrong = tl.load(off + place, place < many, other=0) != 0
        tl.store(into + 1, tl.sum(wrong.to(tl.int64)))
        tl.store(off + place, tl.zeros([MANY], tl.int64), place < many)


def _cut(weights: torch.Tensor) -> tuple[int, int]:
    """How many are loaded, and how many of them are a word: 1 where whole words lie aligned."""
    if weights.nbytes % 8 or weights.data_ptr() % 8:
        return weights.numel(), 8 // weights.element_size()
    return weights.nbytes // 8, 1


def add(weights: torch.Tensor, into: torch.Tensor) -> None:
    """`into`, int64 of one element, += the checksum of `weights`. Only enqueues."""
    n, each = _cut(weights)
    _add[(-(-n // BLOCK),)](weights, into, n, each, BLOCK, num_warps=8)


def hold(weights: torch.Tensor, stated: torch.Tensor, off: torch.Tensor, place: int) -> None:
    """`checks.hold` on a GPU: one launch, on the current stream."""
    n, each = _cut(weights)
    _hold[(-(-n // BLOCK),)](weights, stated, off, place, n, each, BLOCK, num_warps=8)


def tell(weights: torch.Tensor, off: torch.Tensor, into: torch.Tensor) -> None:
    """`checks.tell` on a GPU: one launch, on the current stream."""
    (n, each), many = _cut(weights), off.numel()
    power = 1 << (many - 1).bit_length()
    _tell[(-(-n // BLOCK),)](weights, off, into, n, many, power, each, BLOCK, num_warps=8)
