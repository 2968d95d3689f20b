"""Topology-affine placement on a mapped fabric.

Two things keep traffic under one switch. Hosts that follow one another in the ring should have
their cards on the same switches, rail by rail; and ranks of equal local number, which form the
groups of a two-level all-reduce, should have cards of the same rail. So:

1. Hosts are grouped by wiring: the switch of each rail. Hosts of one group reach each other under
   their switches. The smallest group that holds the job takes it; else groups are taken largest
   first, so that the ring changes groups as seldom as can be, and each next group is the one that
   shares most switches with the last.
2. In a host the GPUs are taken in order of rail, then of device.

Both orders are compared by load, and the map's own order is kept where it is as good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evener.errors import UsageError
from evener.tools.fabric import Card, FabricMap, Flow, HostMap, Load, load

Wiring = tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Rank:
    """Where one rank runs. `gpu` is the CUDA device, `card` the nearest card's name."""

    rank: int
    host: str
    local_rank: int
    gpu: int
    card: str
    rail: int
    switch: str


@dataclass(frozen=True, slots=True)
class Scenario:
    """An order of ranks and the load that a ring and the two-level groups put on the fabric."""

    ranks: tuple[Rank, ...]
    ring: Load
    groups: Load

    @property
    def hosts(self) -> list[tuple[str, int]]:
        """Hosts in order, with their number of ranks."""
        slots: dict[str, int] = {}
        for rank in self.ranks:
            slots[rank.host] = slots.get(rank.host, 0) + 1
        return list(slots.items())

    @property
    def cost(self) -> tuple[float, float]:
        """Less is better: share of traffic that leaves its switch; load of the heaviest link."""
        crossing = self.ring.crossing_share + self.groups.crossing_share
        uses = [*self.ring.links.values(), *self.groups.links.values()]
        return crossing, max((use.weight / use.count for use in uses), default=0.0)


@dataclass(frozen=True, slots=True)
class Placement:
    """The order to use, and the map's own order to compare with."""

    before: Scenario
    after: Scenario

    def hostfile(self) -> str:
        """Lines `host slots=n` as mpirun and `evener launch` read them."""
        return "".join(f"{host} slots={slots}\n" for host, slots in self.after.hosts)

    def visible_devices(self) -> dict[str, str]:
        """CUDA_VISIBLE_DEVICES of each host, so that local rank i gets the i-th device named."""
        devices: dict[str, list[str]] = {}
        for rank in self.after.ranks:
            devices.setdefault(rank.host, []).append(str(rank.gpu))
        return {host: ",".join(names) for host, names in devices.items()}

    def document(self) -> dict[str, Any]:
        """The JSON of `evener place --json`."""
        return {
            "version": 1,
            "hosts": [{"host": host, "slots": slots} for host, slots in self.after.hosts],
            "ranks": [
                {name: getattr(rank, name) for name in Rank.__slots__} for rank in self.after.ranks
            ],
            "visible_devices": self.visible_devices(),
            "links": [
                {
                    "from": ends[0],
                    "to": ends[1],
                    "links": use.count,
                    "link_speed": use.speed / 1e9,
                    **{
                        f"{name}_{when}": getattr(scenario, name).links[ends].weight
                        for when, scenario in (("before", self.before), ("after", self.after))
                        for name in ("ring", "groups")
                    },
                }
                for ends, use in self.after.ring.links.items()
            ],
            "crossing_share": {
                when: {
                    "ring": scenario.ring.crossing_share,
                    "groups": scenario.groups.crossing_share,
                }
                for when, scenario in (("before", self.before), ("after", self.after))
            },
        }


