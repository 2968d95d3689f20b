"""Measures what the planner needs, on the groups and with the code that training uses.

Every rank takes part, all at the same time, as in a step: the links are shared then as they are
here. Sizes are the buckets' own, from the smallest to the largest, as far as one call stays within
a third of `MOST_MS`; reported is the slowest rank's time, for that is what a step waits for. Forms
are whatever makes a `Wire`; their time includes encoding and decoding.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from evener.comm.buckets import ALIGN, padded
from evener.comm.groups import Communicators
from evener.comm.lanes import OUTER_STREAMS, Lanes
from evener.comm.planner.costs import Costs, Curve, encoding
from evener.comm.profile import Clock
from evener.comm.state import ShardState
from evener.comm.wires import Wire

logger = logging.getLogger("evener.comm")

MOST_MS = 120.0
_LEAST_BYTES = 1 << 16
_GROWTH = 16
_MOST_BYTES = 128 << 20
_REPEATS = 3
# Calls that will take this many milliseconds are timed once: they scatter less than short ones.
_LONG_MS = 20.0
_AHEAD = 1 << 20  # cycles, about half a millisecond


class Probe:
    """One measurement of one reducer's network. All methods are collective."""

    def __init__(self, communicators: Communicators, lanes: Lanes | None = None) -> None:
        """`lanes`: on which exchanges are in flight at once, as training has them."""
        self.communicators = communicators
        self.lanes = lanes
        self.device = communicators.device
        self._states: dict[tuple[str, int, int], ShardState] = {}

    def costs(self, wires: Mapping[str, Wire], sizes: tuple[int, int], *, flat: bool) -> Costs:
        """Costs for buckets from `sizes[0]` to `sizes[1]` bytes, of FP32 gradients.

        `wires`: what makes each form, by name; "exact" must be among them. `flat`: measure the
        one-level all-reduce too, where there are two levels.
        """
        began = time.perf_counter()
        route = self.communicators.route
        shards = route.shards
        scatter = gather = Curve(())
        if route.levels.two_level:
            scatter = self._curve(sizes, route.reduce_inside)
            gather = self._curve(sizes, route.spread_inside)
        exchange = {
            name: self._curve(
                (sizes[0] // shards, sizes[1] // shards),
                lambda shard, wire=wire: self._exchange(shard, wire),  # type: ignore[misc]
                self.lanes if route.outer.transport is not None else None,
            )
            for name, wire in wires.items()
        }
        flat_curve = None
        if flat and route.levels.two_level:
            everyone = self.communicators.flat().outer
            flat_curve = self._curve(
                sizes, lambda whole: everyone.all_reduce(whole, dist.ReduceOp.SUM)
            )
            everyone.release()
        route.outer.release()
        notes = {"probe_s": time.perf_counter() - began}
        nodes, ranks = len(route.levels.sizes), self.communicators.size
        encode = encoding(self._memory(), list(wires))
        return Costs(nodes, shards, scatter, gather, exchange, flat_curve, notes, encode, ranks)

    def _memory(self) -> float:
        """Bytes a millisecond that this device's memory moves: a copy reads and writes."""
        # More than a GPU's cache holds.
        size = (128 if self.device.type == "cuda" else 16) << 20
        source, target = self._room(size).zero_(), self._room(size)
        return 2 * source.numel() / self._best(lambda: target.copy_(source))

    def _room(self, size: int) -> torch.Tensor:
        """uint8 [size], which goes back to the system when it is dropped.

        From malloc it would not: what a job allocates next lies behind it, and the process stays
        as large with each reducer that is planned.
        """
        if self.device.type == "cpu":
            return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def _exchange(self, shard: torch.Tensor, wire: Wire) -> None:
        if not wire.route.levels.owns:
            return  # the slowest rank's time counts
        # Some forms keep residuals, which must have the shard's length.
        key = (wire.name, shard.numel(), shard.data_ptr())
        wire.exchange(shard, self._states.setdefault(key, ShardState(0)))

    def _curve(
        self,
        sizes: tuple[int, int],
        operation: Callable[[torch.Tensor], None],
        lanes: Lanes | None = None,
    ) -> Curve:
        large = min(max(sizes[1], 4 * _LEAST_BYTES), _MOST_BYTES)
        small = max(min(sizes[0], large // 4), _LEAST_BYTES)
        points = [(float(small), self._time(small, operation, lanes))]
        while points[-1][0] < large:
            last, took = points[-1]
            # What the last one says of the next: latency makes it too much, never too little.
            most = last * max(2.0, MOST_MS / _REPEATS / max(took, 1e-6))
            size = min(float(large), last * _GROWTH, most)
            # By what all ranks were told, so that all make the same calls.
            times = 1 if took * size / last >= _LONG_MS else 2
            points.append((size, self._time(int(size), operation, lanes, times)))
            if points[-1][1] > MOST_MS / _REPEATS / 2:
                break
        return Curve(tuple(points))

    def _time(
        self,
        size: int,
        operation: Callable[[torch.Tensor], None],
        lanes: Lanes | None,
        times: int = 2,
    ) -> float:
        """Milliseconds of one call on `size` bytes of FP32 among others: the slowest rank's."""
        numel = padded(size // 4, ALIGN * self.communicators.route.shards)
        # Of its own: the script's random numbers are those that it would draw without a probe.
        own = torch.Generator(self.device).manual_seed(1 + self.communicators.rank)
        data = [
            self._room(4 * numel).view(torch.float32).normal_(generator=own)
            for _ in range(OUTER_STREAMS if lanes else 1)
        ]

        def turns() -> None:
            assert lanes is not None
            calls = [partial(operation, part) for part in data]
            tickets = [
                lanes.issue("probe", (None, calls[turn % OUTER_STREAMS], None), turn)
                for turn in range(2 * OUTER_STREAMS)
            ]
            for ticket in tickets:
                ticket.wait()

        if lanes is None:
            best = self._best(lambda: operation(data[0]), times=times)
        else:
            best = self._best(turns, 1, times) / (2 * OUTER_STREAMS)
        slowest = torch.tensor([best], dtype=torch.float64)
        control = self.communicators.control.handle
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=control)
        return float(slowest.item())

    def _best(self, call: Callable[[], object], repeats: int = _REPEATS, times: int = 2) -> float:
        """Milliseconds of one call, of a few in a row, as buckets follow each other; the best
        of `times`.

        On a GPU by the device's clock: that the host waits for the end is not what a step does.
        """
        call()
        clock, best = Clock(self.device), float("inf")
        for _ in range(times):
            self._meet()
            if clock.gpu:
                torch.cuda._sleep(_AHEAD)  # the host enqueues all calls meanwhile
            start = clock.mark()
            for _ in range(repeats):
                call()
            end = clock.mark()
            if clock.gpu:
                torch.cuda.synchronize(self.device)
            best = min(best, clock.ms(start, end) / repeats)
        return best

    def _meet(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        dist.barrier(group=self.communicators.control.handle)


def describe(costs: Costs) -> list[str]:
    """What was found, in words: latency and bandwidth of each stage."""
    lines = []
    named = {"reduce-scatter in the node": costs.scatter, "all-gather in the node": costs.gather}
    named |= {f"{form} between nodes": curve for form, curve in costs.exchange.items()}
    if costs.flat is not None:
        named["flat all-reduce"] = costs.flat
    for name, curve in named.items():
        if len(curve.points) > 1:
            (x0, y0), (x1, y1) = curve.points[-2:]
            slope = (y1 - y0) / (x1 - x0)
            rate = f"{1e-6 / slope:.2f} GB/s of gradients" if slope > 0 else "no limit seen"
            lines.append(f"{name}: {curve(1.0):.3f} ms and {rate}")
    return lines
