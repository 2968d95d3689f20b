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

from evener.base.optimizers import Moment

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
def _mix(x):
    """A hash of 32 bits (uint32)."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _widen(bits):
    """The bits of a bfloat16 (int16) to float32."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _low(scale, TOP: tl.constexpr):
    """The float32 of a code's exponent 0, as bits."""
    return (tl.maximum(scale.to(tl.int32), TOP + 3) - TOP) << 23


@triton.jit
def _decode(code, scale, TOP: tl.constexpr):
    """float32 of the code of one byte (int32), without its sign."""
    low = _low(scale, TOP)
    one = low + 0x800000
    bits = code << 20
    small = (one + bits).to(tl.float32, bitcast=True) - one.to(tl.float32, bitcast=True)
    bits = tl.where(code < 8, small.to(tl.int32, bitcast=True), low + bits)
    bits = tl.where(scale.to(tl.int32) == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _scale(magnitude, inside, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """The scales of blocks of 256, by the bits of numbers without their signs."""
    rows = tl.reshape(tl.where(inside, magnitude, 0), [BLOCK // 256, 256])
    # One below what would be an overflow: no scale is less for it.
    largest = tl.minimum(tl.max(rows, axis=1), 0x7F800000)
    return tl.minimum(tl.maximum((largest + 0xFFFFF) >> 23, TOP + 3), 255)


@triton.jit
def _encode(magnitude, scale, random, TOP: tl.constexpr):
    """The code of the bits of a number without its sign (int32)."""
    low = _low(scale, TOP)
    one = low + 0x800000
    number = magnitude.to(tl.float32, bitcast=True) + one.to(tl.float32, bitcast=True)
    small = number.to(tl.int32, bitcast=True) - one
    place = tl.where(magnitude < one, small, magnitude - low)
    code = (place + ((random & 0xFFFF) << 4).to(tl.int32)) >> 20
    return tl.where(scale == 255, 0, code)


@triton.jit
def _spread(scale, BLOCK: tl.constexpr):
    """A block's scale for each of its elements."""
    return tl.reshape(tl.broadcast_to(scale[:, None], [BLOCK // 256, 256]), [BLOCK])


@triton.jit(do_not_specialize=["n", "key", "offset"])
def _adam(
    weights,  # [n]: float32; int16 bits of bfloat16; or float16
    other,  # [n]: int16 lower halves; or the float32 master of float16; or unused
    gradient,  # [n]: float32, float16, bfloat16
    first,  # [n]: float32, int16 bits of bfloat16, or codes (uint8)
    second,
    first_scale,  # [n / 256]: uint8, with codes
    second_scale,
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
    MOMENTS: tl.constexpr,
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
    elif MASTER == "bfloat16":
        w = _widen(tl.load(weights + at, inside, other=0))
    else:
        w = tl.load(weights + at, inside, other=0.0)
    m = tl.load(first + at, inside, other=0)
    v = tl.load(second + at, inside, other=0)
    if MOMENTS == "bfloat16":
        m = _widen(m)
        v = _widen(v)
    elif MOMENTS == "int8":
        code = m.to(tl.int32)
        m = _decode(code & 0x7F, tl.load(first_scale + at // 256, inside, other=0), 15)
        m = (m.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)
        v = _decode(v.to(tl.int32), tl.load(second_scale + at // 256, inside, other=0), 31)
    if COUPLED:
        g += coupled * w
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * (g * g)
    change = tl.math.div_rn(m, tl.math.sqrt_rn(v) * root + epsilon)
    w = w * shrink - rate * change
    if MASTER == "bfloat16" or MOMENTS != "float32":
        x = (at + offset).to(tl.uint32) * 0x9E3779B9 + key.to(tl.uint32)
        x = x ^ (x >> 16)
        x = x * 0x7FEB352D
        random = x ^ (x >> 15)
    if MOMENTS == "float32":
        tl.store(first + at, m, inside)
        tl.store(second + at, v, inside)
    elif MOMENTS == "bfloat16":
        tl.store(first + at, _stochastic(m, random), inside)
        tl.store(second + at, _stochastic(v, random >> 16), inside)
    else:
        # Until all threads have read the scales that one of them overwrites.
        tl.debug_barrier()
        block = tl.program_id(0).to(tl.int64) * (BLOCK // 256) + tl.arange(0, BLOCK // 256)
        m = m.to(tl.int32, bitcast=True)
        scale = _scale(m & 0x7FFFFFFF, inside, 15, BLOCK)
        tl.store(first_scale + block, scale.to(tl.uint8), block * 256 < n)
        code = _encode(m & 0x7FFFFFFF, _spread(scale, BLOCK), random, 15)
        tl.store(first + at, (code | ((m >> 24) & 0x80)).to(tl.uint8), inside)
        v = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        scale = _scale(v, inside, 31, BLOCK)
        tl.store(second_scale + block, scale.to(tl.uint8), block * 256 < n)
        scale = _spread(scale, BLOCK)
        code = _encode(v, scale, random >> 16, 31)
        code = tl.where((v != 0) & (scale != 255), tl.maximum(code, 1), code)
        tl.store(second + at, code.to(tl.uint8), inside)
    if MASTER == "split":
        bits = w.to(tl.uint32, bitcast=True)
        bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC00000, bits).to(tl.uint32)
        tl.store(weights + at, ((bits + 0x8000) >> 16).to(tl.int16), inside)
        tl.store(other + at, (bits & 0xFFFF).to(tl.int16), inside)
    elif MASTER == "float16":
        tl.store(other + at, w, inside)
        tl.store(weights + at, w.to(tl.float16), inside)
    elif MASTER == "bfloat16":
        # The moments have used up these bits: mix them once more.
        tl.store(weights + at, _stochastic(w, _mix(random)), inside)
    else:
        tl.store(weights + at, w, inside)


def adam(
    master: str,
    weights: torch.Tensor,
    other: torch.Tensor | None,
    gradient: torch.Tensor,
    first: Moment,
    second: Moment,
    scalars: dict[str, float],
    *,
    coupled: bool,
    key: int,
    offset: int,
) -> None:
    """One step in place; all tensors flat [n] on one GPU. `master`: "split" (weights bfloat16 and
    `other` int16), "float16" (`other` float32), "bfloat16" or "float32".
    `scalars`: see `AdamW.scalars`."""
    n = weights.numel()
    if n == 0:
        return
    first, first_scale = first if isinstance(first, tuple) else (first, None)
    second, second_scale = second if isinstance(second, tuple) else (second, None)
    assert first is not None and second is not None

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        kinds = {torch.bfloat16: torch.int16, torch.int8: torch.uint8}
        return tensor.view(kinds.get(tensor.dtype, tensor.dtype))

    extra: dict[str, Any] = {"enable_fp_fusion": False}
    _adam[(triton.cdiv(n, BLOCK),)](
        bits(weights),
        weights if other is None else other,
        gradient,
        bits(first),
        bits(second),
        bits(first) if first_scale is None else first_scale,
        bits(second) if second_scale is None else second_scale,
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
        MOMENTS=str(first.dtype).removeprefix("torch."),
        BLOCK=BLOCK,
        **extra,
    )
