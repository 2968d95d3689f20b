"""The operations as autograd functions. What each one's gradient is, is upstream's choice.

Where upstream averages although the derivative is a sum (all-gather, broadcast), so does this:
scripts were tuned with it.
"""

from __future__ import annotations

from typing import Any

import torch

from evener.horovod.common.reductions import Average, Sum
from evener.horovod.state import STATE
from evener.horovod.torch import start


def wait(handle: int) -> Any:
    """The result of a handle."""
    return STATE.engine.synchronize(handle)


class AllReduce(torch.autograd.Function):
    """The gradient of a reduction is the same reduction of the gradient."""

    @staticmethod
    def forward(ctx: Any, name: str | None, grouped: bool, *rest: Any) -> Any:
        op, factors, process_set, *tensors = rest
        ctx.arguments = op, factors, process_set
        ctx.grouped = grouped
        outputs = [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]
        handle = start.allreduce(
            tensors, outputs, True, name, op, factors, process_set, urgent=True
        )
        return tuple(wait(handle)) if grouped else wait(handle)[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        given = [grad.contiguous() for grad in grads]
        reduced = AllReduce.apply(None, True, *ctx.arguments, *given)
        return (*[None] * 5, *reduced)


class AllGather(torch.autograd.Function):
    """The gradient is the average of the ranks' gradients, of which each takes its rows."""

    @staticmethod
    def forward(ctx: Any, name: str | None, grouped: bool, process_set: Any, *tensors: Any) -> Any:
        ctx.process_set = process_set
        ctx.shapes = [tensor.shape for tensor in tensors]
        handle = start.allgather(tensors, True, name, process_set, urgent=True)
        return tuple(wait(handle)) if grouped else wait(handle)[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        given = [grad.contiguous() for grad in grads]
        reduced = AllReduce.apply(None, True, Average, (1.0, 1.0), ctx.process_set, *given)
        counts = torch.tensor([[shape[0] if shape else 1 for shape in ctx.shapes]])
        rows = wait(start.allgather([counts], False, None, ctx.process_set, urgent=True))
        _, _, made = start.member(ctx.process_set)
        before = rows[: made.place].sum(0).tolist()
        mine = [
            grad.narrow(0, first, shape[0] if shape else 1).reshape(shape)
            for grad, first, shape in zip(reduced, before, ctx.shapes, strict=True)
        ]
        return (None, None, None, *mine)


class Broadcast(torch.autograd.Function):
    """The gradient is the average of the ranks' gradients, for the root alone."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: Any, process_set: Any) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        copy = start.detached(tensor).clone()
        return wait(start.broadcast([copy], root_rank, name, process_set, result=copy, urgent=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        given = grads[0].contiguous()
        reduced = AllReduce.apply(None, False, Average, (1.0, 1.0), ctx.process_set, given)
        mine = STATE.ranks.rank == ctx.root_rank
        return (reduced if mine else torch.zeros_like(reduced), *[None] * 3)


class AllToAll(torch.autograd.Function):
    """The gradient travels back the way the data came."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any, name: Any, process_set: Any) -> Any:
        handle = start.alltoall(tensor, splits, name, process_set, urgent=True, received=True)
        result, ctx.received = wait(handle)
        ctx.process_set, ctx.rows = process_set, tensor.shape[0]
        if splits is None:
            return result
        ctx.mark_non_differentiable(ctx.received)
        return result, ctx.received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = grads[0].contiguous()
        back, _ = wait(start.alltoall(grad, ctx.received, None, ctx.process_set, urgent=True))
        if back.shape[0] < ctx.rows:  # rows that were sent to nobody
            rest = back.new_zeros((ctx.rows - back.shape[0], *back.shape[1:]))
            back = torch.cat([back, rest])
        return back, None, None, None


class ReduceScatter(torch.autograd.Function):
    """The gradient is gathered; upstream multiplies it by the size where the reduction is a sum."""

    @staticmethod
    def forward(ctx: Any, name: str | None, grouped: bool, *rest: Any) -> Any:
        op, factors, process_set, *tensors = rest
        ctx.op, ctx.factors, ctx.process_set = op, factors, process_set
        handle = start.reducescatter(tensors, True, name, op, factors, process_set, urgent=True)
        return tuple(wait(handle)) if grouped else wait(handle)[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        factor = ctx.factors[0] * ctx.factors[1]
        if ctx.op == Sum:
            factor *= len(start.member(ctx.process_set)[2].ranks)
        scaled = [grad.contiguous() * factor for grad in grads]
        gathered = AllGather.apply(None, True, ctx.process_set, *scaled)
        return (*[None] * 5, *gathered)
