"""What the files say, joined: hosts, ranks, communicators, rings, edges between nodes, tables.

Everything keeps `where` it was read, a packed file number and line; `Run.cite` prints it.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from evener.tools.analyze.evidence.records import Evidence
from evener.tools.analyze.parse.failures import Ended, Step
from evener.tools.analyze.parse.network import Card, Direct, Far, Provider
from evener.tools.analyze.parse.smi import Matrix
from evener.tools.analyze.parse.table import Device, Row
from evener.tools.analyze.parse.topology import GraphChannel, Topology
from evener.tools.analyze.parse.trees import TreePlace
from evener.tools.analyze.parse.tuning import Choice

LOCAL = re.compile(r"docker|virbr|br-|veth|cni|flannel|cali|lo\d*$|tun\d|tailscale|kube-")
"""Interfaces that other hosts mostly do not reach."""
_LINE = (1 << 40) - 1
Process = tuple[str, int]
"""Host and pid."""


@dataclass(slots=True)
class Member:
    """One rank of one communicator: the GPU and the process that drives it."""

    rank: int
    host: str
    pid: int
    device: int
    bus: str
    where: int


@dataclass(slots=True)
class Ring:
    """One channel's ring. `whole` is False where the log cut it: then it has no last hop."""

    channel: int
    ranks: tuple[int, ...]
    whole: bool
    where: int

    def hops(self) -> list[tuple[int, int]]:
        """Directed neighbours; the hop that closes the ring only where the ring is whole."""
        hops = list(zip(self.ranks, self.ranks[1:], strict=False))
        if self.whole and len(self.ranks) > 1:
            hops.append((self.ranks[-1], self.ranks[0]))
        return hops


@dataclass(slots=True)
class NetEdge:
    """An edge between nodes, both ends' lines joined. -1 where that end's line is missing."""

    channel: int
    source: int
    destination: int
    ring: bool
    """Logged before the rings were connected: a ring edge, not a tree edge."""
    network: str = ""
    send_card: int = -1
    receive_card: int = -1
    send_direct: bool | None = None
    receive_direct: bool | None = None
    proxy: int = -1
    where: int = 0


@dataclass(slots=True)
class Pair:
    """A directed pair of ranks on different hosts and the channels whose rings go that way."""

    source: int
    destination: int
    channels: list[int]
    where: int


