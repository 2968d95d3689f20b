"""Checksums of weights that stay on their device until many of them are read at once.

The sum, modulo 2^64, of the 64-bit words of the weights' bytes, each times an odd number of its
own: so no bit of a word is lost, and words that change places are seen. What is left behind the
last whole word is added in pieces of the weights' width. It finds mistakes; it does not keep out an
attacker.

`checksum_reference` in plain torch defines it; on a GPU a kernel of Triton gives the same number in
one pass (`triton_checks`).
"""

from __future__ import annotations

import torch

_KINDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(weights: torch.Tensor) -> torch.Tensor:
    """As whole numbers of their width: minus zero is not zero, NaN is itself."""
    return weights.view(_KINDS[weights.element_size()])


def checksum(weights: torch.Tensor) -> torch.Tensor:
    """An int64 scalar on the device of `weights` (any shape and dtype)."""
    flat = weights.reshape(-1)
    if not _whole(flat):
        return checksum_reference(flat)
    found = torch.zeros((), dtype=torch.int64, device=flat.device)
    _add(flat, found, None)
    return found


def hold(weights: torch.Tensor, stated: torch.Tensor, into: torch.Tensor) -> None:
    """Add to `into` how far the checksum of `weights` is from `stated`: nothing if it is right.

    `stated`, `into`: int64 of one element on the device of `weights`; `into` is zero before, and
    nobody else's. Only enqueues, on the current stream.
    """
    flat = weights.reshape(-1)
    if _whole(flat):
        _add(flat, into, stated)
    else:
        into.add_(checksum_reference(flat) - stated)


def checksum_reference(weights: torch.Tensor) -> torch.Tensor:
    """See `checksum`."""
    flat = weights.reshape(-1)
    each = 8 // flat.element_size()
    if flat.storage_offset() % each:
        flat = flat.clone()
    words = flat[: flat.numel() // each * each].view(torch.int64)
    rest = bits(flat[words.numel() * each :]).to(torch.int64)
    factors = torch.arange(1, 2 * words.numel() + 1, 2, device=flat.device)
    return (words * factors).sum() + (
        rest * torch.arange(3, 3 + rest.numel(), device=flat.device)
    ).sum()


def _whole(flat: torch.Tensor) -> bool:
    """Whether the kernel can take it: on a GPU, in words of 64 bits that are aligned."""
    on_gpu = flat.device.type == "cuda" and flat.numel() > 0
    return on_gpu and not (flat.nbytes % 8 or flat.data_ptr() % 8)


def _add(flat: torch.Tensor, into: torch.Tensor, stated: torch.Tensor | None) -> None:
    from evener.comm.codecs import triton_checks

    triton_checks.add(flat.view(torch.int64), into, stated)
