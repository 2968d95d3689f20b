"""INT8 in blocks: a quarter of FP32's bytes (`evener.comm.codecs.int8`), with error feedback."""

from __future__ import annotations

import torch

from evener.comm.codecs import int8
from evener.comm.wires.base import Limits, register
from evener.comm.wires.blocks import BlockWire


@register
class Int8Wire(BlockWire):
    """Rounded up or down at random, so that the mean is right; rows of embeddings go so too."""

    name = "int8"
    title = "INT8"
    what = "8-bit integers in blocks between nodes, with error feedback"
    place = 20
    late = ""
    first_update = 0.05
    milder, rows_as = "bf16", "int8"
    limits = Limits(residual=1.0, cosine=0.9)
    block, bits = int8.BLOCK, 8

    @classmethod
    def quantize(
        cls,
        values: torch.Tensor,
        residual: torch.Tensor | None,
        codes: torch.Tensor,
        scales: torch.Tensor,
        key: int,
        left: torch.Tensor | None = None,
    ) -> None:
        """See `BlockWire`."""
        int8.quantize(values, residual, codes.view(torch.int8), scales, key, left)

    @classmethod
    def add_up(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor,
        factor: float,
        out: torch.Tensor,
        own: torch.Tensor | None = None,
    ) -> None:
        """See `BlockWire`."""
        int8.dequantize_sum(codes.view(torch.int8), scales, factor, out, own)

    @classmethod
    def rows_bytes(cls, numel: int, dtype: torch.dtype) -> int:
        """See `Wire`."""
        del dtype
        return cls.size(cls.room(numel))

    @classmethod
    def rows_write(cls, values: torch.Tensor, factor: float, raw: torch.Tensor, key: int) -> None:
        """See `Wire`; without a residual, because other rows come in every step."""
        del factor
        codes, scales = cls.views(raw.unsqueeze(0), _room(raw.numel()))
        cls.quantize(values, None, codes[0], scales[0], key)

    @classmethod
    def rows_read(
        cls, raw: torch.Tensor, factor: float, final: float, out: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """See `Wire`."""
        del dtype
        cls.add_up(*cls.views(raw.unsqueeze(0), _room(raw.numel())), factor * final, out)
        return out


def _room(size: int) -> int:
    """Entries for which there are `size` bytes."""
    return size // (int8.BLOCK + 4) * int8.BLOCK
