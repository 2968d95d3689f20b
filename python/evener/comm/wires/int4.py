"""INT4 in blocks: an eighth of FP32's bytes (`evener.comm.codecs.int4`), with error feedback."""

from __future__ import annotations

import torch

from evener.comm.codecs import int4
from evener.comm.wires.base import Limits, register
from evener.comm.wires.blocks import BlockWire


@register
class Int4Wire(BlockWire):
    """Rounded to the nearest; rows of embeddings, which have no residual, go as INT8."""

    name = "int4"
    title = "INT4"
    what = "4-bit integers in blocks between nodes, with error feedback"
    place = 30
    late = ""
    first_update = 0.05
    milder, rows_as = "int8", "int8"
    limits = Limits(residual=1.0, cosine=0.9)
    # What lost accuracy under Adam had residuals above 0.28: docs/benchmarks/accuracy.md.
    strict = Limits(residual=0.25, cosine=0.9)
    block, bits = int4.BLOCK, 4

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
        """See `BlockWire`; nothing is left to chance."""
        del key
        assert residual is not None
        int4.quantize(values, residual, codes, scales, left)

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
        int4.dequantize_sum(codes, scales, factor, out, own)
