"""Gradients as 8-bit integers in blocks of 1,024, each with a float32 scale.

`code = floor(value * 127 / largest + u)`, clamped to +-127, with u uniform in [0, 1) from a hash of
(key, index): rounding is right on the mean, and the same bits come out on every machine. Block-wise
scaling: Dettmers et al., arXiv 2110.02861; stochastic rounding: Alistarh et al., arXiv 1610.02132;
the hash: lowbias32 by C. Wellons.

Three implementations of one definition: the references here in plain torch,
crates/kernels/src/int8.rs for CPU tensors, `triton_int8` beside it for GPU tensors. A block that
holds something not finite has the scale NaN and arrives as NaN, its finite entries stay in the
residual; a block whose largest entry is below 2^-100 is sent as zeros.
"""

from __future__ import annotations

import torch

from evener.base import kernels as _kernels

BLOCK = _kernels.BLOCK
_INFINITY = 0x7F800000
_SMALLEST = 27 << 23
_MASK = 0xFFFFFFFF


def room(n: int, parts: int = 1) -> int:
    """Codes for `n` values in `parts` equal parts of whole blocks."""
    return -(-n // (BLOCK * parts)) * BLOCK * parts


def mix(x: int) -> int:
    """lowbias32: 32 bits in, 32 well-mixed bits out."""
    x ^= x >> 16
    x = x * 0x7FEB352D & _MASK
    x ^= x >> 15
    x = x * 0x846CA68B & _MASK
    return x ^ (x >> 16)


def key(*words: int) -> int:
    """One key from step, bucket, rank and whatever else tells two streams apart."""
    found = 0x9E3779B9
    for word in words:
        found = mix(found ^ (word & _MASK)) + 0x9E3779B9 & _MASK
    return found


def quantize_reference(
    values: torch.Tensor,
    residual: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    key: int,
    left: torch.Tensor | None = None,
) -> None:
    """See `quantize`."""
    n, m = values.numel(), codes.numel()
    total = values.float() if residual is None else values.float() + residual.float()
    rows = torch.nn.functional.pad(total, (0, m - n)).view(-1, BLOCK)
    most = (rows.view(torch.int32) & 0x7FFFFFFF).amax(1)
    largest = most.view(torch.float32)
    usable = (most >= _SMALLEST) & (most < _INFINITY)
    # Python scalars divide in double precision on a CPU; the definition is in float32.
    levels = torch.tensor(127.0, device=rows.device)
    inverse = torch.where(usable, levels / largest, 0.0).unsqueeze(1)
    step = torch.where(usable, largest / levels, 0.0).unsqueeze(1)
    scales.copy_(torch.where(most >= _INFINITY, torch.nan, step.squeeze(1)))
    x = torch.arange(m, dtype=torch.int64, device=rows.device) ^ key
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D & _MASK
    x = x ^ (x >> 15)
    x = x * 0x846CA68B & _MASK
    uniform = ((x ^ (x >> 16)) >> 8).float() * (1.0 / 16777216.0)
    rounded = (rows * inverse + uniform.view(-1, BLOCK)).floor().clamp(-127, 127)
    rounded = rounded.nan_to_num(nan=0.0)
    rounded.view(-1)[n:] = 0
    codes.copy_(rounded.view(-1))
    if residual is not None:
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
    total = torch.zeros(codes.shape[1], device=out.device)
    for rank_codes, rank_scales in zip(codes, scales, strict=True):
        total += (rank_codes.view(-1, BLOCK).float() * rank_scales.unsqueeze(1)).view(-1)
    total = total[: out.numel()] * factor
    out.copy_(total if own is None else total + own)


def quantize(
    values: torch.Tensor,
    residual: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    key: int,
    left: torch.Tensor | None = None,
) -> None:
    """Write `values` + `residual` as codes and scales; `left` <- what rounding took away.

    `values`, `left` [n], any floating dtypes; `residual` [n] or None, float32, or with `left` any
    floating dtype; without `left`, `residual` keeps it. `codes` [m] int8, m a multiple of 1024 that
    holds n, 0 past the values; `scales` [m / 1024] float32; `key`: 32 bits. One pass.
    """
    if values.device.type == "cpu":
        kept = residual
        if residual is not None and left is not None:
            kept = residual.to(torch.float32, copy=True)
        _kernels.int8_quantize(values.float(), kept, codes, scales, key)
        if kept is not None and left is not None:
            left.copy_(kept)
        return
    from evener.comm.codecs import triton_int8

    triton_int8.quantize(values, residual, codes, scales, key, left)


def dequantize_sum(
    codes: torch.Tensor,
    scales: torch.Tensor,
    factor: float,
    out: torch.Tensor,
    own: torch.Tensor | None = None,
) -> None:
    """`out` [n] = `factor` times the sum over ranks, in rank order, of codes times scales; + `own`.

    `codes`: int8 [ranks, m]; `scales`: float32 [ranks, m / 1024]; `out`, `own`: any floating dtype.
    Rows may be strided. Added in float32. One pass on a GPU, and on a CPU without `own`.
    """
    if out.device.type == "cpu":
        plain = own is None and out.dtype == torch.float32
        total = out if plain else torch.empty(out.numel())
        _kernels.int8_dequantize_sum(codes.contiguous(), scales.contiguous(), factor, total)
        if not plain:
            out.copy_(total if own is None else total.add_(own))
        return
    from evener.comm.codecs import triton_int8

    triton_int8.dequantize_sum(codes, scales, factor, out, own)
