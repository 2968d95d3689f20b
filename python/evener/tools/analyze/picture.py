"""What follows from a run: bandwidth figures, which cards a pair uses, load on the fabric.

Every derived thing says how it is known: `measured` (a line says so), `inferred` (a map or a
convention says so) or `unknown`. A card is never guessed from a rank's number: ranks of equal local
index on two hosts may use cards of different rails, and the other way round.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from evener.tools.analyze.model import Communicator, Host, Pair, Run, Table
from evener.tools.analyze.parse.table import Row
from evener.tools.fabric import Card, FabricMap, Flow, Load, Move, load, rail_wiring

Confidence = Literal["measured", "inferred", "unknown"]


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Figures of the table that matters, GB/s of bus bandwidth."""

    table: Table
    collective: str
    collective_known: Confidence
    ranks: int
    mean: float
    peak: float
    peak_row: Row
    peak_where: int
    peak_side: str
    """`out_of_place` or `in_place`."""
    values: int
    mixed: bool = False
    """Several benchmarks wrote into the table: its figures say nothing."""
    series: tuple[tuple[Row, int], ...] = ()
    """The rows of the peak's type and operation, by size."""


@dataclass(frozen=True, slots=True)
class CardUse:
    """The card at one end of a pair: its name in the log or the map, and how that is known."""

    host: str
    name: str
    known: Confidence
    card: Card | None
    """The map's, where there is a map with that card."""


@dataclass(frozen=True, slots=True)
class Route:
    """One pair on some of its channels, from card to card."""

    pair: Pair
    channels: tuple[int, ...]
    source: CardUse
    destination: CardUse
    rail: Literal["aligned", "crossed", "unknown"]
    switches: tuple[str, str] | None
    where: int

    @property
    def crosses(self) -> bool | None:
        """Whether it leaves its switch; None without a map of both ends."""
        return None if self.switches is None else self.switches[0] != self.switches[1]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Load of rings or trees on the map's fabric, today and after rail wiring."""

    today: Load
    rewired: FabricMap
    moves: list[Move]
    after: Load
    flows: list[Flow]
    placed: float
    """Share of the channel-edges between hosts whose cards are known."""


