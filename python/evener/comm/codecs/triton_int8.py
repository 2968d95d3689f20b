"""`evener.comm.codecs.int8` on a GPU, in Triton: one pass each way.

A program takes a few blocks of 1,024 as rows of a tile, so that a scale is a reduction along the
rows, in registers. Products and sums are not fused (`enable_fp_fusion=False`) and divisions are
rounded correctly: the codes, scales and residuals are the same bits as on a CPU.
"""

# Triton's kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from evener.base.kernels import BLOCK

ROWS = 4


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["key"])
def _quantize(
    values,
    residual,
    kept,
    codes,
    scales,
    key,
    n,
    blocks,
    FEEDBACK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None].to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < n
    total = tl.load(values + at, inside, other=0.0).to(tl.float32)
    if FEEDBACK:
        total += tl.load(residual + at, inside, other=0.0).to(tl.float32)
    most = tl.max(total.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    infinity = 0x7F800000
    usable = (most >= 27 << 23) & (most < infinity)
    largest = tl.where(usable, most, 0x3F800000).to(tl.float32, bitcast=True)
    levels = tl.full([ROWS], 127.0, tl.float32)
    inverse = tl.where(usable, tl.div_rn(levels, largest), 0.0)
    step = tl.where(usable, tl.div_rn(largest, levels), 0.0)
    tl.store(scales + row, tl.where(most >= infinity, float("nan"), step), row < blocks)
    random = _mix(at.to(tl.uint32) ^ key.to(tl.uint32))
    uniform = (random >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)
    # What is not finite must not reach the cast to an integer, where it means nothing.
    finite = (total.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < infinity
    scaled = tl.where(finite, total, 0.0) * inverse[:, None]
    rounded = tl.floor(scaled + uniform)
    rounded = tl.minimum(tl.maximum(rounded, -127.0), 127.0)
    rounded = tl.where(inside & usable[:, None], rounded, 0.0)
    tl.store(codes + at, rounded.to(tl.int8), row[:, None] < blocks)
    if FEEDBACK:
        left = tl.where(finite, total - rounded * step[:, None], 0.0)
        tl.store(kept + at, left.to(kept.dtype.element_ty), inside)


@triton.jit
def _dequantize_sum(
    codes,
    scales,
    own,
    out,
    factor,
    n,
    peers,
    code_stride,
    scale_stride,
    OWN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = row[:, None].to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < n
    exists = row.to(tl.int64) * BLOCK < n
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    peer = tl.zeros([], tl.int64)
    while peer < peers:
        scale = tl.load(scales + peer * scale_stride + row, exists, other=0.0)
        code = tl.load(codes + peer * code_stride + at, inside, other=0).to(tl.float32)
        total += code * scale[:, None]
        peer += 1
    total *= factor
    if OWN:
        total += tl.load(own + at, inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), inside)


def quantize(
    values: torch.Tensor,
    residual: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    key: int,
    left: torch.Tensor | None = None,
) -> None:
    """`evener.comm.codecs.int8.quantize` for CUDA tensors: only enqueues, on the current stream."""
    blocks = codes.numel() // BLOCK
    if not blocks:
        return
    _quantize[(-(-blocks // ROWS),)](
        values,
        values if residual is None else residual,
        values if residual is None else residual if left is None else left,
        codes,
        scales,
        # Triton specialises on what fits int32; a key is 32 bits, whatever its sign.
        key - (1 << 32) if key >= 1 << 31 else key,
        values.numel(),
        blocks,
        residual is not None,
        ROWS,
        BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )


def dequantize_sum(
    codes: torch.Tensor,
    scales: torch.Tensor,
    factor: float,
    out: torch.Tensor,
    own: torch.Tensor | None = None,
) -> None:
    """`evener.comm.codecs.int8.dequantize_sum` for CUDA tensors."""
    n = out.numel()
    if not n:
        return
    _dequantize_sum[(-(-n // (ROWS * BLOCK)),)](
        codes,
        scales,
        out if own is None else own,
        out,
        float(factor),
        n,
        codes.shape[0],
        codes.stride(0),
        scales.stride(0),
        own is not None,
        ROWS,
        BLOCK,
        num_warps=8,
        enable_fp_fusion=False,
    )
