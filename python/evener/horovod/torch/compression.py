"""`hvd.Compression`: how a tensor is shrunk before it is sent. Same interface as upstream's."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """compress(tensor) gives (what is sent, context); decompress(what came, context) undoes it."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """The tensor as it is sent, and what decompress needs."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """The tensor as it was given."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sent as it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        del ctx
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors are sent as float16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        if not tensor.is_floating_point():
            return tensor, None
        return tensor.to(torch.float16), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class Compression:
    """The choices."""

    none = NoneCompressor
    fp16 = FP16Compressor


def check_compression(compression: Any) -> None:
    """Raise ValueError where `compression` is no class with compress and decompress."""
    if not all(callable(getattr(compression, m, None)) for m in ("compress", "decompress")):
        raise ValueError(
            f"compression={compression!r} has no compress and decompress: give a class as "
            "hvd.Compression.fp16"
        )
