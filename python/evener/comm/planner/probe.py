"""Measures what the planner needs, on the groups and with the code that training uses.

Every rank takes part, all at the same time, as in a step: the links are shared then as they are
here. Sizes are the buckets' own, from the smallest to the largest, as far as one call stays within
`MOST_MS`; rank 0 decides on sizes and reports the slowest rank's times, for that is what a step
waits for. Forms are whatever makes a `Wire`; their time includes encoding and decoding.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from evener.comm.buckets import ALIGN, padded
from evener.comm.groups import Communicators, Group
from evener.comm.planner.costs import Costs, Curve
from evener.comm.state import ShardState
from evener.comm.wires import Wire

logger = logging.getLogger("evener.comm")

MOST_MS = 120.0
_LEAST_BYTES = 1 << 16
_MOST_BYTES = 128 << 20
_REPEATS = 3


class Probe:
    """One measurement of one reducer's network. All methods are collective."""

    def __init__(self, communicators: Communicators) -> None:
        self.communicators = communicators
        self.device = communicators.device
        self._states: dict[tuple[str, int], ShardState] = {}

    def costs(self, wires: Mapping[str, Wire], sizes: tuple[int, int], *, flat: bool) -> Costs:
        """Costs for buckets from `sizes[0]` to `sizes[1]` bytes, of FP32 gradients.

        `wires`: what makes each form, by name; "exact" must be among them. `flat`: measure the
        one-level all-reduce too, where there are two levels.
        """
        began = time.perf_counter()
        route = self.communicators.route
        shards = route.shards
        scatter = gather = Curve(())
        if route.scatter is not None and route.gather is not None:
            inner, back = route.scatter, route.gather
            scatter = self._curve(sizes, lambda whole: self._scatter(whole, inner, shards))
            gather = self._curve(sizes, lambda whole: self._gather(whole, back, shards))
        exchange = {
            name: self._curve(
                (sizes[0] // shards, sizes[1] // shards),
                lambda shard, wire=wire: self._exchange(shard, wire),  # type: ignore[misc]
            )
            for name, wire in wires.items()
        }
        flat_curve = None
        if flat and shards > 1:
            everyone = self.communicators.flat().outer
            flat_curve = self._curve(
                sizes, lambda whole: everyone.all_reduce(whole, dist.ReduceOp.SUM)
            )
            everyone.release()
        route.outer.release()
        notes = {"probe_s": time.perf_counter() - began}
        nodes = self.communicators.size // shards
        return Costs(nodes, shards, scatter, gather, exchange, flat_curve, notes)

    def _scatter(self, whole: torch.Tensor, group: Group, shards: int) -> None:
        length = whole.numel() // shards
        shard = whole[group.rank * length : (group.rank + 1) * length]
        dist.reduce_scatter_tensor(shard, whole, group=group.handle)

    def _gather(self, whole: torch.Tensor, group: Group, shards: int) -> None:
        length = whole.numel() // shards
        shard = whole[group.rank * length : (group.rank + 1) * length]
        dist.all_gather_into_tensor(whole, shard, group=group.handle)

    def _exchange(self, shard: torch.Tensor, wire: Wire) -> None:
        # Some forms keep residuals, which must have the shard's length.
        key = (wire.name, shard.numel())
        wire.exchange(shard, self._states.setdefault(key, ShardState(0)))

    def _curve(self, sizes: tuple[int, int], operation: Callable[[torch.Tensor], None]) -> Curve:
        large = min(max(sizes[1], 4 * _LEAST_BYTES), _MOST_BYTES)
        small = max(min(sizes[0], large // 4), _LEAST_BYTES)
        points = [(float(small), self._time(small, operation))]
        # What the small one says of the large one: latency makes it too much, never too little.
        while large >= 8 * small and points[0][1] * large / small > MOST_MS:
            large //= 2
        points.append((float(large), self._time(large, operation)))
        middle = int((small * large) ** 0.5)
        if large >= 16 * small:
            points.insert(1, (float(middle), self._time(middle, operation)))
        return Curve(tuple(points))

    def _time(self, size: int, operation: Callable[[torch.Tensor], None]) -> float:
        """Milliseconds of one call on `size` bytes of FP32: the slowest rank's, best of a few."""
        numel = padded(size // 4, ALIGN * self.communicators.route.shards)
        data = torch.randn(numel, device=self.device)
        operation(data)
        best = float("inf")
        for _ in range(_REPEATS):
            self._meet()
            start = time.perf_counter()
            operation(data)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            best = min(best, (time.perf_counter() - start) * 1e3)
        slowest = torch.tensor([best], dtype=torch.float64)
        control = self.communicators.control.handle
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=control)
        return float(slowest.item())

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
