"""Bytes to milliseconds: what each stage of a bucket's way takes.

A `Curve` is a list of measured points, straight between them and beyond. `Costs` holds one for each
stage and form; it comes from `probe`, or from `of_network`, the alpha-beta model of a ring (each
hop costs a latency, each byte its share of the link; Thakur et al., doi 10.1177/1094342005051521),
for a network that can only be described.

A link between nodes is shared by all ranks of a node: in the two-level form each of L ranks sends
its shard at once, so a node sends 2 (N-1)/N S bytes for a bucket of S bytes.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evener.comm import wires
from evener.comm.wires import Paper


@dataclass(frozen=True)
class Curve:
    """Time over size: points (bytes, milliseconds), ascending in bytes."""

    points: tuple[tuple[float, float], ...]

    def __call__(self, size: float) -> float:
        """Milliseconds for `size` bytes; 0 for none. Never negative."""
        if size <= 0 or not self.points:
            return 0.0
        if len(self.points) == 1:
            return self.points[0][1] * max(1.0, size / self.points[0][0])
        place = bisect.bisect(self.points, (size, float("inf")))
        place = min(max(place, 1), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[place - 1], self.points[place]
        slope = max(0.0, (y1 - y0) / (x1 - x0))
        # Below the first point noise must not make it nothing: latency is never negative.
        least = y0 * size / x0 if size < x0 else 0.0
        return max(least, y0 + (size - x0) * slope)

    @staticmethod
    def line(fixed_ms: float, ms_a_byte: float) -> Curve:
        """A straight one."""
        return Curve(((0.0, fixed_ms), (1.0, fixed_ms + ms_a_byte)))


@dataclass(frozen=True)
class Costs:
    """What the stages take. All curves are over the bytes of **one rank's** input to the stage.

    `scatter`, `gather`: in the node, over the bucket's bytes. `exchange[form]`: between nodes, over
    the shard's bytes before they are encoded, of FP32; encoding and decoding included. `flat`: all
    ranks in one level, exact, over the bucket's bytes; None where it was not asked for.
    `encode[form]`: of the exchange, what encoding and decoding take, for which the device computes
    nothing else. `per_node`: into how many shards a bucket is cut, one for each rank of a node that
    exchanges. `ranks`: in all; 0: nodes times per_node, for no node has more.
    """

    nodes: int
    per_node: int
    scatter: Curve
    gather: Curve
    exchange: Mapping[str, Curve]
    flat: Curve | None = None
    notes: Mapping[str, float] = field(default_factory=dict)
    encode: Mapping[str, Curve] = field(default_factory=dict)
    ranks: int = 0

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.ranks or self.nodes * self.per_node

    @property
    def two_level(self) -> bool:
        """Whether some node has several ranks."""
        return self.size > self.nodes

    def stages(
        self, algorithm: str, form: str, size: int, itemsize: int = 4
    ) -> tuple[float, float, float]:
        """Milliseconds of the three stages of a bucket of `size` bytes, `itemsize` an entry."""
        if algorithm == "flat" and self.flat is not None and form == "exact":
            return 0.0, self.flat(size), 0.0
        exchange = self.exchange[form](self.shard(form, size, itemsize))
        if not self.two_level:
            return 0.0, exchange, 0.0
        return self.scatter(size), exchange, self.gather(size)

    def shard(self, form: str, size: int, itemsize: int) -> float:
        """Bytes at which to look up the curve of `form`.

        Exact sends what there is. Other forms send by the entry, however wide it came: of gradients
        of 16 bits INT8 makes half, not a quarter.
        """
        entry = 1.0 if form == "exact" else 4 / itemsize
        return size / self.per_node * entry

    def loss(self, form: str, size: int, drag: float, itemsize: int = 4) -> float:
        """The share of computing that is lost during the exchange of a bucket of `size` bytes.

        `drag`: what a collective alone takes, see `StepProfile`.
        """
        shard = self.shard(form, size, itemsize)
        took = self.exchange[form](shard)
        if took <= 0 or form not in self.encode:
            return drag
        own = min(1.0, self.encode[form](shard) / took)
        return own + (1.0 - own) * drag

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "nodes": self.nodes,
            "per_node": self.per_node,
            "ranks": self.size,
            "scatter": self.scatter.points,
            "gather": self.gather.points,
            "exchange": {form: curve.points for form, curve in self.exchange.items()},
            "flat": None if self.flat is None else self.flat.points,
            "notes": dict(self.notes),
            "encode": {form: curve.points for form, curve in self.encode.items()},
        }


@dataclass(frozen=True)
class Link:
    """One direction of a connection. `latency_ms`: of one message; `bytes_a_ms`: goodput."""

    latency_ms: float
    bytes_a_ms: float

    @staticmethod
    def of_rate(bits_a_second: float, latency_us: float, efficiency: float = 1.0) -> Link:
        """A link of a nominal rate, of which `efficiency` reaches the payload."""
        return Link(latency_us / 1e3, bits_a_second * efficiency / 8e3)


# Bytes at which a form's costs on paper are worked out: not all grow in a straight line.
_SIZES = (0.0, *(float(1 << power) for power in range(10, 35, 2)))


def encoding(memory_bytes_a_ms: float, forms: Sequence[str]) -> dict[str, Curve]:
    """What encoding and decoding take at the memory's rate, by form; over a shard's bytes."""
    passes = {form.name: form.passes for form in wires.papers()}
    return {form: Curve.line(0.0, passes[form] / memory_bytes_a_ms) for form in forms}


def of_network(
    nodes: int,
    per_node: int,
    between: Link,
    inside: Link,
    forms: Sequence[Paper],
    memory_bytes_a_ms: float,
) -> Costs:
    """The costs on a network that is described: rings between nodes and inside them."""
    n, ranks = nodes, per_node
    exchange = {}
    for form in forms:
        passes = form.passes + form.passes_a_peer * n

        def takes(size: float, form: Paper = form, passes: float = passes) -> float:
            sent = form.sent(size, n) if n > 1 else 0.0
            latency = form.hops(n) * between.latency_ms if n > 1 else 0.0
            return latency + sent * ranks / between.bytes_a_ms + passes * size / memory_bytes_a_ms

        exchange[form.name] = Curve(tuple((size, takes(size)) for size in _SIZES))
    around = (ranks - 1) / ranks / inside.bytes_a_ms
    inner = Curve.line((ranks - 1) * inside.latency_ms, around)
    total = n * ranks
    # Two nodes: a tree's halves meet, each node sends S once (NCCL's choice); else a ring.
    crossing = 1.0 if n == 2 else 2 * (total - 1) / total
    flat = Curve.line(
        2 * (n - 1) * between.latency_ms + 2 * (total - n) * inside.latency_ms,
        crossing / between.bytes_a_ms if n > 1 else 2 * around,
    )
    encode = encoding(memory_bytes_a_ms, list(exchange))
    return Costs(n, ranks, inner, inner, exchange, flat, encode=encode)
