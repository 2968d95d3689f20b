"""`evener.comm.codecs.chunks` on a GPU, in Triton: one pass over gradient and residual.

A program holds one chunk of 4,096 in registers. The k-th largest magnitude is searched for from
the largest down, in the integers that have a float's order: by steps that double, then by halves.
Each try is one count over registers, and the search ends where the count is k, after about nine.
Nothing but the chunk is read from memory: 12 bytes of traffic an entry (float32), and the payload.

What it waits for are instructions, not memory, so whatever is done for all 4,096 is done with few:
entries not below a magnitude are counted by the sign of a difference, places are scanned by fours,
as threads hold them, and the sum is stored at once. Then the places of what is taken are written,
read back by one thread each, and values and what rounding leaves are worked out for those alone.

Adding is one program a chunk too: it writes zeros, then the ranks' entries, one rank after another
with a barrier between, because two ranks may have sent the same place.
"""

# Triton's kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from evener.base.kernels import CHUNK
from evener.comm.codecs.payload import Payload

# A program that selects: its warps, entries that a thread loads at once (1 or 4), and the most
# registers a thread (0: as many as it likes). benchmarks/compress_kernels.py measures it.
SELECT = (4, 4, 128)
# The search's first step below the largest: a quarter of a power of two, for it is seldom further.
FIRST = 1 << 21


@triton.jit
def _select(
    gradient,
    residual,
    scales,
    values,
    indices,
    n,
    k,
    CHUNK: tl.constexpr,
    PLACES: tl.constexpr,
    FIRST: tl.constexpr,
    EACH: tl.constexpr,
):
    chunk = tl.program_id(0)
    first = chunk.to(tl.int64) * CHUNK
    gradient += first
    residual += first
    values += chunk.to(tl.int64) * k
    indices += chunk.to(tl.int64) * k
    local = tl.arange(0, CHUNK)
    if EACH == 1:
        local += tl.num_programs(1) - 1  # zero, see `triton_topk._accumulate`
    inside = local < tl.minimum(n - first, CHUNK).to(tl.int32)
    total = tl.load(residual + local, inside, other=0.0)
    total += tl.load(gradient + local, inside, other=0.0).to(tl.float32)
    tl.store(residual + local, total, inside)
    infinity = 0x7F800000
    # Places behind the end lose against all that exist.
    bits = tl.where(inside, total.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    most = tl.max(bits, 0)
    wanted = tl.minimum(k, tl.minimum(n - first, CHUNK).to(tl.int32))
    # From the largest down by steps that double, until enough entries are not below it ...
    high = most + 1
    low = tl.maximum(most - FIRST, 0)
    step = tl.full([], FIRST, tl.int32)
    count = -tl.sum((low - 1 - bits) >> 31, 0)
    while count < wanted:
        high = low
        step = tl.minimum(step * 2, 1 << 29)
        low = tl.maximum(low - step, 0)
        count = -tl.sum((low - 1 - bits) >> 31, 0)
    # ... then by halves, until they are as many as wanted, or only equal ones are left.
    while (count != wanted) & (high - low > 1):
        middle = low + (high - low) // 2
        reached = -tl.sum((middle - 1 - bits) >> 31, 0)
        enough = reached >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        count = tl.where(enough, reached, count)
    taken = bits >= low
    if count != wanted:
        same = bits == low
        ties = wanted - tl.sum((bits > low).to(tl.int32), 0)
        taken = (bits > low) | (same & (tl.cumsum(same.to(tl.int32), 0) <= ties))
    four = tl.reshape(taken.to(tl.int32), [CHUNK // 4, 4])
    sums = tl.sum(four, 1)
    before = tl.cumsum(sums, 0) - sums
    place = tl.reshape(before[:, None] + tl.cumsum(four, 1) - four, [CHUNK])
    tl.store(indices + place, local.to(tl.int16), taken)
    exponent = tl.minimum(tl.maximum(most & infinity, 27 << 23), 253 << 23)
    scale = tl.where(most >= infinity, 0x3F800000, exponent).to(tl.float32, bitcast=True)
    # One over a power of two: another power of two, by its exponent.
    inverse = (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    tl.store(scales + chunk, scale)
    if most >= infinity:  # what is not finite and not sent is not kept
        bad = inside & (bits >= infinity) & (taken == 0)
        tl.store(residual + local, tl.zeros([CHUNK], tl.float32), bad)
    tl.debug_barrier()
    slot = tl.arange(0, PLACES)
    filled = slot < wanted
    at = tl.load(indices + slot, filled, other=-1).to(tl.int32)
    value = tl.load(residual + at, filled, other=0.0)
    sent = (value * inverse).to(tl.float16)
    left = value - sent.to(tl.float32) * scale
    finite = (left.to(tl.int32, bitcast=True) & 0x7FFFFFFF) < infinity
    tl.store(residual + at, tl.where(finite, left, 0.0), filled)
    tl.store(values + slot, sent, slot < k)
    # The short chunk at the end has places that hold nothing.
    tl.store(indices + slot, at.to(tl.int16), (slot < k) & (filled == 0))


@triton.jit
def _add_in_order(
    scales,
    values,
    indices,
    out,
    factor,
    n,
    k,
    peers,
    scale_stride,
    half_stride,
    CHUNK: tl.constexpr,
    PLACES: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    tl.store(out + at, tl.zeros([CHUNK], tl.float32), at < n)
    place = tl.arange(0, PLACES)
    peer = tl.zeros([], tl.int64)
    while peer < peers:
        tl.debug_barrier()
        scale = tl.load(scales + peer * scale_stride + chunk)
        entry = peer * half_stride + chunk * k + place
        local = tl.load(indices + entry, place < k, other=-1).to(tl.int64)
        goes = chunk * CHUNK + local
        real = (local >= 0) & (local < CHUNK) & (goes < n)
        value = tl.load(values + entry, real, other=0.0).to(tl.float32) * scale
        kept = tl.load(out + goes, real, other=0.0)
        tl.store(out + goes, kept + value * factor, real)
        peer += 1


def select(
    gradient: torch.Tensor,
    residual: torch.Tensor,
    scales: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
) -> None:
    """`evener.comm.codecs.chunks.select` for CUDA tensors: only enqueues, on the current stream."""
    chunks, k = values.shape
    warps, each, registers = SELECT
    _select[(chunks,)](
        gradient,
        residual,
        scales,
        values,
        indices.view(torch.int16),
        residual.numel(),
        k,
        CHUNK,
        triton.next_power_of_2(k),
        FIRST,
        each,
        num_warps=warps,
        maxnreg=registers or None,
        enable_fp_fusion=False,
    )


def add_in_order(received: torch.Tensor, k: int, factor: float, out: torch.Tensor) -> None:
    """`evener.comm.codecs.chunks.add_in_order` for CUDA tensors."""
    n = out.numel()
    first = Payload.of(received[0], n, k)
    _add_in_order[(triton.cdiv(n, CHUNK),)](
        first.scales,
        first.values,
        first.indices.view(torch.int16),
        out,
        float(factor),
        n,
        k,
        received.shape[0],
        received.stride(0) // 4,
        received.stride(0) // 2,
        CHUNK,
        triton.next_power_of_2(k),
        num_warps=4,
        enable_fp_fusion=False,
    )
