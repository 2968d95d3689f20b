"""Adds up what ranks have sent, in rank order: equal inputs give equal bits on every rank.

16-bit parts are added in float32 and rounded once. On a GPU one pass of a Triton kernel
(`triton_sums`); `add_reference` in plain torch defines it, and is what runs on a CPU.
"""

from __future__ import annotations

import torch


def add_reference(parts: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """See `add_in_order`."""
    wide = torch.promote_types(parts.dtype, torch.float32)
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total.mul_(scale) if scale != 1.0 else total)


def add_in_order(parts: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """`out` [n] = `scale` * the sum of `parts` [ranks, n], contiguous, of one floating dtype."""
    if parts.device.type == "cpu" or parts.dtype == torch.float64:
        add_reference(parts, scale, out)
        return
    from evener.comm.codecs import triton_sums

    triton_sums.add_in_order(parts, scale, out)