@dataclass
class Picture:
    """All that findings look at."""

    run: Run
    fabric: FabricMap | None
    world: Communicator | None
    bandwidth: Bandwidth | None
    tables: list[Bandwidth] = field(default_factory=list)
    """The figures of every table, in order."""
    pairs: list[Pair] = field(default_factory=list)
    routes: list[Route] = field(default_factory=list)
    tree_pairs: list[Pair] = field(default_factory=list)
    tree_routes: list[Route] = field(default_factory=list)
    traffic: Traffic | None = None
    """Traffic of the rings."""
    tree_traffic: Traffic | None = None
    """Traffic of the trees, in shares of the bus bandwidth of an all-reduce."""
    line_rate: float | None = None
    """Bus bandwidth, GB/s, at which the cards of a host are full; None where not known."""
    line_rate_from: str = ""

    @property
    def tree_load(self) -> Load | None:
        """Load of the trees on the map's fabric as it is."""
        return self.tree_traffic.today if self.tree_traffic else None

    @property
    def trees_used(self) -> bool:
        """Whether NCCL says that it chose trees for the largest size (subsystem TUNING).

        Only all-reduce has trees. Where the log has no choices this is False: for large sizes, with
        which a fabric is judged, NCCL mostly takes rings.
        """
        chosen = [
            choice
            for choice, _ in self.run.choices.values()
            if choice.collective.lower() in ("allreduce", "")
        ]
        largest = max(chosen, key=lambda choice: choice.size, default=None)
        return largest is not None and largest.algorithm == "TREE"

    def judged(self) -> tuple[str, list[Pair], list[Route], Traffic | None]:
        """What findings on the fabric look at: `rings`, or `trees` where NCCL used those."""
        if self.trees_used and self.tree_traffic is not None:
            return "trees", self.tree_pairs, self.tree_routes, self.tree_traffic
        return "rings", self.pairs, self.routes, self.traffic

    @property
    def rdma(self) -> str:
        """The network between hosts: `IB` for NCCL's own or its plug-ins', else its name."""
        used = Counter[str]()
        for host in self.run.hosts.values():
            used.update(name for name, _ in host.used)
            used.update(host.networks)
        name = used.most_common(1)[0][0] if used else ""
        return "IB" if name.startswith("IB") else name

    @property
    def twice(self) -> bool:
        """Whether an all-reduce may come to twice the line rate: no ring, as far as is known."""
        chosen = [c for c, _ in self.run.choices.values() if c.collective in ("AllReduce", "")]
        if chosen:
            return max(chosen, key=lambda choice: choice.size).algorithm != "RING"
        table = self.bandwidth.table if self.bandwidth else None
        hosts = len(self.world.hosts()) if self.world else 0
        nodes = max(hosts, self.world.nodes if self.world else 0, table.nodes() if table else 0)
        return nodes == 2 or any(
            name in self.run.settings for name in ("NCCL_COLLNET_ENABLE", "NCCL_SHARP_ENABLE")
        )

    @property
    def same_names(self) -> bool:
        """Whether several machines have one name: NCCL counts more nodes than there are names (it
        knows their boot ids), and the processes of one name meet at several addresses."""
        world = self.world
        return (
            world is not None
            and 0 < world.size == len(world.members)
            and world.nodes > len(world.hosts())
            and any(
                len(host.addresses) > 1
                for name in world.hosts()
                if (host := self.run.hosts.get(name)) is not None
            )
        )

    @property
    def cards_used(self) -> int:
        """Cards per host that carry traffic, 0 where the log does not say."""
        return max(
            (len({index for _, index in host.used}) for host in self.run.hosts.values()), default=0
        )

    @property
    def card_speed(self) -> float:
        """The line of one card in use, GB/s; 0 where no file says it."""
        speeds = [
            host.speeds[name] / 8e3
            for host in self.run.hosts.values()
            for name in {host.cards[key].name for key in host.used if key in host.cards}
            if host.speeds.get(name)
        ]
        if not speeds and self.run.topologies:
            used = {card for host in self.run.hosts.values() for _, card in host.used}
            nets = self.run.topologies[0][0].nets
            speeds = [n.speed / 8e3 for n in nets if n.device in used and n.speed > 0]
        return min(speeds, default=0.0)

    @property
    def spread(self) -> bool:
        """Whether Evener's transport carries everything between hosts: over all cards at once."""
        edges = self.world.edges.values() if self.world else ()
        return {edge.network for edge in edges if edge.network} == {"Evener"}

    def rails(self) -> tuple[str, Confidence, str]:
        """(`aligned`, `crossed` or `unknown`; how known; why)."""
        states = [route.rail for route in self.routes]
        if not self.pairs:
            return "unknown", "unknown", "no pair of ranks on different hosts was read"
        if not states or all(state == "unknown" for state in states):
            if self.spread:
                return (
                    "unknown",
                    "measured",
                    "Evener shows NCCL one device and spreads each message over all cards: no "
                    "pair has a rail",
                )
            return (
                "unknown",
                "unknown",
                "no line says which card a pair uses (NET lines of NCCL_DEBUG=INFO do) and no map "
                "of cards was given",
            )
        known = [r for r in self.routes if r.rail != "unknown"]
        sure = all(
            r.source.known == r.destination.known == "measured"
            and not r.source.name.startswith("#")
            for r in known
        )
        confidence: Confidence = "measured" if sure else "inferred"
        crossed = states.count("crossed")
        why = f"{crossed} of {len(known)} routes change their rail"
        if any(r.source.name.startswith("#") for r in known):
            why += ", by the numbers that the network gives its cards: it names none"
        if len(known) < len(states):
            why += f"; of {len(states) - len(known)} more the cards are not known"
        return ("crossed" if crossed else "aligned"), confidence, why


