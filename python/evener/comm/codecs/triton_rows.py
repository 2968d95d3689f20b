"""`evener.comm.codecs.rows` on a GPU."""

# Triton's kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl

SMALL, BLOCK = 256, 4096


@triton.jit(do_not_specialize=["own"])
def _take(rows, own, places, sent, start, n, count, stride, BLOCK: tl.constexpr):
    node = tl.program_id(1)
    if node != own:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        row = rows + node.to(tl.int64) * n + tl.load(places + at, inside, other=0)
        target = (sent + node.to(tl.int64) * stride + start).to(rows.dtype, bitcast=True)
        tl.store(target + at, tl.load(row, inside), inside)
        tl.store(row, tl.zeros([BLOCK], rows.dtype.element_ty), inside)


@triton.jit
def _give(came, start, places, own, out, count, peers, stride, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    place = tl.load(places + at, inside, other=0)
    total = tl.load(own + place, inside, other=0.0).to(tl.float32)
    peer = tl.zeros([], tl.int64)
    while peer < peers:
        message = (came + peer * stride + start).to(own.dtype, bitcast=True)
        total += tl.load(message + at, inside, other=0.0).to(tl.float32)
        peer += 1
    before = tl.load(out + place, inside, other=0.0).to(tl.float32)
    found = tl.where(before == before, total, before)
    tl.store(out + place, found.to(out.dtype.element_ty), inside)


@triton.jit
def _keep(left, total, residual, n, BLOCK: tl.constexpr):
    found = tl.load(total)
    if found == found:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(left + at, at < n)
        tl.store(residual + at, values.to(residual.dtype.element_ty), at < n)


def take(
    rows: torch.Tensor, own: int, places: torch.Tensor, sent: torch.Tensor, start: int
) -> None:
    """`rows.take` for CUDA tensors: one launch, on the current stream."""
    (nodes, n), count = rows.shape, places.numel()
    grid = (-(-count // SMALL), nodes)
    _take[grid](rows, own, places, sent, start, n, count, sent.stride(0), SMALL, num_warps=4)


def give(
    came: torch.Tensor, start: int, places: torch.Tensor, own: torch.Tensor, out: torch.Tensor
) -> None:
    """`rows.give` for CUDA tensors: one launch, on the current stream."""
    count, peers = places.numel(), came.shape[0]
    grid = (-(-count // SMALL),)
    _give[grid](came, start, places, own, out, count, peers, came.stride(0), SMALL, num_warps=4)


def keep(left: torch.Tensor, scales: torch.Tensor, residual: torch.Tensor) -> None:
    """`rows.keep` for CUDA tensors: two launches, on the current stream.

    A sum of scales is NaN where one of them is: none is negative, so none is infinite against
    another.
    """
    n = left.numel()
    _keep[(-(-n // BLOCK),)](left, scales.sum(), residual, n, BLOCK, num_warps=8)
