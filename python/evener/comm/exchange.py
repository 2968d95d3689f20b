"""One bucket's exchange between nodes: its form, what that form remembers, and what surrounds it.

The reducer calls `run(shard)` on the outer lane. Around the form's own `exchange` lie, in this
order: the loss scale's change, a residual that a milder form has inherited and will not keep,
momentum, the division of an average, and on checked steps the guard's measurement.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from evener.comm.buckets import Bucket
from evener.comm.codecs import lowrank
from evener.comm.groups import Route
from evener.comm.options import Options
from evener.comm.state import ScaleChange, ShardState, let_go
from evener.comm.wires import Wire


@dataclass(frozen=True)
class Step:
    """What the reducer says of a step when it submits a bucket."""

    change: ScaleChange | None = None
    checked: bool = False
    follows_scale: bool = False
    timed: bool = False


@dataclass
class Exchange:
    """See the module. `names`: of the parameters, in the bucket's order."""

    bucket: Bucket
    route: Route
    wire: Wire
    options: Options
    names: list[str]
    state: ShardState = field(init=False)
    timer: Timer = field(init=False)
    # [2 + 3 parameters] float64, by the last checked step: the squares of residual and gradient,
    # then of each parameter compressed . dense, and the squares of both.
    measured: torch.Tensor | None = None
    predicted_ms: float | None = None  # by the planner, where there is one

    def __post_init__(self) -> None:
        self.state = ShardState(self.bucket.index)
        self.state.matrices = lowrank.matrices(self.bucket, *self.place())
        self.timer = Timer()

    @property
    def crosses(self) -> bool:
        """Whether anything is exchanged at all."""
        return self.route.levels.crosses

    @property
    def bytes(self) -> int:
        """Bytes of the gradients that it stands for."""
        return self.bucket.bytes

    @property
    def sent_bytes(self) -> int:
        """What this rank hands to the network in a step."""
        if not self.crosses or not self.route.levels.owns:
            return 0
        start, end = self.place()
        return self.wire.sent_bytes(end - start, self.bucket.buffer.element_size(), self.state)

    @property
    def title(self) -> str:
        """For logs and records."""
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else self.bucket.part
        return f"bucket {self.bucket.index} ({self.names[0]}{more})"

    def place(self) -> tuple[int, int]:
        """Start and end of this rank's shard in the bucket."""
        return self.route.place(self.bucket.buffer.numel())

    def run(self, shard: torch.Tensor, step: Step, aside: Sequence[tuple[int, int]] = ()) -> None:
        """Reduce `shard` over the outer group, in place. `aside`: see `ShardState.aside`."""
        if step.change is not None:
            self.state.rescale(step.change)
        self.state.keep_sent = step.follows_scale
        with self.timer.around(shard, step.timed), self.state.aside(aside, shard.numel()):
            if self.crosses:
                self._cross(shard, step)
            if self.options.momentum and not (self.crosses and self.wire.sparse):
                self._momentum_after(shard)
            if self.route.scaling.final != 1.0:
                shard.mul_(self.route.scaling.final)

    def _cross(self, shard: torch.Tensor, step: Step) -> None:
        state = self.state
        if state.residual is not None and not self.wire.feedback:
            shard.add_(state.residual)
            let_go(state.residual)
            state.residual, state.sent = None, None
        if self.options.momentum and self.wire.sparse:
            self._own_velocity(shard)
        compressed = self.wire.name != "exact"
        before = shard.clone() if step.checked and compressed else None
        if self.route.levels.owns:
            self.wire.exchange(shard, state)
        elif self.wire.feedback:
            state.residual_for(shard)  # of nothing: what is asked of all ranks is asked here too
        if before is not None:
            self._measure(before, shard)
        if compressed:
            state.steps += 1

    # --- momentum ---

    def _own_velocity(self, shard: torch.Tensor) -> None:
        """Before a sparse form: this rank's own velocity, a share of what was everybody's."""
        state = self.state
        state.velocity_before = None
        if state.velocity is None:
            state.velocity = torch.zeros(shard.numel(), dtype=torch.float32, device=shard.device)
        elif not state.velocity_local:
            state.velocity.div_(self.route.outer.size * self.route.scaling.outer)
        state.velocity_local = True

    def _momentum_after(self, shard: torch.Tensor) -> None:
        """After a dense form: everybody's velocity, which is then the result."""
        state = self.state
        if state.velocity is not None and state.velocity_local:
            self._add_up(state.velocity)
        state.velocity_local = False
        shard.copy_(state.with_momentum(shard, self.options.momentum))

    def _add_up(self, tensor: torch.Tensor) -> None:
        """What the ranks of the outer group hold, as one gradient. Collective."""
        if self.crosses and self.route.levels.owns:
            self.route.outer.all_reduce(tensor, dist.ReduceOp.SUM)
            tensor.mul_(self.route.scaling.outer)

    # --- the guard ---

    def _measure(self, before: torch.Tensor, after: torch.Tensor) -> None:
        gradient = before.double().square().sum()
        dense = before.float()
        self._add_up(dense)
        result = after.float()
        none = gradient.new_zeros(())
        residual = self.state.residual
        sums = [none if residual is None else _dot(residual, residual), gradient]
        start, end = self.place()
        for slot in self.bucket.slots:
            low, high = max(slot.offset, start), min(slot.offset + slot.numel, end)
            if low >= high:  # another rank's
                sums += [none] * 3
                continue
            one, other = result[low - start : high - start], dense[low - start : high - start]
            sums += [_dot(one, other), _dot(one, one), _dot(other, other)]
        self.measured = torch.stack(sums)

    # --- checkpoints ---

    def owed(self, tensor: torch.Tensor, local: bool) -> torch.Tensor:
        """A shard's tensor of all ranks as one, of the bucket's length: float32. Collective.

        In units of the result. `local`: every rank of the outer group has its own; else all have
        the same.
        """
        start, end = self.place()
        part = tensor.clone()
        if local:
            self._add_up(part)
        part.mul_(self.route.scaling.final)
        if self.route.gather is None:
            return part
        whole = torch.empty(self.bucket.buffer.numel(), dtype=torch.float32, device=part.device)
        whole[start:end] = part
        self.route.spread_inside(whole)
        return whole

    def take_over(self, whole: torch.Tensor, local: bool) -> torch.Tensor:
        """This rank's share of what `owed` returned, maybe in another world."""
        start, end = self.place()
        scaling = self.route.scaling
        share = 1.0 / scaling.final
        if local and self.crosses:
            share /= self.route.outer.size * scaling.outer
        return whole[start:end].to(self.bucket.buffer.device, torch.float32) * share


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # In float64, because squares of 1e-23 are nothing in float32; in blocks, to save memory.
    return torch.stack(
        [
            x.double().dot(y.double())
            for x, y in zip(a.split(1 << 22), b.split(1 << 22), strict=True)
        ]
    ).sum()


class Timer:
    """How long the exchange took, in ms: the last one that has ended. Never waits."""

    def __init__(self) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._ms: float | None = None
        self._began = 0.0
        self._on = False

    def around(self, shard: torch.Tensor, on: bool) -> Timer:
        """`with timer.around(shard, True):` what is timed."""
        self._on = on
        if on and shard.device.type == "cuda":
            self._collect()
            if self._events is None:
                self._events = (
                    torch.cuda.Event(enable_timing=True),
                    torch.cuda.Event(enable_timing=True),
                )
        return self

    def __enter__(self) -> None:
        if self._on and self._events is not None:
            self._events[0].record()
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        if not self._on:
            return
        if self._events is not None:
            self._events[1].record()
        else:
            self._ms = 1e3 * (time.perf_counter() - self._began)

    def _collect(self) -> None:
        if self._events is not None and self._events[1].query():
            self._ms = self._events[0].elapsed_time(self._events[1])

    @property
    def ms(self) -> float | None:
        """None where nothing has been timed yet."""
        self._collect()
        return self._ms