def picture(run: Run, fabric: FabricMap | None = None) -> Picture:
    """Derive everything from a run and, where given, a map."""
    world = run.world()
    tables = [found for table in run.tables if (found := _bandwidth(table, world))]
    main = run.table()
    result = Picture(
        run, fabric, world, next((one for one in tables if one.table is main), None), tables
    )
    if world is None:
        return result
    result.pairs = world.pairs()
    result.routes = [route for pair in result.pairs for route in _routes(run, world, pair, fabric)]
    result.tree_pairs = world.tree_pairs()
    result.tree_routes = [
        route for pair in result.tree_pairs for route in _routes(run, world, pair, fabric)
    ]
    if fabric is not None:
        result.tree_traffic = _traffic(result.tree_routes, fabric, _tree_unit(world))
        result.traffic = _traffic(result.routes, fabric, 1 / max(world.channels, 1))
    result.line_rate, result.line_rate_from = _line_rate(result)
    return result


def _bandwidth(table: Table, world: Communicator | None) -> Bandwidth | None:
    if not table.values():
        return None
    best = max(
        (
            (side.busbw, -order, row, where, name)
            for row, where in table.rows
            for order, (name, side) in enumerate(
                (("out_of_place", row.out_of_place), ("in_place", row.in_place))
            )
            if side is not None
        ),
        key=lambda item: item[:2],
    )
    ranks = len(table.devices) or (world.size if world else 0)
    collective, known = table.collective, "measured" if table.collective else "unknown"
    if not collective:
        collective = (_collective(table, ranks) if ranks > 1 else "") or table.hint
        known = "inferred" if collective else "unknown"
    values = table.values()
    return Bandwidth(
        table=table,
        collective=collective,
        collective_known=known,  # type: ignore[arg-type]
        ranks=ranks,
        mean=sum(values) / len(values),
        peak=best[0],
        peak_row=best[2],
        peak_where=best[3],
        peak_side=best[4],
        values=len(values),
        mixed=table.copies() > 1,
        series=tuple(next(rows for rows in table.series() if (best[2], best[3]) in rows)),
    )


def _collective(table: Table, ranks: int) -> str:
    """The collective by its ratio of bus to algorithm bandwidth, empty where it is not unique."""
    sides = [s for row, _ in table.rows for s in (row.out_of_place, row.in_place) if s is not None]
    large = [side.busbw / side.algbw for side in sides if side.algbw >= 0.5]
    if not large:
        return ""
    ratio = sum(large) / len(large)
    reduces = any(row.redop not in ("", "none") for row, _ in table.rows)
    if reduces and abs(ratio - 2 * (ranks - 1) / ranks) < 0.01:
        rooted = any(row.root is not None and row.root >= 0 for row, _ in table.rows)
        return "reduce" if rooted else "all_reduce"
    if reduces and abs(ratio - (ranks - 1) / ranks) < 0.01:
        return "reduce_scatter"
    return ""


def _routes(run: Run, world: Communicator, pair: Pair, fabric: FabricMap | None) -> list[Route]:
    groups: dict[tuple[CardUse, CardUse], list[int]] = {}
    where: dict[tuple[CardUse, CardUse], int] = {}
    for channel in pair.channels:
        edge = world.edges.get((channel, pair.source, pair.destination))
        ends = (
            _card(run, world, pair.source, edge.network, edge.send_card, fabric)
            if edge
            else _card(run, world, pair.source, "", -1, fabric),
            _card(run, world, pair.destination, edge.network, edge.receive_card, fabric)
            if edge
            else _card(run, world, pair.destination, "", -1, fabric),
        )
        groups.setdefault(ends, []).append(channel)
        where.setdefault(ends, edge.where if edge else pair.where)
    return [
        Route(
            pair,
            tuple(channels),
            *ends,
            _rail(run, *ends),
            (ends[0].card.switch, ends[1].card.switch) if ends[0].card and ends[1].card else None,
            where[ends],
        )
        for ends, channels in groups.items()
    ]


def _card(
    run: Run,
    world: Communicator,
    rank: int,
    network: str,
    device: int,
    fabric: FabricMap | None,
) -> CardUse:
    member = world.members.get(rank)
    host = member.host if member else ""
    placed = fabric.find(host) if fabric else None
    if device >= 0:
        name = card_name(run, run.hosts.get(host), network, device)
        return CardUse(host, name, "measured", placed.card(name) if placed else None)
    gpu = world.gpu(rank)
    if placed and gpu is not None and (card := placed.nearest(gpu)):
        return CardUse(host, card.name, "inferred", card)
    return CardUse(host, "", "unknown", None)


