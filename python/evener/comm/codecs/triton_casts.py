"""`evener.comm.codecs.casts` on a GPU: one kernel for both ways."""

# Triton's kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _cast(values, out, scale, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(values + at, inside, other=0.0).to(tl.float32)
    tl.store(out + at, (value * scale).to(out.dtype.element_ty), inside)


def cast(values: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """`out` = `scale` * `values`, both [n], contiguous, of any floating dtype."""
    n = values.numel()
    if n:
        _cast[(-(-n // BLOCK),)](values, out, float(scale), n, BLOCK, num_warps=8)
