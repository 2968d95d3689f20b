"""Forms in which every gradient crosses: exact, FP16, BF16."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist

from evener.comm.buckets import padded
from evener.comm.codecs import casts, sums
from evener.comm.groups import Route
from evener.comm.options import Options
from evener.comm.scratch import Scratch
from evener.comm.state import ShardState
from evener.comm.wires.base import Limits, Paper, Wire, register

# Least cosine between a parameter's gradient and what a 16-bit form makes of it.
_LEAST = 0.99


@register
class ExactWire(Wire):
    """The gradients' own dtype, summed by the collective library."""

    name = "exact"
    title = "exact"
    what = "FP32 sums, nothing is rounded"
    place = 0
    late = ""
    first_update = 0.02

    @classmethod
    def paper(cls, ratio: float) -> Paper:
        """See `Wire`."""
        del ratio
        return Paper(cls.name, 1.0, True, 0.0)

    def exchange(self, shard: torch.Tensor, state: ShardState) -> None:
        """See `Wire`."""
        del state
        self.outer.all_reduce(shard, self.scaling.op)

    @classmethod
    def rows_bytes(cls, numel: int, dtype: torch.dtype) -> int:
        """See `Wire`."""
        return padded(numel * dtype.itemsize, 16)

    @classmethod
    def rows_write(cls, values: torch.Tensor, factor: float, raw: torch.Tensor, key: int) -> None:
        """See `Wire`."""
        del key
        room = raw.view(values.dtype)
        torch.mul(values, factor, out=room[: values.numel()])
        room[values.numel() :].zero_()

    @classmethod
    def rows_read(
        cls, raw: torch.Tensor, factor: float, final: float, out: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """See `Wire`."""
        del factor
        values = raw.view(dtype)[: out.numel()]
        return values * final if final != 1.0 else values


class CastWire(Wire):
    """Divided first, so that large gradients do not overflow, then cast, then summed."""

    cast: ClassVar[torch.dtype]

    def __init__(self, route: Route, options: Options) -> None:
        super().__init__(route, options)
        self._scratch = Scratch()

    @classmethod
    def paper(cls, ratio: float) -> Paper:
        """See `Wire`."""
        del ratio
        return Paper(cls.name, 0.5, True, 3.0)

    def exchange(self, shard: torch.Tensor, state: ShardState) -> None:
        """See `Wire`."""
        del state
        if self.outer.gathers_sums(shard):
            # In two passes instead of four: what came is added where it lies, and not rounded.
            received = self._scratch.get(2 * shard.numel(), self.cast, shard.device)
            if (room := self.outer.room(received)) is not None:
                casts.narrow(shard, self.scaling.outer, room)
                self.outer.all_gather(received, room)
                sums.add_in_order(received.view(2, -1), 1.0, shard)
                return
        small = self._scratch.get(shard.numel(), self.cast, shard.device)
        casts.narrow(shard, self.scaling.outer, small)
        self.outer.all_reduce(small, dist.ReduceOp.SUM)
        casts.widen(small, 1.0, shard)

    def sent_bytes(self, numel: int, itemsize: int, state: ShardState | None = None) -> int:
        """See `Wire`."""
        return super().sent_bytes(numel, self.cast.itemsize)

    @classmethod
    def rows_bytes(cls, numel: int, dtype: torch.dtype) -> int:
        """See `Wire`."""
        del dtype
        return padded(numel * cls.cast.itemsize, 16)

    @classmethod
    def rows_write(cls, values: torch.Tensor, factor: float, raw: torch.Tensor, key: int) -> None:
        """See `Wire`."""
        del key
        room = raw.view(cls.cast)
        casts.narrow(values, factor, room[: values.numel()])
        room[values.numel() :].zero_()

    @classmethod
    def rows_read(
        cls, raw: torch.Tensor, factor: float, final: float, out: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """See `Wire`."""
        del factor, dtype
        casts.widen(raw.view(cls.cast)[: out.numel()], final, out)
        return out


@register
class FP16Wire(CastWire):
    """11 bits of precision; gradients below 6e-8 vanish, those above 65,504 become infinite.

    So it falls back to BF16, of as many bytes, and not to exact.
    """

    name = "fp16"
    title = "FP16"
    what = "FP16 between nodes"
    place = 10
    late = ""
    first_update = 0.02
    milder, rows_as = "bf16", "fp16"
    overflows = True
    cast = torch.float16
    limits = Limits(cosine=0.99, each=_LEAST)


@register
class BF16Wire(CastWire):
    """8 bits of precision, FP32's range."""

    name = "bf16"
    title = "BF16"
    what = "BF16 between nodes"
    place = 11
    late = ""
    first_update = 0.05
    rows_as = "bf16"
    cast = torch.bfloat16
    limits = Limits(cosine=0.99, each=_LEAST)
