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
