"""`DistributedOptimizer(op=hvd.Adasum)`: ranks step by themselves, and their updates are combined.

Adasum adds what points elsewhere and averages what points the same way (`evener.horovod.adasum`).
Applied to gradients it would be at odds with optimizers that scale them (Adam's step depends little
on the gradient's length), so, as upstream's, it is applied to the change that the wrapped optimizer
makes to each parameter: from the same start p, rank r steps to p + d_r, and all go on from
p + Adasum(d_0, d_1, ...). All updates of a step are combined in one grouped operation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import torch

from evener.horovod.common.reductions import Adasum
from evener.horovod.torch import start
from evener.horovod.torch.compression import Compressor
from evener.horovod.torch.functions import contents
from evener.horovod.torch.gradients import wait


def adasum_optimizer(
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, torch.nn.Parameter]],
    compression: type[Compressor],
    passes: int,
    process_set: Any,
) -> Any:
    """`optimizer`, whose step is followed by the combination of all ranks' updates.

    named: its parameters. compression: what updates are sent as. Raises NotImplementedError for a
    process set that is not global, and for a number of ranks that is no power of 2.
    """
    start.checked_op(Adasum, process_set)
    base = type(optimizer)
    members = {
        k: v
        for k, v in vars(_DistributedAdasumOptimizer).items()
        if k not in ("__dict__", "__weakref__")
    }
    members["_evener_base"] = base
    made: Any = object.__new__(type(base.__name__, (base,), members))
    made.__dict__.update(contents(optimizer))
    made._parameter_names = {parameter: name for name, parameter in named}
    made._compression = compression
    made.backward_passes_per_step = passes
    return made


class _DistributedAdasumOptimizer:
    """The members of the class that `adasum_optimizer` makes. `self` is an Optimizer too."""

    _evener_base: Any
    _compression: type[Compressor]
    param_groups: list[dict[str, Any]]
    backward_passes_per_step: int

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Kept for scripts; gradients accumulate until `step` anyway."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Nothing: gradients are not reduced."""

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """Raises AssertionError, as upstream: there is nothing to skip."""
        raise AssertionError("skip_synchronize() is not supported with op=hvd.Adasum")

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """The wrapped optimizer's step, then the combination of all ranks' changes."""
        parameters = [
            parameter
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        before = [parameter.detach().clone() for parameter in parameters]
        arguments = kwargs if closure is None else {"closure": closure, **kwargs}
        result = self._evener_base.step(self, **arguments)
        with torch.no_grad():
            changes = [
                (parameter - old).contiguous()
                for parameter, old in zip(parameters, before, strict=True)
            ]
            small = [self._compression.compress(change) for change in changes]
            sent = [tensor for tensor, _ in small]
            handle = start.allreduce(sent, sent, True, None, Adasum, (1.0, 1.0), None, urgent=True)
            combined = cast("list[torch.Tensor]", wait(handle))
            for parameter, old, change, (_, context) in zip(
                parameters, before, combined, small, strict=True
            ):
                parameter.copy_(old + self._compression.decompress(change, context))
        return result

    step.hooked = True  # type: ignore[attr-defined]
