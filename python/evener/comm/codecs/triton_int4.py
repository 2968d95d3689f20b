"""`evener.comm.codecs.int4` on a GPU, in Triton: one pass each way.

A program takes a few blocks of 256 as rows of a tile, in two halves, which are the two halves of a
byte. Products and sums are not fused (`enable_fp_fusion=False`) and divisions are rounded
correctly: codes, scales and residuals are the same bits as on a CPU.
"""

# Triton's kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS = 8


@triton.jit
def _magnitude(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _round(x, inverse):
    """To the nearest, halves to the even one: below 2^22 that is what adding 1.5 * 2^23 does.

    What is not finite must not reach the cast to an integer, where it means nothing.
    """
    finite = tl.where(_magnitude(x) < 0x7F800000, x, 0.0)
    magic = 12582912.0
    rounded = (finite * inverse + magic) - magic
    return tl.minimum(tl.maximum(rounded, -7.0), 7.0)


@triton.jit
def _left(x, rounded, step):
    left = x - rounded * step
    return tl.where(_magnitude(left) < 0x7F800000, left, 0.0)


@triton.jit
def _quantize(
    values, residual, kept, codes, scales, n, blocks, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    HALF: tl.constexpr = BLOCK // 2  # noqa: N806
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, HALF)[None, :]
    low = row[:, None].to(tl.int64) * BLOCK + place
    high = low + HALF
    in_low, in_high = low < n, high < n
    a = tl.load(values + low, in_low, other=0.0).to(tl.float32)
    a += tl.load(residual + low, in_low, other=0.0).to(tl.float32)
    b = tl.load(values + high, in_high, other=0.0).to(tl.float32)
    b += tl.load(residual + high, in_high, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(_magnitude(a), 1), tl.max(_magnitude(b), 1))
    infinity = 0x7F800000
    usable = (most >= 27 << 23) & (most < infinity)
    largest = tl.where(usable, most, 0x3F800000).to(tl.float32, bitcast=True)
    levels = tl.full([ROWS], 7.0, tl.float32)
    inverse = tl.where(usable, tl.div_rn(levels, largest), 0.0)[:, None]
    step = tl.where(usable, tl.div_rn(largest, levels), 0.0)
    tl.store(scales + row, tl.where(most >= infinity, float("nan"), step), row < blocks)
    first, second = _round(a, inverse), _round(b, inverse)
    packed = (first + 8.0).to(tl.int32) | ((second + 8.0).to(tl.int32) << 4)
    at = row[:, None].to(tl.int64) * HALF + place
    tl.store(codes + at, packed.to(tl.uint8), (row < blocks)[:, None] & (place < HALF))
    kind = kept.dtype.element_ty
    tl.store(kept + low, _left(a, first, step[:, None]).to(kind), in_low)
    tl.store(kept + high, _left(b, second, step[:, None]).to(kind), in_high)


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
    HALF: tl.constexpr = BLOCK // 2  # noqa: N806
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, HALF)[None, :]
    low = row[:, None].to(tl.int64) * BLOCK + place
    at = row[:, None].to(tl.int64) * HALF + place
    exists = row.to(tl.int64) * BLOCK < n
    inside = exists[:, None] & (place < HALF)
    first = tl.zeros([ROWS, HALF], tl.float32)
    second = tl.zeros([ROWS, HALF], tl.float32)
    peer = tl.zeros([], tl.int64)
    while peer < peers:
        scale = tl.load(scales + peer * scale_stride + row, exists, other=0.0)[:, None]
        packed = tl.load(codes + peer * code_stride + at, inside, other=0).to(tl.int32)
        first += ((packed & 15).to(tl.float32) - 8.0) * scale
        second += ((packed >> 4).to(tl.float32) - 8.0) * scale
        peer += 1
    kind = out.dtype.element_ty
    high = low + HALF
    first *= factor
    second *= factor
    if OWN:
        first += tl.load(own + low, low < n, other=0.0).to(tl.float32)
        second += tl.load(own + high, high < n, other=0.0).to(tl.float32)
    tl.store(out + low, first.to(kind), low < n)
    tl.store(out + high, second.to(kind), high < n)


def quantize(
    values: torch.Tensor,
    residual: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    left: torch.Tensor | None = None,
) -> None:
    """`evener.comm.codecs.int4.quantize` for CUDA tensors: only enqueues, on the current stream."""
    blocks = scales.numel()
    if not blocks:
        return
    block = 2 * codes.numel() // blocks  # two codes per byte
    _quantize[(-(-blocks // ROWS),)](
        values,
        residual,
        residual if left is None else left,
        codes,
        scales,
        values.numel(),
        blocks,
        ROWS,
        block,
        num_warps=4,
        enable_fp_fusion=False,
    )


def dequantize_sum(
    codes: torch.Tensor,
    scales: torch.Tensor,
    factor: float,
    out: torch.Tensor,
    own: torch.Tensor | None = None,
) -> None:
    """`evener.comm.codecs.int4.dequantize_sum` for CUDA tensors."""
    n = out.numel()
    if not n:
        return
    block = 2 * codes.shape[1] // scales.shape[1]
    _dequantize_sum[(-(-n // (ROWS * block)),)](
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
        block,
        num_warps=4,
        enable_fp_fusion=False,
    )
