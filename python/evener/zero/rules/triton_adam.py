"""AdamW and Adam on a GPU in one pass over memory, in Triton: what `AdamW.formula` does in
torch operations, and crates/kernels on the host, to the bit.

Equal bits need three things: no multiplication and addition contracted into one rounding
(`enable_fp_fusion=False`), division and square root rounded to nearest (Triton's plain ones are
approximations), and the same hash for stochastic rounding (crates/kernels/src/formats.rs).
"""

# Triton's kernels have no types that mypy could check.
# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, attr-defined"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _stochastic(x, random):
    """float32 to the bits of a bfloat16, up or down by 16 random bits."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = (bits + (random & 0xFFFF)) >> 16
    special = (bits >> 16) | tl.where(magnitude > 0x7F800000, 0x40, 0).to(tl.uint32)
    return tl.where(magnitude >= 0x7F800000, special, rounded).to(tl.int16)


@triton.jit
def _widen(bits):
    """The bits of a bfloat16 (int16) to float32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["n", "key", "offset"])
def _adam(
    weights,  # [n]: float32; int16 bits of bfloat16; or float16
    other,  # [n]: int16 lower halves; or the float32 master of float16; or unused
    gradient,  # [n]: float32, float16, bfloat16
    first,  # [n]: float32, or int16 bits of bfloat16
    second,
    n,
    key,
    offset,
    scale,
    coupled,
    shrink,
    beta1,
    rest1,
    beta2,
    rest2,
    root,
    epsilon,
    rate,
    MASTER: tl.constexpr,
    COUPLED: tl.constexpr,
    ROUNDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    g = tl.load(gradient + at, inside, other=0.0).to(tl.float32) * scale
    if MASTER == "split":
        upper = tl.load(weights + at, inside, other=0).to(tl.int32) << 16
        w = (upper + tl.load(other + at, inside, other=0).to(tl.int32)).to(tl.float32, bitcast=True)
    elif MASTER == "float16":
        w = tl.load(other + at, inside, other=0.0)
    else:
        w = tl.load(weights + at, inside, other=0.0)
    m = tl.load(first + at, inside, other=0)
    v = tl.load(second + at, inside, other=0)
    if ROUNDED:
        m = _widen(m)
        v = _widen(v)
    if COUPLED:
        g += coupled * w
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    change = tl.math.div_rn(m, tl.math.sqrt_rn(v) * root + epsilon)
    w = w * shrink - rate * change
    if ROUNDED:
        x = (at + offset).to(tl.uint32) * 0x9E3779B9 + key.to(tl.uint32)
        x = x ^ (x >> 16)
        x = x * 0x7FEB352D
        random = x ^ (x >> 15)
        tl.store(first + at, _stochastic(m, random), inside)
        tl.store(second + at, _stochastic(v, random >> 16), inside)
    else:
        tl.store(first + at, m, inside)
        tl.store(second + at, v, inside)
    if MASTER == "split":
        bits = w.to(tl.uint32, bitcast=True)
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits).to(tl.uint32)
        tl.store(weights + at, ((bits + 0x8000) >> 16).to(tl.int16), inside)
        tl.store(other + at, (bits & 0xFFFF).to(tl.int16), inside)
    elif MASTER == "float16":
        tl.store(other + at, w, inside)
        tl.store(weights + at, w.to(tl.float16), inside)
    else:
        tl.store(weights + at, w, inside)


def adam(
    master: str,
    weights: torch.Tensor,
    other: torch.Tensor | None,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    scalars: dict[str, float],
    *,
    coupled: bool,
    key: int,
    offset: int,
) -> None:
    """One step in place; all tensors flat [n] on one GPU. `master`: "split" (weights bfloat16 and
    `other` int16), "float16" (`other` float32) or "float32". `scalars`: see `AdamW.scalars`."""
    n = weights.numel()
    if n == 0:
        return
    rounded = first.dtype == torch.bfloat16

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor

    extra: dict[str, Any] = {"enable_fp_fusion": False}
    _adam[(triton.cdiv(n, BLOCK),)](
        bits(weights),
        weights if other is None else other,
        gradient,
        bits(first),
        bits(second),
        n,
        # Signed: one type whatever the value, so one compilation.
        key - (1 << 32) if key >= 1 << 31 else key,
        offset,
        scalars["scale"],
        scalars["coupled"],
        scalars["shrink"],
        scalars["beta1"],
        scalars["rest1"],
        scalars["beta2"],
        scalars["rest2"],
        scalars["root"],
        scalars["epsilon"],
        scalars["rate"],
        MASTER=master,
        COUPLED=coupled,
        ROUNDED=rounded,
        BLOCK=BLOCK,
        **extra,
    )
