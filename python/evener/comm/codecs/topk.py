"""Selecting the k largest magnitudes with error feedback, and adding received entries.

Three implementations of one definition: `select_reference` in plain torch (the definition),
`evener.base.kernels` in Rust for CPU tensors, `triton_topk` for GPU tensors. All select the same
entries: order by magnitude of residual + gradient, the lowest index first among equals; what
is not finite is sent first and never kept (see crates/kernels/src/topk.rs for why).
"""

from __future__ import annotations

import torch

from evener.base import kernels as _kernels


def entries(numel: int, ratio: float) -> int:
    """How many of `numel` entries are sent: at least one, where there are any."""
    return min(numel, max(1, int(numel * ratio)))


def select_reference(
    gradient: torch.Tensor, residual: torch.Tensor, values: torch.Tensor, indices: torch.Tensor
) -> None:
    """See `select`. By a stable sort of everything: slow, and plainly right."""
    residual += gradient
    bits = residual.view(torch.int32) & 0x7FFFFFFF
    order = torch.sort(bits, descending=True, stable=True).indices[: values.numel()]
    taken = torch.sort(order).values
    values.copy_(residual[taken])
    indices.copy_(taken)
    residual[taken] -= values.float()
    residual.masked_fill_(~residual.isfinite(), 0)


def select(
    gradient: torch.Tensor, residual: torch.Tensor, values: torch.Tensor, indices: torch.Tensor
) -> None:
    """Add `gradient` to `residual` and move its k largest magnitudes to `values` and `indices`.

    `gradient` [n], any floating dtype; `residual` [n] float32; `values` [k] float32 or float16
    (what rounding takes away stays in the residual); `indices` [k] int32, ascending on a CPU, in
    any order on a GPU. All contiguous on one device. On a GPU this only enqueues.
    """
    if gradient.device.type != "cpu":
        from evener.comm.codecs import triton_topk

        triton_topk.select(gradient, residual, values, indices)
        return
    if values.dtype == torch.float32:
        _kernels.topk_with_feedback(gradient.float(), residual, values, indices)
        return
    exact = torch.empty(values.numel(), dtype=torch.float32)
    _kernels.topk_with_feedback(gradient.float(), residual, exact, indices)
    values.copy_(exact)
    exact -= values
    exact.masked_fill_(~exact.isfinite(), 0)  # an overflow is sent, never kept
    add_entries(residual, exact, indices, 1.0)


def add_entries(
    out: torch.Tensor, values: torch.Tensor, indices: torch.Tensor, scale: float
) -> None:
    """`out[indices] += scale * values`, where no index occurs twice.

    `out` [n] float32; `values` [k] float32 or float16; `indices` [k] int32. Deterministic.
    """
    if not values.numel():
        return
    if out.device.type == "cpu":
        out.index_add_(0, indices, values.float(), alpha=scale)
        return
    from evener.comm.codecs import triton_topk

    triton_topk.add_entries(out, values, indices, scale)
