"""`evener.comm.codecs.sums` on a GPU: one pass over what came."""

# Triton's kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 2048


@triton.jit
def _add_in_order(parts, out, scale, n, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(parts + at, inside, other=0.0).to(tl.float32)
    where = at
    for _ in range(1, RANKS):
        where += n
        total += tl.load(parts + where, inside, other=0.0).to(tl.float32)
    tl.store(out + at, (total * scale).to(out.dtype.element_ty), inside)


def add_in_order(parts: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """`out` [n] = `scale` * the sum of `parts` [ranks, n], contiguous, at most 32 bits wide."""
    ranks, n = parts.shape
    if n:
        _add_in_order[(-(-n // BLOCK),)](
            parts, out, float(scale), n, ranks, BLOCK, num_warps=8, enable_fp_fusion=False
        )
