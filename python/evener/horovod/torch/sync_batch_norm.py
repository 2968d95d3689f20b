"""Batch normalisation by the mean and variance of all ranks' batches together.

Every rank computes mean and variance of its own part, [C] each; one all-gather brings them and the
parts' sizes to all, and the parts are merged as in Chan, Golub and LeVeque (1979), which loses no
digits where a sum of squares would. Backward needs one all-reduce, of two [C] vectors. On a GPU the
passes over the data are the kernels that torch.nn.SyncBatchNorm uses; on the CPU, where upstream
refuses, plain torch operations.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody
from torch.nn.modules.batchnorm import _BatchNorm

from evener.horovod.torch.mpi_ops import Sum, allgather_async, allreduce_async, size, synchronize


class SyncBatchNorm(_BatchNorm):
    """As torch.nn.BatchNorm{1,2,3}d, over all ranks. Input [N, C, ...]; N may differ per rank.

    The gradients of weight and bias are this rank's: DistributedOptimizer reduces them.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Collective where it normalises by the batch: in training, or without running values."""
        self._check_input_dim(input)
        by_batch = self.training or not self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # a plain average over all batches so far
                momentum = 1.0 / float(self.num_batches_tracked)
        keeps = self.training and self.track_running_stats
        running = (self.running_mean, self.running_var) if keeps else (None, None)
        if not by_batch or size() == 1:
            if not by_batch:
                running = (self.running_mean, self.running_var)
            return F.batch_norm(
                input, *running, self.weight, self.bias, by_batch, momentum, self.eps
            )
        output = _Normalize.apply(input, self.weight, self.bias, *running, self.eps, momentum)
        return cast(torch.Tensor, output)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        eps: float,
        momentum: float,
    ) -> torch.Tensor:
        x = x.contiguous()
        channels = x.shape[1]
        mine = x.numel() // channels
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        mean = torch.zeros(channels, dtype=wide, device=x.device)
        var = torch.zeros_like(mean)
        if mine and x.is_cuda:
            mean, invstd = torch.batch_norm_stats(x, eps)
            var = invstd.pow(-2) - eps
        elif mine:
            var, mean = torch.var_mean(x.to(wide), _dims(x), correction=0)
        count = torch.full((1,), float(mine), dtype=wide, device=x.device)
        parts = synchronize(allgather_async(torch.cat([mean, var, count]).unsqueeze(0)))
        means, variances, counts = parts.split([channels, channels, 1], dim=1)
        total = counts.sum()
        mean = (means * counts).sum(0) / total
        var = ((variances + (means - mean).square()) * counts).sum(0) / total
        invstd = (var + eps).rsqrt()
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
            unbiased = var * (total / (total - 1))
            running_var.lerp_(unbiased.to(running_var.dtype), momentum)
        ctx.save_for_backward(x, weight, mean, invstd, counts)
        if x.is_cuda and mine:
            return torch.batch_norm_elemt(x, weight, bias, mean, invstd, eps)
        y = (x.to(wide) - _spread(mean, x)) * _spread(invstd, x)
        if weight is not None and bias is not None:
            y = y * _spread(weight.to(wide), x) + _spread(bias.to(wide), x)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, mean, invstd, counts = ctx.saved_tensors
        grad = grads[0].contiguous()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if x.is_cuda and x.numel():
            sum_dy, sum_dy_xmu, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
                grad, x, mean, invstd, weight, needs_x, needs_weight, needs_bias
            )
        else:
            g, centred = grad.to(mean.dtype), x.to(mean.dtype) - _spread(mean, x)
            sum_dy, sum_dy_xmu = g.sum(_dims(x)), (g * centred).sum(_dims(x))
            grad_weight, grad_bias = sum_dy_xmu * invstd, sum_dy
        grad_x = None
        if needs_x:
            sums = torch.cat([sum_dy, sum_dy_xmu])
            sum_dy, sum_dy_xmu = synchronize(allreduce_async(sums, op=Sum)).chunk(2)
            if x.is_cuda and x.numel():
                whole = counts.to(torch.int32)
                grad_x = torch.batch_norm_backward_elemt(
                    grad, x, mean, invstd, weight, sum_dy, sum_dy_xmu, whole
                )
            else:
                total = counts.sum()
                slope = invstd.square() * sum_dy_xmu / total
                grad_x = grad.to(mean.dtype) - _spread(sum_dy / total, x)
                grad_x = (grad_x - (x.to(mean.dtype) - _spread(mean, x)) * _spread(slope, x)) * (
                    _spread(invstd if weight is None else invstd * weight, x)
                )
                grad_x = grad_x.to(x.dtype)
        return (
            grad_x,
            grad_weight.to(weight.dtype) if needs_weight else None,
            grad_bias.to(weight.dtype) if needs_bias else None,
            *[None] * 4,
        )


def _dims(x: torch.Tensor) -> list[int]:
    """All dimensions but the channels'."""
    return [0, *range(2, x.dim())]


def _spread(vector: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[C] in a shape that broadcasts over [N, C, ...]."""
    return vector.view(1, -1, *[1] * (x.dim() - 2))