def card_name(run: Run, host: Host | None, network: str, device: int) -> str:
    """The name of a card by its number, `#3` where no line or file names it."""
    if host and (card := host.cards.get((network, device))):
        return card.name
    names = {
        net.name for topology, _ in run.topologies for net in topology.nets if net.device == device
    }
    return names.pop() if len(names) == 1 else f"#{device}"


def _rail(
    run: Run, source: CardUse, destination: CardUse
) -> Literal["aligned", "crossed", "unknown"]:
    if source.card and destination.card:
        return "aligned" if source.card.rail == destination.card.rail else "crossed"
    if source.known != "measured" or destination.known != "measured":
        return "unknown"
    rails = {
        net.name: net.rail
        for topology, _ in run.topologies
        for net in topology.nets
        if net.rail is not None
    }
    if source.name in rails and destination.name in rails:
        return "aligned" if rails[source.name] == rails[destination.name] else "crossed"
    mine, theirs = (_names(run, end.host) for end in (source, destination))
    if not mine and not theirs and source.name[:1] == destination.name[:1] == "#":
        # A plug-in that names no card numbers them in the order of the machine.
        return "aligned" if source.name == destination.name else "crossed"
    if not mine or mine != theirs:
        return "unknown"  # names mean the same card only on hosts that are built alike
    return "aligned" if source.name == destination.name else "crossed"


def _names(run: Run, host: str) -> list[str]:
    known = run.hosts.get(host)
    return sorted(card.name for card in known.cards.values()) if known else []


def _traffic(routes: list[Route], fabric: FabricMap, unit: float) -> Traffic | None:
    """The load of `routes`, where one channel puts `unit` times the bus bandwidth on each."""
    rewired, moves = rail_wiring(fabric)
    flows, after = [], []
    total = sum(len(route.channels) for route in routes)
    placed = 0
    for route in routes:
        source, destination = route.source.card, route.destination.card
        if source is None or destination is None:
            continue
        placed += len(route.channels)
        weight = len(route.channels) * unit
        flows.append(Flow(source, destination, weight))
        new = [rewired.hosts[card.host].card(card.name) for card in (source, destination)]
        if new[0] and new[1]:
            after.append(Flow(new[0], new[1], weight))
    if not flows:
        return None
    return Traffic(load(fabric, flows), rewired, moves, load(rewired, after), flows, placed / total)


def _tree_unit(world: Communicator) -> float:
    """What an all-reduce over the trees puts on an edge of one channel.

    Each edge carries the channel's part of the data once up and once down: algbw x k / C, and algbw
    is busbw x n / 2(n-1).
    """
    ranks = max(world.size or len(world.members), 2)
    return ranks / (2 * (ranks - 1)) / max(len(world.trees), 1)


def _line_rate(picture: Picture) -> tuple[float | None, str]:
    if picture.traffic:
        cards = [use.bound for use in picture.traffic.today.cards.values()]
        return min(cards) / 1e9, "the map's cards under the rings' load"
    if not picture.pairs or picture.world is None:
        return None, ""
    used = {card for host in picture.run.hosts.values() for _, card in host.used}
    if picture.run.topologies:
        # The topology file is one host's; it stands for all.
        nets = picture.run.topologies[0][0].nets
        speeds = [net.speed for net in nets if net.device in used or not used]
        words = "the topology file's cards in use"
    else:
        speeds = [round(picture.card_speed * 8e3)] * picture.cards_used
        words = "the cards in use, as NCCL read their speeds"
    crossings = max(
        (
            sum(len(p.channels) for p in picture.pairs if _host(picture, p.source) == host)
            for host in picture.world.hosts()
        ),
        default=0,
    )
    channels = max(picture.world.channels, 1)
    if not speeds or not crossings or sum(speeds) <= 0:
        return None, ""
    return sum(speeds) / 8e3 * channels / crossings, words


def _host(picture: Picture, rank: int) -> str:
    member = picture.world.members.get(rank) if picture.world else None
    return member.host if member else ""
