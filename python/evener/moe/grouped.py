"""Products of groups of rows, each with the matrix of its expert.

torch's `grouped_mm` where it is one kernel: bfloat16 on Hopper and Blackwell. On other GPUs it is a
loop that waits for the host, so Triton does it there; on CPUs a loop is right.

`ends` (int32 [experts]) are on the device, and rows past the last end belong to nobody: what is
written there means nothing.
"""

from __future__ import annotations

import torch
from torch.nn import functional

_ONE_KERNEL = (9, 10)  # major versions of GPUs


def way(*tensors: torch.Tensor) -> str:
    """`torch`, `triton` or `loop`: which of them multiplies these."""
    first = tensors[0]
    if not first.is_cuda:
        return "loop"
    major, _ = torch.cuda.get_device_capability(first.device)
    aligned = all(t.shape[-1] * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0
                  for t in tensors)  # fmt: skip
    fits = all(t.dtype == torch.bfloat16 for t in tensors) and aligned
    if major in _ONE_KERNEL and fits and hasattr(functional, "grouped_mm"):
        return "torch"
    return "loop" if first.dtype == torch.float64 else "triton"


def times(x: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, transposed: bool
          ) -> torch.Tensor:  # fmt: skip
    """Each row times its expert's matrix.

    x [rows, k]; matrices [experts, n, k] if `transposed`, as nn.Linear has them, else
    [experts, k, n]. Gives [rows, n].
    """
    turned = matrices.transpose(1, 2) if transposed else matrices
    how = way(x, matrices)
    if how == "torch":
        return functional.grouped_mm(x, turned, offs=ends)
    if how == "triton":
        from evener.moe import triton_grouped

        return triton_grouped.times(x, turned, ends)
    return times_reference(x, turned, ends)


def times_reference(x: torch.Tensor, turned: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """See `times`; `turned`: [experts, k, n]."""
    out = x.new_zeros(x.shape[0], turned.shape[2])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], turned[expert], out=out[start:end])
        start = end
    return out


def outer(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """For each expert, the sum over its rows of a's row by b's row.

    a [rows, n], b [rows, k] > [experts, n, k]: the gradient of matrices as nn.Linear has them.
    """
    how = way(a, b)
    if how == "torch":
        return functional.grouped_mm(a.t(), b, offs=ends)
    if how == "triton":
        from evener.moe import triton_grouped

        return triton_grouped.outer(a, b, ends)
    return outer_reference(a, b, ends)


def outer_reference(a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """See `outer`."""
    out = a.new_zeros(len(ends), a.shape[1], b.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(a[start:end].t(), b[start:end], out=out[expert])
        start = end
    return out
