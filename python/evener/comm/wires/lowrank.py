"""Low rank: matrices as products of two thin ones (`codecs.lowrank`), with error feedback.

Two small all-reduces a bucket: one of P and of what is sent exactly, one of Q. All ranks compute
the result from the same two sums; they end with the same bits where their devices are of one kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.distributed as dist

from evener.comm.codecs import int8, lowrank
from evener.comm.codecs.lowrank import Layout, Memory, SentFactors
from evener.comm.groups import Route
from evener.comm.options import Options
from evener.comm.scratch import Scratch
from evener.comm.state import ShardState
from evener.comm.wires.base import Limits, Paper, Wire, around, register


class LowRankWire(Wire):
    """See the module. `rank`: columns of the thin matrices."""

    rank: ClassVar[int]
    milder, rows_as, late = "int8", "int8", "low-rank"
    lossy = feedback = True
    # Those of top-k, for the same reason: what comes late is no gradient to Adam.
    limits = Limits(residual=100.0)
    strict = Limits(residual=0.25)

    def __init__(self, route: Route, options: Options) -> None:
        super().__init__(route, options)
        self._left, self._right, self._sum = Scratch(), Scratch(), Scratch()

    @classmethod
    def paper(cls, ratio: float) -> Paper:
        """See `Wire`: of a square matrix, P and Q, in two collectives.

        Gradient and residual are read and the residual written; read for P and for Q; cleaned; and
        residual and result are passed over once a column.
        """
        del ratio
        return Paper(cls.name, 0.0, True, 6.0 + 4.0 * cls.rank, root=8.0 * cls.rank, rounds=2)

    def exchange(self, shard: torch.Tensor, state: ShardState) -> None:
        """See `Wire`."""
        # A script may call backward under autocast, and this is its thread.
        with torch.autocast(shard.device.type, enabled=False), torch.no_grad():
            total = shard
            if shard.dtype != torch.float32:
                total = self._sum.get(shard.numel(), torch.float32, shard.device)
            self._exchange(shard, total, state)
            if total is not shard:
                shard.copy_(total)

    def _exchange(self, shard: torch.Tensor, total: torch.Tensor, state: ShardState) -> None:
        memory = self._memory(shard, state)
        layout, factor, device = memory.layout, self.scaling.outer, shard.device
        residual = state.residual_for(shard).add_(shard)
        exact, sizes = layout.exact, [end - start for start, end in layout.rest]
        first = self._left.get(exact + layout.left, torch.float32, device)
        rest, lefts = first[:exact], layout.lefts(first[exact:])
        _copy(rest.split(sizes), [residual[a:b] for a, b in layout.rest])
        matrices = [stack.of(residual) for stack in layout.stacks]
        for matrix, left, basis in zip(matrices, lefts, layout.wide(memory.basis), strict=True):
            torch.bmm(matrix, basis, out=left)
        self.outer.all_reduce(first, dist.ReduceOp.SUM)
        if layout.stacks:
            # All matrices of the bucket as one tensor, as tall as the tallest: a launch for each
            # operation and not for each matrix.
            padded = torch.zeros(layout.count, layout.rows, self.rank, device=device)
            _copy(layout.tall(padded), lefts)
            made, usable = lowrank.orthonormal(padded)
            second = self._right.get(layout.right, torch.float32, device)
            rights = layout.rights(second)
            for matrix, left, right in zip(matrices, layout.tall(made), rights, strict=True):
                torch.bmm(matrix.transpose(1, 2), left, out=right)
            own = torch.zeros(2, layout.count, layout.columns, self.rank, device=device)
            mine, found = own
            _copy(layout.wide(mine), rights)
            self.outer.all_reduce(second, dist.ReduceOp.SUM)
            _copy(layout.wide(found), rights)
            # Where some rank's gradient is not finite every rank's result is NaN, and keeps its
            # own.
            whole = (made.isfinite().all(2).all(1) & found.isfinite().all(2).all(1))[:, None, None]
            sent = SentFactors(layout, torch.where(whole, made, 0.0), torch.where(whole, mine, 0.0))
            lowrank.add_products(layout, residual, sent.left, sent.right, -1.0)
            made = torch.where(whole, made, torch.nan)
            lowrank.set_products(layout, total, made, found * factor)
            memory.renew(found, usable & whole)
            state.sent = sent if state.keep_sent else None
        _copy([total[a:b] for a, b in layout.rest], rest.mul_(factor).split(sizes))
        if layout.rest:
            torch._foreach_zero_([residual[a:b] for a, b in layout.rest])
        residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def _memory(self, shard: torch.Tensor, state: ShardState) -> Memory:
        memory = state.memory
        if not isinstance(memory, Memory) or memory.layout.rank != self.rank:
            found = state.matrices
            if found is None:
                found = lowrank.assumed(shard.numel())
            place = 0 if self.route.scatter is None else self.route.scatter.rank
            layout = Layout.of(shard.numel(), found, self.rank)
            memory = Memory.new(layout, int8.key(state.bucket, place, self.rank), shard.device)
            state.memory = memory
        return memory

    def sent_bytes(self, numel: int, itemsize: int, state: ShardState | None = None) -> int:
        """See `Wire`."""
        del itemsize
        found = None if state is None else state.matrices
        layout = Layout.of(numel, lowrank.assumed(numel) if found is None else found, self.rank)
        peers = self.outer.size
        return around(peers, 4 * (layout.exact + layout.left)) + around(peers, 4 * layout.right)


def _copy(to: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> None:
    if to:
        torch._foreach_copy_(list(to), list(source))


@register
class LowRank4Wire(LowRankWire):
    """Rank 4."""

    name = "lowrank4"
    title = "low rank, 4"
    what = "matrices as products of rank 4 between nodes (PowerSGD), with error feedback"
    place = 40
    late = "low-rank"
    first_update = 0.2
    rank = 4


@register
class LowRank2Wire(LowRankWire):
    """Rank 2."""

    name = "lowrank2"
    title = "low rank, 2"
    what = "matrices as products of rank 2 between nodes (PowerSGD), with error feedback"
    place = 41
    late = "low-rank"
    first_update = 0.2
    rank = 2


@register
class LowRank1Wire(LowRankWire):
    """Rank 1."""

    name = "lowrank1"
    title = "low rank, 1"
    what = "matrices as products of rank 1 between nodes (PowerSGD), with error feedback"
    place = 42
    late = "low-rank"
    first_update = 0.2
    rank = 1
