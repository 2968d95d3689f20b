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
    if not _by_kernel(weights):
        return checksum_reference(weights)
    from evener.comm.codecs import triton_checks

    found = torch.zeros((), dtype=torch.int64, device=weights.device)
    triton_checks.add(weights, found)
    return found


def hold(weights: torch.Tensor, stated: torch.Tensor, off: torch.Tensor, place: int) -> None:
    """Add to `off[place]` how far the checksum of `weights` is from `stated`: 0 if it is right.

    `stated`: int64 of one element, `off`: int64 [many], on the device of `weights`; `off[place]` is
    zero before. Only enqueues, on the current stream.
    """
    if _by_kernel(weights):
        from evener.comm.codecs import triton_checks

        triton_checks.hold(weights, stated, off, place)
    else:
        off[place].add_(checksum_reference(weights) - stated)


def tell(weights: torch.Tensor, off: torch.Tensor, into: torch.Tensor) -> None:
    """`into` <- the checksum of `weights`, and how many of `off` are not zero; then `off` <- 0.

    `off`: int64 [many], `into`: int64 [2], zero before. Only enqueues, on the current stream.
    """
    if _by_kernel(weights):
        from evener.comm.codecs import triton_checks

        triton_checks.tell(weights, off, into)
    else:
        into[0] = checksum_reference(weights)
        into[1] = off.count_nonzero()
        off.zero_()


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


def _by_kernel(weights: torch.Tensor) -> bool:
    """Whether a kernel takes it."""
    return weights.device.type == "cuda" and weights.is_contiguous() and weights.numel() > 0