def place(fabric: FabricMap, ranks: int) -> Placement:
    """Place that many ranks, one a GPU. Raises UsageError where the map has fewer GPUs."""
    hosts = [host for host in fabric.hosts.values() if host.gpus]
    have = sum(len(host.gpus) for host in hosts)
    if not 1 <= ranks <= have:
        raise UsageError(
            f"-np {ranks}: the map has {have} GPUs on {len(hosts)} hosts",
            f"ask for 1 to {have}, or add `gpus` to hosts of the map",
        )
    before = _scenario(fabric, _fill(hosts, ranks), by_rail=False)
    candidates = [
        _scenario(fabric, _fill(order, ranks), by_rail=by_rail)
        for order in (hosts, _ordered(hosts, ranks))
        for by_rail in (False, True)
    ]
    return Placement(before, min([before, *candidates], key=lambda scenario: scenario.cost))


def _fill(hosts: Sequence[HostMap], ranks: int) -> list[tuple[HostMap, int]]:
    filled = []
    for host in hosts:
        take = min(len(host.gpus), ranks)
        if take:
            filled.append((host, take))
        ranks -= take
    return filled


def _wiring(host: HostMap) -> Wiring:
    return tuple(sorted({(card.rail, card.switch) for card in host.cards}))


def _ordered(hosts: list[HostMap], ranks: int) -> list[HostMap]:
    """Hosts group by group of equal wiring."""
    groups: dict[Wiring, list[HostMap]] = {}
    for host in hosts:
        groups.setdefault(_wiring(host), []).append(host)

    def room(wiring: Wiring) -> int:
        return sum(len(host.gpus) for host in groups[wiring])

    enough = [wiring for wiring in groups if room(wiring) >= ranks]
    if enough:
        return groups[min(enough, key=room)]
    left = sorted(groups, key=room, reverse=True)
    order = [left.pop(0)]
    while left:
        near = max(left, key=lambda wiring: (len(set(wiring) & set(order[-1])), room(wiring)))
        left.remove(near)
        order.append(near)
    return [host for wiring in order for host in groups[wiring]]


def _scenario(fabric: FabricMap, filled: list[tuple[HostMap, int]], *, by_rail: bool) -> Scenario:
    ranks: list[Rank] = []
    for host, take in filled:
        gpus = list(range(len(host.gpus)))
        if by_rail:
            gpus.sort(key=lambda gpu: (_nearest(host, gpu).rail, gpu))
        for local, gpu in enumerate(gpus[:take]):
            card = _nearest(host, gpu)
            ranks.append(Rank(len(ranks), host.name, local, gpu, card.name, card.rail, card.switch))
    return Scenario(
        tuple(ranks),
        load(fabric, _ring(filled)),
        load(fabric, _groups(fabric, ranks)),
    )


def _nearest(host: HostMap, gpu: int) -> Card:
    card = host.nearest(gpu)
    assert card is not None  # parse_map refuses a GPU whose card is not there
    return card


def _ring(filled: list[tuple[HostMap, int]]) -> list[Flow]:
    """A ring over the hosts on every rail: NCCL leaves and enters by cards of equal number."""
    hosts = [host for host, _ in filled]
    flows = []
    for source, destination in zip(hosts, hosts[1:] + hosts[:1], strict=True):
        if source is destination:
            continue
        for card in source.cards:
            same = [c for c in destination.cards if c.rail == card.rail]
            other = same[0] if same else destination.cards[card.rail % len(destination.cards)]
            flows.append(Flow(card, other, 1 / len(source.cards)))
    return flows


def _groups(fabric: FabricMap, ranks: list[Rank]) -> list[Flow]:
    """Rings over the ranks of equal local number: the outer level of a two-level all-reduce."""
    groups: dict[int, list[Card]] = {}
    for rank in ranks:
        card = fabric.hosts[rank.host].card(rank.card)
        if card is not None:
            groups.setdefault(rank.local_rank, []).append(card)
    return [
        Flow(source, destination, 1 / len(groups))
        for cards in groups.values()
        for source, destination in zip(cards, cards[1:] + cards[:1], strict=True)
        if source.host != destination.host
    ]
