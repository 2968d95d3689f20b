"""Forms in which every gradient crosses: exact, FP16, BF16."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist

from evener.comm import casts
from evener.comm.groups import Route
from evener.comm.options import Options
from evener.comm.scratch import Scratch
from evener.comm.state import ShardState
from evener.comm.wires.base import Limits, Wire, register


@register
class ExactWire(Wire):
    """The gradients' own dtype, summed by the collective library."""

    name = "exact"

    def exchange(self, shard: torch.Tensor, state: ShardState) -> None:
        """See `Wire`."""
        del state
        self.outer.all_reduce(shard, self.scaling.op)


class CastWire(Wire):
    """Divided first, so that large gradients do not overflow, then cast, then summed."""

    dtype: ClassVar[torch.dtype]

    def __init__(self, route: Route, options: Options) -> None:
        super().__init__(route, options)
        self._scratch = Scratch()

    def exchange(self, shard: torch.Tensor, state: ShardState) -> None:
        """See `Wire`."""
        del state
        small = self._scratch.get(shard.numel(), self.dtype, shard.device)
        casts.narrow(shard, self.scaling.outer, small)
        self.outer.all_reduce(small, dist.ReduceOp.SUM)
        casts.widen(small, 1.0, shard)

    def sent_bytes(self, numel: int, itemsize: int) -> int:
        """See `Wire`."""
        return super().sent_bytes(numel, self.dtype.itemsize)


@register
class FP16Wire(CastWire):
    """11 bits of precision; gradients below 6e-8 vanish."""

    name, dtype = "fp16", torch.float16
    limits = Limits(cosine=0.99)


@register
class BF16Wire(CastWire):
    """8 bits of precision, FP32's range."""

    name, dtype = "bf16", torch.bfloat16
    limits = Limits(cosine=0.99)
