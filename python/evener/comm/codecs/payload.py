"""What chunked top-k sends of a bucket: views of one buffer, in the layout that kernels share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evener.base.kernels import CHUNK


@dataclass(frozen=True)
class Payload:
    """Views of one contiguous buffer of bytes; see the module."""

    scales: torch.Tensor
    values: torch.Tensor
    indices: torch.Tensor

    @staticmethod
    def size(n: int, k: int) -> int:
        """Bytes that a payload of `n` entries takes; a multiple of 4."""
        return -(-n // CHUNK) * (4 + 4 * k)

    @classmethod
    def of(cls, raw: torch.Tensor, n: int, k: int) -> Payload:
        """The views of `raw`, uint8 [size(n, k)], 4-byte aligned."""
        chunks = -(-n // CHUNK)
        values, indices = 4 * chunks, (4 + 2 * k) * chunks
        return cls(
            raw[:values].view(torch.float32),
            raw[values:indices].view(torch.float16).view(chunks, k),
            raw[indices : indices + 2 * k * chunks].view(torch.uint16).view(chunks, k),
        )
