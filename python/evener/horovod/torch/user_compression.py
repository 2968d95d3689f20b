"""Gradients that go through a compression class of the user's own.

What such a class sends is its own affair (another shape, another dtype), so it cannot go through
the buckets of `evener.comm.reducer`. Each gradient is compressed when backward has made it, reduced
as an operation under its parameter's name (`evener.horovod.engine`, which fuses small ones), and
decompressed in `apply`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from evener.horovod.common.exceptions import HorovodInternalError
from evener.horovod.torch import start
from evener.horovod.torch.functions import allgather_object
from evener.horovod.torch.gradients import wait


class UserCompression:
    """The part of `Reducer` that DistributedOptimizer uses, with the same meaning."""

    def __init__(
        self,
        named: list[tuple[str, torch.nn.Parameter]],
        compression: Any,
        op: int,
        predivide: float,
        process_set: Any,
    ) -> None:
        """Collective over the set. Raises HorovodInternalError where the parameters differ."""
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.passes = 1
        self.densifies = False
        self.on_sparse: Callable[[int], None] | None = None
        self.sparse: set[int] = set()
        self.densified: set[int] = set()
        self._compression, self._op, self._set = compression, op, process_set
        self._factors = 1 / predivide, predivide
        self._agree()
        self._handles: dict[int, tuple[int, Any]] = {}
        self._left = [self.passes] * len(named)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, index))
            for index, parameter in enumerate(self.parameters)
        ]

    def _agree(self) -> None:
        mine = [
            (name, list(parameter.shape), str(parameter.dtype))
            for name, parameter in zip(self.names, self.parameters, strict=True)
        ]
        told = allgather_object(mine, name="user_compression", process_set=self._set)
        for rank, theirs in enumerate(told):
            if theirs != told[0]:
                pairs = zip(told[0], theirs, strict=False)
                first = next((pair for pair in pairs if pair[0] != pair[1]), None)
                raise HorovodInternalError(
                    f"member {rank} has other parameters than member 0: {len(theirs)} and "
                    f"{len(told[0])}" + (f", first {first[1]} and {first[0]}" if first else ""),
                    "make the same model on every rank",
                )

    def set_passes(self, passes: int) -> None:
        """From now on a gradient is complete after `passes` backward passes. Between steps only."""
        self.passes = passes
        self._left = [passes] * len(self.parameters)

    @property
    def pending(self) -> bool:
        """Whether gradients of this step have come."""
        return bool(self._handles) or any(left < self.passes for left in self._left)

    def with_gradients(self) -> list[torch.Tensor]:
        """The parameters whose gradients came in this step."""
        pairs = zip(self.parameters, self._left, strict=True)
        return [parameter for parameter, left in pairs if left < self.passes]

    def _arrived(self, index: int, _parameter: torch.Tensor) -> None:
        self._left[index] -= 1
        if self._left[index] < 0:
            raise AssertionError(
                f"the gradient of {self.names[index]} came more than {self.passes} times in a "
                "step: call optimizer.step() in between, or set backward_passes_per_step"
            )
        if self._left[index] == 0:
            self._submit(index)

    def _submit(self, index: int) -> None:
        parameter = self.parameters[index]
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        elif gradient.layout != torch.strided and self.densifies:
            gradient = parameter.grad = gradient.to_dense()
            self.densified.add(index)
        elif gradient.layout != torch.strided and self.on_sparse is not None:
            self.sparse.add(index)
            self.on_sparse(index)
            return
        with torch.no_grad():
            small, context = self._compression.compress(gradient.detach())
            small = small.contiguous()
        name = f"gradient.{self.names[index]}"
        handle = start.allreduce([small], [small], False, name, self._op, self._factors, self._set)
        self._handles[index] = handle, context

    def catch_up(self, _came: Sequence[torch.Tensor] = ()) -> None:
        """Gradients came before this was made: they count. One by one, so in any order."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self._left[index] = 0
                self._submit(index)

    def flush(self) -> None:
        """Submit what has not come: its gradient counts as it is, or as zeros."""
        for index in range(len(self.parameters)):
            if index not in self._handles and index not in self.sparse:
                self._submit(index)

    def apply(self) -> None:
        """Wait for the reduced gradients and put them in place."""
        handles, self._handles = self._handles, {}
        self._left = [self.passes] * len(self.parameters)
        with torch.no_grad():
            for index, (handle, context) in handles.items():
                parameter = self.parameters[index]
                reduced = self._compression.decompress(wait(handle), context)
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(reduced.view_as(parameter))

    def detach(self) -> None:
        """Gradients are left alone from now on."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def drop(self) -> None:
        """The same: it has no groups of its own."""
        self.detach()
