"""`evener.moe.grouped` in Triton, for GPUs on which torch's grouped_mm is a loop.

How many tiles each expert has is known on the device only. So the grid is the most there can be
(rows / M + experts), and each program finds its expert in the prefix sum of the tiles; programs
past the last tile end at once.
"""

# Triton's kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _times(
    x, matrices, ends, out, experts, n, k, x_row, of_expert, of_k, of_n,
    EXPERTS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    each = tl.arange(0, EXPERTS)
    end = tl.load(ends + each, each < experts, other=0)
    begin = tl.load(ends + each - 1, (each > 0) & (each < experts), other=0)
    tiles = tl.where(each < experts, (end - begin + M - 1) // M, 0)
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum((upto <= tile).to(tl.int32), 0)
    if expert < experts:
        mine = each == expert
        first = tl.sum(tl.where(mine, begin, 0), 0)
        last = tl.sum(tl.where(mine, end, 0), 0)
        tile -= tl.sum(tl.where(mine, upto - tiles, 0), 0)
        row = first + tile * M + tl.arange(0, M)
        col = tl.program_id(1) * N + tl.arange(0, N)
        inside = (row < last)[:, None]
        matrix = matrices + expert.to(tl.int64) * of_expert
        total = tl.zeros([M, N], tl.float32)
        for start in range(0, k, K):
            at = start + tl.arange(0, K)
            a = tl.load(x + row.to(tl.int64)[:, None] * x_row + at[None, :],
                        inside & (at < k)[None, :], other=0.0)  # fmt: skip
            b = tl.load(matrix + at.to(tl.int64)[:, None] * of_k + col.to(tl.int64)[None, :] * of_n,
                        (at < k)[:, None] & (col < n)[None, :], other=0.0)  # fmt: skip
            total = tl.dot(a, b, total, input_precision="ieee")
        place = out + row.to(tl.int64)[:, None] * n + col[None, :]
        tl.store(place, total.to(out.dtype.element_ty), inside & (col < n)[None, :])


@triton.jit
def _outer(
    a, b, ends, out, n, k, a_row, b_row,
    ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(2)
    last = tl.load(ends + expert)
    first = tl.load(ends + expert - 1, expert > 0, other=0)
    left = tl.program_id(0) * N + tl.arange(0, N)
    right = tl.program_id(1) * K + tl.arange(0, K)
    total = tl.zeros([N, K], tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None]
        inside = (row < last)[:, None]
        x = tl.load(a + at * a_row + left[None, :], inside & (left < n)[None, :], other=0.0)
        y = tl.load(b + at * b_row + right[None, :], inside & (right < k)[None, :], other=0.0)
        total = tl.dot(tl.trans(x), y, total, input_precision="ieee")
    place = out + expert.to(tl.int64) * n * k + left.to(tl.int64)[:, None] * k + right[None, :]
    inside = (left < n)[:, None] & (right < k)[None, :]
    tl.store(place, total.to(out.dtype.element_ty), inside)


def _tile(size: int, most: int) -> int:
    return min(most, max(16, int(triton.next_power_of_2(size))))


def times(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """See `grouped.times`; `matrices`: [experts, k, n], of any strides."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (rows, k), (experts, _, n) = x.shape, matrices.shape
    out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    if out.numel():
        narrow = 32 if x.dtype == torch.float32 else 64
        size = {"M": _tile(rows, 2 * narrow), "N": _tile(n, 2 * narrow), "K": _tile(k, narrow)}
        grid = (triton.cdiv(rows, size["M"]) + experts, triton.cdiv(n, size["N"]))
        _times[grid](
            x, matrices, ends, out, experts, n, k, x.stride(0), *matrices.stride(),
            triton.next_power_of_2(experts), **size, num_warps=8, num_stages=3,
        )  # fmt: skip
    return out


def outer(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """See `grouped.outer`."""
    a = a if a.stride(1) == 1 else a.contiguous()
    b = b if b.stride(1) == 1 else b.contiguous()
    n, k, experts = a.shape[1], b.shape[1], len(ends)
    out = torch.empty(experts, n, k, dtype=a.dtype, device=a.device)
    if out.numel():
        narrow = 32 if a.dtype == torch.float32 else 64
        size = {"N": _tile(n, 2 * narrow), "K": _tile(k, 2 * narrow)}
        grid = (triton.cdiv(n, size["N"]), triton.cdiv(k, size["K"]), experts)
        _outer[grid](
            a, b, ends, out, n, k, a.stride(0), b.stride(0), narrow, **size,
            num_warps=8, num_stages=3,
        )  # fmt: skip
    return out
