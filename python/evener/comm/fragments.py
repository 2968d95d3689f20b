"""The parts in which local steps exchange a model, and an exchange of them that is on its way."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from evener.comm.buckets import Bucket, Slot, place
from evener.comm.errors import CommError
from evener.comm.exchange import Exchange, Step
from evener.comm.lanes import Stage, Ticket
from evener.comm.options import Options

# Sums of bits are taken apart in this many columns, so that two changes rarely cancel.
_COLUMNS = 32


@dataclass
class Fragment:
    """What is exchanged as one: `shared` weights by parameter, views of the bucket's buffer, and
    the outer `momentum`, of the same layout; None where there is none. `went`, `together`: squared
    lengths of what this rank sent last and of the mean that came of it, [] on the device.
    """

    bucket: Bucket
    exchange: Exchange
    parameters: list[torch.nn.Parameter]
    shared: list[torch.Tensor]
    momentum: torch.Tensor | None
    went: torch.Tensor | None = None
    together: torch.Tensor | None = None

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' places in `buffer`, which is laid out as the bucket is."""
        return [
            place(buffer, Slot(slot.index, slot.offset, slot.numel), parameter)
            for slot, parameter in zip(self.bucket.slots, self.parameters, strict=True)
        ]

    def gone(self) -> torch.Tensor:
        """How far this rank went from the shared weights: what `stages` average."""
        whole = torch.zeros_like(self.bucket.buffer)
        for view, shared, parameter in zip(
            self.views(whole), self.shared, self.parameters, strict=True
        ):
            torch.sub(rounded(shared, parameter), parameter.to(shared.dtype), out=view)
        self.went = whole.square().sum()
        if (pack := self.exchange.route.scaling.pack) != 1.0:
            whole.mul_(pack)
        return whole

    def stages(self, whole: torch.Tensor) -> list[Stage]:
        """What makes the average of all ranks from `whole`, in place; see `lanes`. Collective."""
        route = self.exchange.route
        start, end = self.exchange.place()

        def inside(stage: Stage, has: object) -> Stage:
            return _nothing if has is None else stage

        return [
            inside(functools.partial(route.reduce_inside, whole), route.scatter),
            functools.partial(self.exchange.run, whole[start:end], Step()),
            inside(functools.partial(route.spread_inside, whole), route.gather),
        ]

    def outer_step(self, whole: torch.Tensor, options: Options) -> None:
        """Move the shared weights by the average `whole`, which is used up."""
        means = self.views(whole)
        self.together = whole.square().sum()
        kept: Sequence[torch.Tensor | None] = [None] * len(means)
        if self.momentum is not None:
            kept = self.views(self.momentum)
        for mean, momentum, shared, parameter in zip(
            means, kept, self.shared, self.parameters, strict=True
        ):
            outer_step(mean, momentum, shared, options, parameter.requires_grad)

    def write(self, sent: Sequence[torch.Tensor] | None = None) -> None:
        """Go on from the shared weights, and keep how far this rank went since it had `sent`."""
        for i, (shared, parameter) in enumerate(zip(self.shared, self.parameters, strict=True)):
            if sent is None:
                parameter.copy_(shared)
            else:
                since = parameter.to(shared.dtype) - sent[i].to(shared.dtype)
                parameter.copy_(since.add_(shared))


def _nothing() -> None:
    """A stage of a route without an inner level."""


def outer_step(
    mean: torch.Tensor,
    momentum: torch.Tensor | None,
    shared: torch.Tensor,
    options: Options,
    trained: bool,
) -> None:
    """SGD with Nesterov momentum on `shared`; `mean` is used up. Not `trained`: what momentum there
    is would move a weight that the program has frozen, and is forgotten.
    """
    if momentum is not None:
        if not trained:
            momentum.zero_()
        momentum.mul_(options.outer_momentum).add_(mean)
        mean.add_(momentum, alpha=options.outer_momentum)
        if not trained:
            momentum.zero_()
    shared.add_(mean, alpha=-options.outer_lr)


def rounded(shared: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The shared weights as this parameter can hold them, in their own dtype."""
    return shared.to(parameter.dtype).to(shared.dtype)


def finite(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether all entries of all of them are; waits for the device once."""
    found = [p.detach() for p in parameters if p.numel()]
    if not found:
        return True
    largest = torch._foreach_norm(found, float("inf"))
    return bool(torch.stack([one.isfinite() for one in largest]).all())


def saved(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU without the buffer that it is a view of."""
    return tensor.detach().to("cpu", copy=True).clone()


def digest(buffers: Sequence[torch.Tensor]) -> int:
    """Equal for equal bits."""
    found = 0
    for buffer in buffers:
        bits = buffer.view(torch.int32).view(-1, _COLUMNS)
        found = zlib.crc32(bits.sum(0, dtype=torch.int64).cpu().numpy().tobytes(), found)
    return found


@dataclass
class Flight:
    """An exchange that runs behind the next steps. `wholes`: by fragment, what is averaged in
    place. `sent`: by fragment and parameter, the weights with which it began. `error`: what the
    ranks found when they met. `landed`: the shared weights have moved by it, and the rank's own
    have not yet. `asks`: it comes from a checkpoint, and what was loaded with it is not known yet.
    """

    wholes: list[torch.Tensor]
    sent: list[list[torch.Tensor]]
    tickets: list[Ticket] = field(default_factory=list)
    error: CommError | None = None
    landed: bool = False
    asks: bool = False

    def unless_failed(self, stage: Stage) -> Stage:
        """`stage`, but nothing where the ranks found that they must not exchange."""
        return lambda: None if self.error is not None else stage()
