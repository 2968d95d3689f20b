"""Gradients as 4-bit integers in blocks of 256, each with a float32 scale: 4.125 bits an entry.

`code = round(value * 7 / largest)`, from -7 to 7, to the nearest, halves to the even one. Not at
random as INT8 does: with four bits noise would be as large as most gradients, and what rounding
takes away stays in the residual anyway (error feedback; Karimireddy et al., arXiv 1901.09847). So
there is no form of this without a residual.

Two codes are a byte: the low half holds entry i of the block and the high half entry i + 128, both
plus 8, so that a kernel reads and writes whole rows and never moves lanes.

Two implementations of one definition: the references here in plain torch, which CPU tensors use
too, and `triton_int4` beside it for GPU tensors. A block that holds something not finite has the
scale NaN and arrives as NaN, its finite entries stay in the residual; a block whose largest entry
is below 2^-100 is sent as zeros and stays in the residual.
"""

from __future__ import annotations

import torch

BLOCK = 256
HALF = BLOCK // 2
_INFINITY = 0x7F800000
_SMALLEST = 27 << 23


def room(n: int, parts: int = 1) -> int:
    """Entries for `n` values in `parts` equal parts of whole blocks."""
    return -(-n // (BLOCK * parts)) * BLOCK * parts


def quantize_reference(
    values: torch.Tensor,
    residual: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    left: torch.Tensor | None = None,
) -> None:
    """See `quantize`."""
    n, m = values.numel(), 2 * codes.numel()
    total = values.float() + residual.float()
    rows = torch.nn.functional.pad(total, (0, m - n)).view(-1, BLOCK)
    most = (rows.view(torch.int32) & 0x7FFFFFFF).amax(1)
    largest = most.view(torch.float32)
    usable = (most >= _SMALLEST) & (most < _INFINITY)
    # Python scalars divide in double precision on a CPU; the definition is in float32.
    levels = torch.tensor(7.0, device=rows.device)
    inverse = torch.where(usable, levels / largest, 0.0).unsqueeze(1)
    step = torch.where(usable, largest / levels, 0.0).unsqueeze(1)
    scales.copy_(torch.where(most >= _INFINITY, torch.nan, step.squeeze(1)))
    # Adding 0 makes -0 a 0, which is what a kernel has.
    rounded = (rows * inverse).round_().nan_to_num_(nan=0.0).clamp_(-7, 7).add_(0.0)
    stored = (rounded + 8).to(torch.uint8)
    codes.view(-1, HALF).copy_(stored[:, :HALF] | (stored[:, HALF:] << 4))
    away = rows - rounded * step
    away = torch.where(away.isfinite(), away, 0.0).view(-1)[:n]
    (residual if left is None else left).copy_(away)


def dequantize_sum_reference(
    codes: torch.Tensor,
    scales: torch.Tensor,
    factor: float,
    out: torch.Tensor,
    own: torch.Tensor | None = None,
) -> None:
    """See `dequantize_sum`."""
    total = torch.zeros(scales.shape[1], BLOCK, device=out.device)
    for rank_codes, rank_scales in zip(codes, scales, strict=True):
        packed = rank_codes.view(-1, HALF)
        halves = torch.cat([packed & 15, packed >> 4], dim=1)
        total += (halves.float() - 8) * rank_scales.unsqueeze(1)
    total = total.view(-1)[: out.numel()] * factor
    out.copy_(total if own is None else total + own)


def quantize(
    values: torch.Tensor,
    residual: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    left: torch.Tensor | None = None,
) -> None:
    """Write `values` + `residual` as codes and scales; `left` <- what rounding took away.

    `values`, `residual`, `left` [n], any floating dtypes; without `left`, `residual` keeps it.
    `codes` [m / 2] uint8, m a multiple of 256 that holds n; `scales` [m / 256] float32. On a GPU
    one pass.
    """
    if values.device.type == "cpu":
        if values.numel():
            quantize_reference(values, residual, codes, scales, left)
        return
    from evener.comm.codecs import triton_int4

    triton_int4.quantize(values, residual, codes, scales, left)


def dequantize_sum(
    codes: torch.Tensor,
    scales: torch.Tensor,
    factor: float,
    out: torch.Tensor,
    own: torch.Tensor | None = None,
) -> None:
    """`out` [n] = `factor` times the sum over ranks, in rank order, of codes times scales; + `own`.

    `codes`: uint8 [ranks, m / 2]; `scales`: float32 [ranks, m / 256]; `out`, `own`: any floating
    dtype. Rows may be strided. Added in float32. On a GPU one pass.
    """
    if out.device.type == "cpu":
        if out.numel():
            dequantize_sum_reference(codes, scales, factor, out, own)
        return
    from evener.comm.codecs import triton_int4

    triton_int4.dequantize_sum(codes, scales, factor, out, own)