@dataclass
class Communicator:
    """One communicator over all the ranks whose lines were read."""

    name: str
    size: int
    """Ranks; 0 where no line says it."""
    members: dict[int, Member] = field(default_factory=dict)
    rings: dict[int, Ring] = field(default_factory=dict)
    channels: int = 0
    nodes: int = 0
    """As NCCL counted them (NCCL_HOSTID counts), 0 where it did not say."""
    trees: dict[int, dict[int, TreePlace]] = field(default_factory=dict)
    edges: dict[tuple[int, int, int], NetEdge] = field(default_factory=dict)
    transports: Counter[str] = field(default_factory=Counter)
    started: set[int] = field(default_factory=set)
    """Ranks that began its set-up, where the version says so (from 2.18)."""
    finished: set[int] = field(default_factory=set)
    where: int = 0
    copies: int = 1
    """Communicators of this size that no line tells apart: up to 2.17 none has a name, so those of
    different processes are read as one."""

    def hosts(self) -> list[str]:
        """Hosts in the order of their lowest rank."""
        seen: dict[str, None] = {}
        for rank in sorted(self.members):
            seen.setdefault(self.members[rank].host)
        return list(seen)

    def distinct_rings(self) -> list[tuple[tuple[int, ...], list[int]]]:
        """Each different order of ranks with the channels that use it, most used first."""
        orders: dict[tuple[int, ...], list[int]] = {}
        for channel in sorted(self.rings):
            orders.setdefault(_turned(self.rings[channel]), []).append(channel)
        return sorted(orders.items(), key=lambda item: (-len(item[1]), item[1][0]))

    def pairs(self) -> list[Pair]:
        """Inter-node ring neighbours, from the rings and, where those are cut, from NET edges."""
        found: dict[tuple[int, int], Pair] = {}

        def add(channel: int, source: int, destination: int, where: int) -> None:
            pair = found.setdefault((source, destination), Pair(source, destination, [], where))
            if channel not in pair.channels:
                pair.channels.append(channel)

        for channel, ring in sorted(self.rings.items()):
            for source, destination in ring.hops():
                if self.apart(source, destination):
                    add(channel, source, destination, ring.where)
        for edge in sorted(self.edges.values(), key=lambda e: e.channel):
            ring_line = self.rings.get(edge.channel)
            whole = ring_line is not None and ring_line.whole
            if edge.ring and not self._inside(edge) and (not whole or self._half_known(edge)):
                add(edge.channel, edge.source, edge.destination, edge.where)
        for pair in found.values():
            pair.channels.sort()
        return sorted(found.values(), key=lambda p: (p.channels[0], p.source, p.destination))

    def tree_pairs(self) -> list[Pair]:
        """Directed pairs on different hosts along the trees' edges, both ways: up to reduce, down
        to broadcast. Channels are those whose trees have the edge, as either end told it."""
        found: dict[tuple[int, int], set[int]] = {}
        for channel, places in self.trees.items():
            for place in places.values():
                above = () if place.up is None else (place.up,)
                for other in (*above, *place.down):
                    if self.apart(place.rank, other):
                        found.setdefault((place.rank, other), set()).add(channel)
                        found.setdefault((other, place.rank), set()).add(channel)
        return sorted(
            (Pair(*ends, sorted(channels), self.where) for ends, channels in found.items()),
            key=lambda p: (p.channels[0], p.source, p.destination),
        )

    def gpu(self, rank: int) -> int | None:
        """The GPU's index on its host, None where nothing tells.

        Where every process sees one GPU as device 0, the order of bus ids stands in.
        """
        member = self.members.get(rank)
        if member is None:
            return None
        mates = [m for m in self.members.values() if m.host == member.host]
        devices = [m.device for m in mates]
        if len(set(devices)) == len(devices) and member.device >= 0:
            return member.device
        if all(m.bus for m in mates) and len({m.bus for m in mates}) == len(mates):
            return sorted(m.bus for m in mates).index(member.bus)
        return None

    def _inside(self, edge: NetEdge) -> bool:
        """Whether both ends are known to be on one host."""
        ends = (self.members.get(edge.source), self.members.get(edge.destination))
        hosts = {end.host for end in ends if end is not None}
        return None not in ends and len(hosts) == 1

    def _half_known(self, edge: NetEdge) -> bool:
        """Whether the host of one end only is known: a NET edge then leads to another host."""
        ends = (self.members.get(edge.source), self.members.get(edge.destination))
        return sum(end is not None for end in ends) == 1

    def apart(self, one: int, other: int) -> bool:
        """Whether two ranks are known to be on different hosts."""
        mine, theirs = self.members.get(one), self.members.get(other)
        return mine is not None and theirs is not None and mine.host != theirs.host


def _turned(ring: Ring) -> tuple[int, ...]:
    """A whole ring from its smallest rank on, so that equal rings compare equal."""
    if not ring.whole or not ring.ranks:
        return ring.ranks
    start = ring.ranks.index(min(ring.ranks))
    return ring.ranks[start:] + ring.ranks[:start]


@dataclass
class Table:
    """One run of nccl-tests or `evener bench`."""

    collective: str = ""
    hint: str = ""
    """The collective of the program that was named before the table."""
    rows: list[tuple[Row, int]] = field(default_factory=list)
    devices: dict[int, Device] = field(default_factory=dict)
    average: float | None = None
    out_of_bounds: float | None = None
    failed: bool = False
    """The line of out-of-bounds values says FAILED."""
    where: int = 0
    options: int = 0
    """Lines of options: one per process that runs by itself."""
    heads: int = 0
    averages: int = 0
    hosts: set[str] = field(default_factory=set)
    """Hosts of all devices, and of ranks that appear twice."""
    twice: dict[int, int] = field(default_factory=dict)
    """Ranks that two processes claim, and where the second does."""
    broken: int = 0
    """Rows that other output broke and that could not be put together."""

    replaced: bool = False
    """What it holds is in the next table too."""

    def doubled(self) -> bool:
        """Whether a size stands twice in a row."""
        keys = [(r.size, r.type, r.redop, r.root) for r, _ in self.rows if r.size > 0]
        return any(one == other for one, other in pairwise(keys))

    def copies(self) -> int:
        """How many runs wrote into this table: above 1 where processes did not find one another."""
        claims = 2 if self.twice else 1
        return max(self.options, self.averages, claims, 2 if self._pairs() else 1)

    def _pairs(self) -> bool:
        """Whether most rows stand twice in a row, as two mixed outputs do."""
        keys = [(r.size, r.type, r.redop, r.root) for r, _ in self.rows if r.size > 0]
        if len(keys) < 4 or len(set(keys)) < 2:
            return False
        again = sum(one == other for one, other in pairwise(keys))
        return again >= 0.4 * len(keys)

    def nodes(self) -> int:
        """Hosts of its devices, 0 where they are not listed."""
        return len(self.hosts)

    def series(self) -> list[list[tuple[Row, int]]]:
        """Rows of one type, operation and root each, by size."""
        found: dict[tuple[str, str, int | None], list[tuple[Row, int]]] = {}
        for row, where in self.rows:
            found.setdefault((row.type, row.redop, row.root), []).append((row, where))
        return [sorted(rows, key=lambda item: item[0].size) for rows in found.values()]

    def values(self) -> list[float]:
        """All bus bandwidths, out of place and in place, GB/s."""
        return [
            side.busbw
            for row, _ in self.rows
            for side in (row.out_of_place, row.in_place)
            if side is not None
        ]


