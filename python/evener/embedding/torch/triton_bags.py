"""Bags of resident rows on a GPU: pooled, put into columns, and their gradients taken from there.

A collection's result is one tensor [batch, columns], in which each feature has `dim` columns. Bags
lie feature by feature, sample by sample, [features * batch, dim]: `pool` sums rows and puts bags
into columns in one kernel, `take` is the way back for gradients. A program has a bag and up to 128
of its values, and adds rows one after another in the order of ids, as torch does on a CPU.
"""

# Triton's kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, attr-defined"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from evener.embedding.torch.columns import Columns

SAMPLES = 16  # of a program of `_take`
# One warp each: there are many programs, and each waits for memory most of the time.
_SMALL: dict[str, Any] = {"num_warps": 1}


@triton.jit(do_not_specialize=["batch", "stride"])
def _pool(
    ids,  # int32 [n]
    rows,  # float32 [m, DIM]
    ends,  # int32 [bags + 1]
    columns,  # int64 [features]
    out,
    batch,
    stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    NAMED: tl.constexpr,  # whether ids say which rows a bag has, or bag i is row i
    PUT: tl.constexpr,  # whether bags go to columns
):
    bag = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < DIM
    if NAMED:
        total = tl.zeros([BLOCK], tl.float32)
        i = tl.load(ends + bag)
        end = tl.load(ends + bag + 1)
        while i < end:
            row = tl.load(ids + i).to(tl.int64)
            total += tl.load(rows + row * DIM + column, inside, other=0.0)
            i += 1
    else:
        total = tl.load(rows + bag * DIM + column, inside, other=0.0)
    begin = bag * DIM
    if PUT:
        begin = (bag % batch) * stride + tl.load(columns + bag // batch)
    tl.store(out + begin + column, total, inside)


@triton.jit(do_not_specialize=["batch", "stride"])
def _take(
    given,
    columns,  # int64 [features]
    out,  # float32 [features, batch, DIM]
    largest,  # int32 [tables]: bits of float32, which for what is not negative have its order
    tables,  # int64 [features]
    batch,
    stride,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    SAMPLES: tl.constexpr,
    BOUND: tl.constexpr,
):
    feature = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(1).to(tl.int64) * SAMPLES + tl.arange(0, SAMPLES)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = (sample < batch)[:, None] & (column < DIM)[None, :]
    begin = tl.load(columns + feature)
    g = tl.load(given + sample[:, None] * stride + begin + column[None, :], inside, other=0.0)
    to = out + (feature * batch + sample[:, None]) * DIM + column[None, :]
    tl.store(to, g, inside)
    if BOUND:
        size = tl.abs(g)
        size = tl.where(size == size, size, float("inf"))
        most = tl.max(tl.max(size, 1), 0).to(tl.int32, bitcast=True)
        tl.atomic_max(largest + tl.load(tables + feature), most)


@triton.jit
def _number(ends, out, BLOCK: tl.constexpr):
    bag = tl.program_id(0)
    i = tl.load(ends + bag)
    end = tl.load(ends + bag + 1)
    while i < end:
        at = i + tl.arange(0, BLOCK)
        tl.store(out + at, tl.zeros([BLOCK], tl.int32) + bag, at < end)
        i += BLOCK


def _block(dim: int) -> int:
    return min(128, int(triton.next_power_of_2(dim)))


def pool(
    rows: torch.Tensor,
    ids: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    to: Columns | None = None,
) -> torch.Tensor:
    """See `kernels.pool`."""
    dim, block = rows.shape[1], _block(rows.shape[1])
    bags = len(rows) if ends is None else len(ends) - 1
    rows = rows.contiguous()
    out = rows.new_empty(bags, dim) if to is None else to.out
    if bags:
        _pool[(bags, triton.cdiv(dim, block))](
            rows if ids is None else ids, rows, rows if ends is None else ends,
            rows if to is None else to.at, out, 1 if to is None else len(out), out.stride(0),
            DIM=dim, BLOCK=block, NAMED=ids is not None, PUT=to is not None, **_SMALL,
        )  # fmt: skip
    return out


def take(
    of: Columns, dim: int, largest: torch.Tensor | None, tables: torch.Tensor | None
) -> torch.Tensor:
    """See `kernels.take`."""
    features, batch, block = len(of.columns), len(of.out), _block(dim)
    out = of.out.new_empty(features, batch, dim)
    bound = largest is not None and tables is not None
    if out.numel():
        grid = (features, triton.cdiv(batch, SAMPLES), triton.cdiv(dim, block))
        _take[grid](
            of.out, of.at, out,
            largest.view(torch.int32) if largest is not None else out,
            tables if tables is not None else of.at,
            batch, of.out.stride(0), DIM=dim, BLOCK=block, SAMPLES=SAMPLES, BOUND=bound,
        )  # fmt: skip
    return out


def number(ends: torch.Tensor, n: int) -> torch.Tensor:
    """int32 [n]: the bag of each id. `ends` (int32 [bags + 1]): where the ids of each lie."""
    out = torch.empty(n, dtype=torch.int32, device=ends.device)
    if n:
        _number[(len(ends) - 1,)](ends, out, BLOCK=32, **_SMALL)
    return out
