"""A bucket leaves: its gradients are packed, and its collectives issued.

`evener.comm.arrivals` says when, and in which order. Three stages, each on a lane of its own, so
that one bucket crosses the network while the next is reduced in the node:

    reduce-scatter in the node    exchange between nodes (`Exchange.run`)    all-gather in the node

On one level there is only the second. A bucket by rows has it alone, too, and waits there for those
to which it adds.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from evener.comm import buckets as layout
from evener.comm import guard
from evener.comm.arrivals import Arrivals
from evener.comm.assignment import Assignment
from evener.comm.buckets import Bucket, Buckets
from evener.comm.exchange import Exchange, Step
from evener.comm.groups import Route
from evener.comm.lanes import Lanes, Stage, Ticket
from evener.comm.options import Options
from evener.comm.parts import Parts
from evener.comm.profile import Recorder
from evener.comm.records import Records
from evener.comm.rows import RowsExchange
from evener.comm.state import LossScale

Stages = tuple[Stage | None, Stage | None, Stage | None]


class Owner(Protocol):
    """The reducer, as far as it matters here."""

    parameters: list[nn.Parameter]
    options: Options
    buckets: Buckets
    arrivals: Arrivals
    parts: Parts
    assignment: Assignment
    lanes: Lanes
    loss_scale: LossScale
    optimizers: guard.Optimizers
    recorder: Recorder | None
    records: Records | None
    sparse: set[int]
    left_alone: frozenset[int]
    steps: int


class Departures:
    """How one reducer's buckets leave. `step`: what is known of the current step."""

    def __init__(self, reducer: Owner) -> None:
        self.step = Step()
        self._reducer = reducer
        self._packed: set[int] = set()

    def reset(self) -> None:
        """Expect the next step's gradients."""
        self._packed = set()

    def submit(self, index: int) -> Ticket:
        """Issue the collectives of bucket `index`. Raises CommError over a network that is gone."""
        reducer = self._reducer
        exchange = reducer.assignment.exchanges[index]
        rows = exchange.bucket.by_rows
        if not rows and exchange.bucket.slots[0].index not in self._packed:
            self._pack(exchange.bucket, exchange.route)
        place = reducer.arrivals.place
        if place == 0:
            self.step = self._begin_step()
        name = f"bucket {index} ({exchange.names[0]} ...)"
        stages: Stages = (None, None, None)
        if isinstance(exchange, RowsExchange):
            stages = (None, self._rows_stage(exchange), None)
        elif reducer.parts.sends(exchange.bucket.slots[0].index):
            stages = self._stages(exchange)
        if reducer.recorder is not None:
            stages = reducer.recorder.submitted(index, stages)
        turns = exchange.route.outer.transport is not None
        exchange.route.outer.check()
        return reducer.lanes.issue(name, stages, place if turns else 0)

    def _begin_step(self) -> Step:
        reducer = self._reducer
        strict = reducer.optimizers.strict
        due = guard.due(reducer.steps + 1, reducer.options.guard_steps, strict)
        return Step(
            change=reducer.loss_scale.change(),
            # Where all is exact there is nothing to check, and the step may be deferred.
            checked=due and reducer.assignment.compresses,
            follows_scale=reducer.loss_scale.active,
            timed=reducer.records is not None,
        )

    def _pack(self, bucket: Bucket, route: Route) -> None:
        if not bucket.whole:  # the first part of a tensor brings all of it
            self._packed.add(bucket.slots[0].index)
        parameters, parts, sparse = (
            self._reducer.parameters,
            self._reducer.parts,
            self._reducer.sparse,
        )
        if parts.watched or sparse:
            gradients: list[torch.Tensor | None] = [
                None if slot.index in sparse else parts.gradient(slot.index)
                for slot in bucket.slots
            ]
        else:
            gradients = [parameters[slot.index].grad for slot in bucket.slots]
        alone = self._reducer.left_alone
        if alone:
            gradients = [
                None if slot.index in alone else gradient
                for slot, gradient in zip(bucket.slots, gradients, strict=True)
            ]
        views = [self._reducer.buckets.views[slot.index] for slot in bucket.slots]
        with torch.no_grad():
            layout.pack(bucket, views, gradients, route.scaling.pack)
        for slot, view in zip(bucket.slots, views, strict=True):
            parameter = parameters[slot.index]
            gradient = parameter.grad
            stays = slot.index in sparse or slot.index in alone
            if gradient is not view and gradient is not None and not stays:
                parameter.grad = view

    def _stages(self, exchange: Exchange) -> Stages:
        route, whole, step = exchange.route, exchange.bucket.buffer, self.step
        start, end = exchange.place()
        shard = whole[start:end]
        # What nobody used sends nothing: its residual waits for a step that uses it.
        aside = [
            (max(slot.offset, start) - start, min(slot.offset + slot.numel, end) - start)
            for slot in exchange.bucket.slots
            if slot.index in self._reducer.left_alone
        ]

        def cross() -> None:
            exchange.run(shard, step, aside)

        if route.scatter is None:
            return None, cross, None
        return lambda: route.reduce_inside(whole), cross, lambda: route.spread_inside(whole)

    def _rows_stage(self, exchange: RowsExchange) -> Stage | None:
        parts, step = self._reducer.parts, self.step
        index = exchange.bucket.slots[0].index
        given, view = parts.rows(parts.of[index]), self._reducer.buckets.views[index]
        tickets = self._reducer.arrivals.tickets
        before = [tickets[b] for b in exchange.bucket.parts if b in tickets]
        if given is None:
            return None

        def wait() -> None:
            for ticket in before:
                ticket.wait()

        return lambda: exchange.bring(given, view, step, wait)