@dataclass
class Host:
    """One host: what its processes found and used."""

    name: str
    networks: Counter[str] = field(default_factory=Counter)
    """How often a process or communicator there chose each network."""
    plugins: dict[str, tuple[str, int]] = field(default_factory=dict)
    cards: dict[tuple[str, int], Card] = field(default_factory=dict)
    card_lines: dict[tuple[str, int], int] = field(default_factory=dict)
    used: Counter[tuple[str, int]] = field(default_factory=Counter)
    direct: Counter[bool] = field(default_factory=Counter)
    """NET edges with and without GPUDirect, one count an end."""
    indirect_where: int = 0
    proxied: int = 0
    proxied_where: int = 0
    oob: str = ""
    network_where: int = 0
    sockets: tuple[int, int, int] | None = None
    """Threads, sockets a thread, where."""
    gdr: dict[tuple[str, str], tuple[Direct, int]] = field(default_factory=dict)
    far: dict[tuple[str, str], tuple[Far, int]] = field(default_factory=dict)
    absent: dict[tuple[str, str], int] = field(default_factory=dict)
    """Networks that did not come up, NCCL's words for it, and where."""
    provider: tuple[Provider, int] | None = None
    """What libfabric runs on."""
    speeds: dict[str, int] = field(default_factory=dict)
    """Line rates of cards by name, Mb/s."""
    addresses: set[str] = field(default_factory=set)
    """At which its processes meet the others: several, where several machines have its name."""
    no_peers: tuple[str, int] | None = None
    """NCCL's words for GPUs that do not reach one another, and where."""


@dataclass
class Warned:
    """A warning: how often, where first, and which processes printed it."""

    times: int
    where: int
    processes: dict[Process, None] = field(default_factory=dict)
    place: str = ""
    """The file of NCCL's source that printed it first, as `transport/nvls.cc:244`."""


@dataclass
class Run:
    """All that was read."""

    files: list[Path] = field(default_factory=list)
    hosts: dict[str, Host] = field(default_factory=dict)
    communicators: list[Communicator] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    topologies: list[tuple[Topology, int]] = field(default_factory=list)
    graphs: list[tuple[list[GraphChannel], int]] = field(default_factory=list)
    matrices: list[tuple[Matrix, int]] = field(default_factory=list)
    settings: dict[str, dict[str, int]] = field(default_factory=dict)
    """Variable, its values, and where each was first read."""
    choices: dict[tuple[str, int], tuple[Choice, int]] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    warnings: dict[str, Warned] = field(default_factory=dict)
    trails: dict[Process, list[tuple[Step, int]]] = field(default_factory=dict)
    """Lines `file:line -> result` of each process."""
    ended: list[tuple[Ended, int]] = field(default_factory=list)
    """What programs and launchers said of a failure."""
    evidence: Evidence = field(default_factory=Evidence)
    """What watchdogs, recorders, launchers and drivers said of a run that hung or failed."""
    skipped: list[Path] = field(default_factory=list)
    """Files of a folder that are no text."""
    cut: list[int] = field(default_factory=list)
    """Packed files of which the end is missing or damaged."""
    lines: int = 0
    nccl_lines: int = 0
    unknown: int = 0
    unknown_samples: list[tuple[str, int]] = field(default_factory=list)

    def cite(self, where: int) -> str:
        """`file:line`."""
        number = where >> 40
        name = str(self.files[number]) if number < len(self.files) else "?"
        return f"{name}:{where & _LINE}"

    def host(self, name: str) -> Host:
        """The host of that name, made where it is new."""
        if name not in self.hosts:
            self.hosts[name] = Host(name)
        return self.hosts[name]

    def world(self) -> Communicator | None:
        """The communicator that matters: most ranks, then most rings and edges."""
        return max(
            self.communicators,
            key=lambda c: (c.size, len(c.rings), len(c.edges), len(c.members)),
            default=None,
        )

    def table(self) -> Table | None:
        """The table that matters: the one with most rows, of those that measured something."""
        return max(
            self.tables, key=lambda t: (any(v > 0 for v in t.values()), len(t.rows)), default=None
        )
