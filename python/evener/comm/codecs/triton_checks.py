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
def _sum(weights, block, n, BLOCK: tl.constexpr):
    words = weights.to(tl.pointer_type(tl.int64), bitcast=True)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return tl.sum(tl.load(words + at, at < n, other=0) * (2 * at + 1))


@triton.jit
def _add(weights, into, n, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    tl.atomic_add(into, _sum(weights, block, n, BLOCK))


@triton.jit(do_not_specialize=["place"])
def _hold(weights, stated, off, place, n, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    total = _sum(weights, block, n, BLOCK)
    tl.atomic_add(off + place, total - tl.where(block == 0, tl.load(stated), 0))


@triton.jit
def _tell(weights, off, into, n, many, MANY: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    tl.atomic_add(into, _sum(weights, block, n, BLOCK))
    if block == 0:
        place = tl.arange(0, MANY)
        wrong = tl.load(off + place, place < many, other=0) != 0
        tl.store(into + 1, tl.sum(wrong.to(tl.int64)))
        tl.store(off + place, tl.zeros([MANY], tl.int64), place < many)


def add(weights: torch.Tensor, into: torch.Tensor) -> None:
    """`into`, int64 of one element, += the checksum of `weights`: whole words. Only enqueues."""
    n = weights.nbytes // 8
    _add[(-(-n // BLOCK),)](weights, into, n, BLOCK, num_warps=8)


def hold(weights: torch.Tensor, stated: torch.Tensor, off: torch.Tensor, place: int) -> None:
    """`checks.hold` for whole words on a GPU: one launch, on the current stream."""
    n = weights.nbytes // 8
    _hold[(-(-n // BLOCK),)](weights, stated, off, place, n, BLOCK, num_warps=8)


def tell(weights: torch.Tensor, off: torch.Tensor, into: torch.Tensor) -> None:
    """`checks.tell` for whole words on a GPU: one launch, on the current stream."""
    n, many = weights.nbytes // 8, off.numel()
    power = 1 << (many - 1).bit_length()
    _tell[(-(-n // BLOCK),)](weights, off, into, n, many, power, BLOCK, num_warps=8)
