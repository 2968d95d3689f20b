"""What traffic puts on cards and inter-switch links, and the bus bandwidth that leaves.

A ring of n ranks moves busbw bytes per second over each of its edges, shared out over the channels:
an edge that k of the C channels use carries busbw * k / C. (busbw = algbw * 2(n-1)/n is what a ring
all-reduce sends over one edge.) So a resource of capacity c that is crossed by x channel-edges
allows busbw = c * C / x, and the least of these is the bound of the whole.

Between switches a flow takes the shortest path; equal shortest paths share it evenly, and so do the
parallel links of a group. That is the best that a fabric can do: hashing does worse, in the worst
case everything on one link (`one_link`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from evener.tools.fabric.map import Card, FabricMap


@dataclass(frozen=True, slots=True)
class Flow:
    """Traffic from one card to another; `weight` is its share of busbw (channels / all)."""

    source: Card
    destination: Card
    weight: float


@dataclass(slots=True)
class Use:
    """One direction of one resource: a card or a group of parallel links."""

    name: str
    speed: float
    """Bytes per second of one link."""
    count: int = 1
    weight: float = 0.0
    """Shares of busbw that cross it."""

    @property
    def bound(self) -> float:
        """busbw at which all links are full when evenly used, bytes per second."""
        return self.speed * self.count / self.weight if self.weight else float("inf")

    @property
    def one_link(self) -> float:
        """busbw at which one link is full when everything hashes onto it."""
        return self.speed / self.weight if self.weight else float("inf")


@dataclass(slots=True)
class Load:
    """Every resource in use."""

    cards: dict[tuple[str, str, str], Use] = field(default_factory=dict)
    """(host, card, `out` or `in`)."""
    links: dict[tuple[str, str], Use] = field(default_factory=dict)
    """(from switch, to switch)."""
    crossing: float = 0.0
    """Shares of busbw that leave their switch."""
    total: float = 0.0
    """Shares of busbw between hosts."""
    unreachable: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of switches that the map does not join."""

    @property
    def crossing_share(self) -> float:
        """Share of the traffic between hosts that leaves its switch."""
        return self.crossing / self.total if self.total else 0.0

    @property
    def bound(self) -> float:
        """busbw that cards and evenly used links allow, bytes per second; infinite without load."""
        uses = [*self.cards.values(), *self.links.values()]
        return min((use.bound for use in uses), default=float("inf"))

    @property
    def one_link(self) -> float:
        """The same with every group of links hashed onto one of them."""
        return min(
            min((use.bound for use in self.cards.values()), default=float("inf")),
            min((use.one_link for use in self.links.values()), default=float("inf")),
        )


def load(fabric: FabricMap, flows: Iterable[Flow]) -> Load:
    """Load of `flows` on `fabric`. Links of the map without load are in it with weight 0."""
    result = Load()
    for group in fabric.links:
        for ends in (group.ends, group.ends[::-1]):
            use = result.links.setdefault(ends, Use(">".join(ends), group.speed, 0))
            use.speed = min(use.speed, group.speed)
            use.count += group.count
    paths: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    for flow in flows:
        for card, way in ((flow.source, "out"), (flow.destination, "in")):
            key = (card.host, card.name, way)
            use = result.cards.setdefault(key, Use(f"{card.host}/{card.name} {way}", card.speed))
            use.weight += flow.weight
        result.total += flow.weight
        ends = (flow.source.switch, flow.destination.switch)
        if ends[0] == ends[1]:
            continue
        result.crossing += flow.weight
        if ends not in paths:
            paths[ends] = _shares(fabric, *ends)
        if not paths[ends] and ends not in result.unreachable:
            result.unreachable.append(ends)
        for hop, share in paths[ends].items():
            result.links[hop].weight += flow.weight * share
    return result


def _shares(fabric: FabricMap, source: str, destination: str) -> dict[tuple[str, str], float]:
    """Share of a flow on each directed hop: even over all equal shortest next hops (ECMP)."""
    around: dict[str, set[str]] = {switch: set() for switch in fabric.switches}
    for group in fabric.links:
        one, other = group.ends
        around[one].add(other)
        around[other].add(one)
    away = {destination: 0}
    queue = deque([destination])
    while queue:
        switch = queue.popleft()
        for neighbour in sorted(around[switch]):
            if neighbour not in away:
                away[neighbour] = away[switch] + 1
                queue.append(neighbour)
    if source not in away:
        return {}
    shares: dict[tuple[str, str], float] = {}
    at = {source: 1.0}
    for _ in range(away[source]):
        following: dict[str, float] = {}
        for switch, share in at.items():
            nearer = [n for n in sorted(around[switch]) if away.get(n, -1) == away[switch] - 1]
            for neighbour in nearer:
                part = share / len(nearer)
                shares[switch, neighbour] = shares.get((switch, neighbour), 0.0) + part
                following[neighbour] = following.get(neighbour, 0.0) + part
        at = following
    return shares
