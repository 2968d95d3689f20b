"""`evener.comm.codecs.checks` on a GPU: one pass, and one launch.

Sums modulo 2^64 come out alike in any order, so blocks add to the result as they end.
"""

# Triton's kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def _add(words, into, stated, n, MINUS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + at, at < n, other=0)
    total = tl.sum(word * (2 * at + 1))
    if MINUS:
        total -= tl.where(block == 0, tl.load(stated), 0)
    tl.atomic_add(into, total)


def add(words: torch.Tensor, into: torch.Tensor, stated: torch.Tensor | None) -> None:
    """`into` += the checksum of `words` [n] - `stated`: all int64; only enqueues."""
    n = words.numel()
    _add[(triton.cdiv(n, BLOCK),)](
        words, into, into if stated is None else stated, n, stated is not None, BLOCK, num_warps=8
    )
