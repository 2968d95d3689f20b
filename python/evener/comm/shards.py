"""Reduce-scatter of gradients in INT8: FSDP2's `ReduceScatter`, with one rounding per rank.

Each rank quantizes the part of every other rank (`codecs.int8`: blocks of 1,024, rounding at random
and right on the mean), sends each its part in one all-to-all, and adds what it got in float32. So
an entry is rounded once, whatever the number of ranks; a ring would round it at every hop. The
own part is not rounded at all.

There is no error feedback: a residual would be as large as all gradients, in float32, on every
rank, which is what sharding avoids. Rounding is right on the mean without it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from evener.comm.codecs import int8
from evener.errors import UsageError


class QuantizedReduceScatter(ReduceScatter):
    """The reduce-scatter of one FSDP2 unit; give it to `FSDPModule.set_custom_reduce_scatter`.

    `unit`: its number, for the random rounding. Call `set_force_sum_reduction_for_comms(True)` on
    the module: then every sum is a plain one, and FSDP2 divides.
    """

    def __init__(self, unit: int) -> None:
        self.unit, self._calls = unit, 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """FSDP2's buffers: [world * n] of what goes in, [n] of what comes out."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """`output_tensor` [n] = the sum over ranks of row `rank` of `input_tensor` [world * n].

        On the current stream. What is not finite arrives as NaN. Raises UsageError where `op` is
        another one.
        """
        if op != dist.ReduceOp.SUM:
            raise UsageError(
                f"FSDP2 asks for a reduce-scatter by {op}",
                "call set_force_sum_reduction_for_comms(True) on each FSDPModule",
            )
        world, rank, n = group.size(), group.rank(), output_tensor.numel()
        rows = input_tensor.view(world, n)
        room = int8.room(n)
        scales_at = room
        width = room + 4 * (room // int8.BLOCK)
        sent = torch.empty(world, width, dtype=torch.uint8, device=rows.device)
        self._calls += 1
        for other in range(world):
            if other != rank:
                codes = sent[other, :scales_at].view(torch.int8)
                scales = sent[other, scales_at:].view(torch.float32)
                key = int8.key(self._calls, self.unit, rank, other)
                int8.quantize(rows[other], None, codes, scales, key)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        others = [other for other in range(world) if other != rank]
        total = torch.empty(n, dtype=torch.float32, device=rows.device)
        at = got if len(others) == world else got[others]
        int8.dequantize_sum(
            at[:, :scales_at].view(torch.int8), at[:, scales_at:].view(torch.float32), 1.0, total
        )
        output_tensor.copy_(total.add_(rows[rank]))
        return None
