"""To a 16-bit form and back, scaled on the way: the division of an average costs no pass.

`narrow` packs what is sent, `widen` unpacks what came. On a CPU in Rust
(crates/kernels/src/casts.rs), on a GPU in Triton; the references in plain torch take two passes.
Rounded to nearest even after the scaling, so that two gradients of 40,000 have a mean in FP16.
"""

from __future__ import annotations

import torch

from evener.base import kernels as _kernels


def narrow_reference(values: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """See `narrow`."""
    out.copy_(values.float() * scale)


def widen_reference(values: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """See `widen`."""
    out.copy_(values.float() * scale)


def narrow(values: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """`out` [n], float16 or bfloat16, = `scale` * `values` [n], any floating dtype."""
    if values.device.type == "cpu":
        _kernels.cast_narrow(values.float(), scale, out)
        return
    from evener.comm.codecs import triton_casts

    triton_casts.cast(values, scale, out)


def widen(values: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """`out` [n], any floating dtype, = `scale` * `values` [n], float16 or bfloat16."""
    if values.device.type == "cpu":
        if out.dtype == torch.float32:
            _kernels.cast_widen(values, scale, out)
        else:
            widen_reference(values, scale, out)
        return
    from evener.comm.codecs import triton_casts

    triton_casts.cast(values, scale, out)
