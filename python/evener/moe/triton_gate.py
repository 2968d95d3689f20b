"""`evener.moe.gate` with SiLU on a GPU, in Triton: one pass each way. See there."""

# Triton's kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, attr-defined"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from evener.moe.positions import Positions


@triton.jit
def _forward(both, weights, source, out, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.load(source + row)
    if entry >= 0:
        inside = at < inner
        weight = tl.load(weights + entry).to(tl.float32)
        gate = tl.load(both + row * 2 * inner + at, inside, other=0.0).to(tl.float32)
        up = tl.load(both + (row * 2 + 1) * inner + at, inside, other=0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up * weight
        tl.store(out + row * inner + at, value.to(out.dtype.element_ty), inside)


@triton.jit
def _backward(both, weights, source, gradient, out, to_both, to_weights, inner,
              BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    entry = tl.load(source + row)
    if entry >= 0:
        weight = tl.load(weights + entry).to(tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        for start in range(0, inner, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < inner
            gate = tl.load(both + row * 2 * inner + at, inside, other=0.0).to(tl.float32)
            up = tl.load(both + (row * 2 + 1) * inner + at, inside, other=0.0).to(tl.float32)
            come = tl.load(gradient + row * inner + at, inside, other=0.0).to(tl.float32)
            share = tl.sigmoid(gate)
            bare = gate * share * up
            total += bare * come
            come *= weight
            slope = share * (1 + gate * (1 - share))
            kind = out.dtype.element_ty
            tl.store(out + row * inner + at, (bare * weight).to(kind), inside)
            tl.store(to_both + row * 2 * inner + at, (come * up * slope).to(kind), inside)
            tl.store(to_both + (row * 2 + 1) * inner + at, (come * gate * share).to(kind), inside)
        tl.store(to_weights + entry, tl.sum(total, 0).to(to_weights.dtype.element_ty))


def _block(inner: int) -> int:
    return min(1024, max(16, int(triton.next_power_of_2(inner))))


def forward(both: torch.Tensor, weights: torch.Tensor, at: Positions) -> torch.Tensor:
    """See `gate.forward`."""
    rows, inner = both.shape[0], both.shape[1] // 2
    out = torch.empty(rows, inner, dtype=both.dtype, device=both.device)
    if out.numel():
        block = _block(inner)
        _forward[(rows, triton.cdiv(inner, block))](
            both, weights.contiguous(), at.source, out, inner, block, num_warps=4
        )
    return out


def backward(
    both: torch.Tensor, weights: torch.Tensor, at: Positions, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `gate.backward`."""
    rows, inner = both.shape[0], both.shape[1] // 2
    gradient = gradient.contiguous()
    out = gradient  # each entry is read before it is written, by the same program
    to_both = torch.empty_like(both)
    to_weights = torch.zeros(weights.shape, dtype=weights.dtype, device=both.device)
    if rows:
        _backward[(rows,)](
            both, weights.contiguous(), at.source, gradient, out, to_both, to_weights,
            inner, _block(inner), num_warps=4,
        )  # fmt: skip
    return out, to_both, to_weights
