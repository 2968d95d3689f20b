"""CPU kernels on torch tensors: checks, then hands addresses to `evener._native`."""

from __future__ import annotations

import torch

from evener import _native


def _require(tensor: torch.Tensor, name: str, dtype: torch.dtype, numel: int) -> int:
    """The address of `tensor`, once it is what the native side relies on."""
    if tensor.device.type != "cpu" or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous {dtype} tensor on the CPU, "
            f"got {tensor.dtype} on {tensor.device}, contiguous={tensor.is_contiguous()}"
        )
    if tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements, expected {numel}")
    return tensor.data_ptr()


def topk_with_feedback(
    gradient: torch.Tensor, residual: torch.Tensor, values: torch.Tensor, indices: torch.Tensor
) -> None:
    """Add `gradient` to `residual`, move its k largest magnitudes to `values` and `indices`.

    `gradient`, `residual`: float32 [n]; `values`: float32 [k]; `indices`: int32 [k], ascending on
    return. What was taken is zero in `residual` afterwards, and so is every entry that is not
    finite. Equal magnitudes: the lowest index first. Raises ValueError with nothing written.
    """
    n, k = gradient.numel(), values.numel()
    _native.topk_with_feedback(
        _require(gradient, "gradient", torch.float32, n),
        _require(residual, "residual", torch.float32, n),
        n,
        _require(values, "values", torch.float32, k),
        _require(indices, "indices", torch.int32, k),
        k,
    )


CHUNK = 4096
NO_INDEX = 0xFFFF
BLOCK = 1024
# Weights that share a header where differences are sent; the same number as in Rust.
DIFFERENCE_TILE = 8192
_FORMS = {torch.float16: "f16", torch.bfloat16: "bf16"}


def chunks_select(
    gradient: torch.Tensor,
    residual: torch.Tensor,
    scales: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
) -> None:
    """Add `gradient` to `residual`, move the k largest magnitudes of every 4096 out of it.

    `gradient`, `residual`: float32 [n]; `scales`: float32 [c], c chunks; `values`: float16 [c, k],
    relative to the chunk's scale; `indices`: uint16 [c, k], ascending, 0xFFFF where a chunk has
    fewer than k entries. Raises ValueError with nothing written.
    """
    n, chunks = gradient.numel(), -(-gradient.numel() // CHUNK)
    k = values.shape[-1]
    _native.chunks_select(
        _require(gradient, "gradient", torch.float32, n),
        _require(residual, "residual", torch.float32, n),
        n,
        k,
        _require(scales, "scales", torch.float32, chunks),
        _require(values, "values", torch.float16, chunks * k),
        _require(indices, "indices", torch.uint16, chunks * k),
    )


def chunks_add(
    scales: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
    factor: float,
    out: torch.Tensor,
) -> None:
    """Add `factor` times what one rank's `chunks_select` wrote to `out`, float32 [n]."""
    n, chunks = out.numel(), -(-out.numel() // CHUNK)
    k = values.shape[-1]
    _native.chunks_add(
        _require(scales, "scales", torch.float32, chunks),
        _require(values, "values", torch.float16, chunks * k),
        _require(indices, "indices", torch.uint16, chunks * k),
        k,
        factor,
        _require(out, "out", torch.float32, n),
        n,
    )


def int8_quantize(
    values: torch.Tensor,
    residual: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    key: int,
) -> None:
    """Write `values` + `residual` as 8-bit codes, one scale a block of 1024.

    `values`, `residual`: float32 [n]; `residual` keeps what is not sent. `codes`: int8 [m], m a
    multiple of 1024 that holds n; `scales`: float32 [m / 1024]. `key`: 32 bits.
    """
    n, room = values.numel(), codes.numel()
    _native.int8_quantize(
        _require(values, "values", torch.float32, n),
        0 if residual is None or n == 0 else _require(residual, "residual", torch.float32, n),
        n,
        _require(codes, "codes", torch.int8, room),
        room,
        _require(scales, "scales", torch.float32, room // BLOCK),
        key,
    )


def int8_dequantize_sum(
    codes: torch.Tensor, scales: torch.Tensor, factor: float, out: torch.Tensor
) -> None:
    """`out` [n] = `factor` times all ranks' codes: int8 [p, m], float32 scales [p, m / 1024]."""
    peers, room = codes.shape
    _native.int8_dequantize_sum(
        _require(codes, "codes", torch.int8, peers * room),
        _require(scales, "scales", torch.float32, peers * (room // BLOCK)),
        room,
        peers,
        factor,
        _require(out, "out", torch.float32, out.numel()),
        out.numel(),
    )


def differences_plan(
    new: torch.Tensor, old: torch.Tensor, shift: int, mask: int, headers: torch.Tensor
) -> None:
    """See `evener.comm.codecs.differences.plan`; `new` and `old` as int16 [n]."""
    n = old.numel()
    _native.differences_plan(
        _require(new, "new", torch.int16, n),
        _require(old, "old", torch.int16, n),
        n,
        shift,
        mask,
        _require(headers, "headers", torch.int32, -(-n // DIFFERENCE_TILE)),
    )


def differences_write(
    new: torch.Tensor,
    old: torch.Tensor,
    shift: int,
    mask: int,
    headers: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `evener.comm.codecs.differences.write`; `out`: int32."""
    n = old.numel()
    _native.differences_write(
        _require(new, "new", torch.int16, n),
        _require(old, "old", torch.int16, n),
        n,
        shift,
        mask,
        _require(headers, "headers", torch.int32, -(-n // DIFFERENCE_TILE)),
        _require(out, "out", torch.int32, out.numel()),
        out.numel(),
    )


def differences_read(message: torch.Tensor, shift: int, mask: int, weights: torch.Tensor) -> None:
    """See `evener.comm.codecs.differences.read`; ValueError for a message that was cut."""
    _native.differences_read(
        _require(message, "message", torch.int32, message.numel()),
        message.numel(),
        shift,
        mask,
        _require(weights, "weights", torch.int16, weights.numel()),
        weights.numel(),
    )


def cast_narrow(values: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """`out` = `scale` * `values`: float32 [n] to float16 or bfloat16 [n], one pass."""
    n, form = values.numel(), _FORMS[out.dtype]
    _native.cast_narrow(
        _require(values, "values", torch.float32, n),
        n,
        scale,
        form,
        _require(out, "out", out.dtype, n),
    )


def cast_widen(values: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """`out` = `scale` * `values`: float16 or bfloat16 [n] to float32 [n], one pass."""
    n, form = out.numel(), _FORMS[values.dtype]
    _native.cast_widen(
        _require(values, "values", values.dtype, n),
        n,
        scale,
        form,
        _require(out, "out", torch.float32, n),
    )
