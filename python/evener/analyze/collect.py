"""From records to the model: which line belongs to which communicator.

Ring, tree and hop lines name no communicator. They are printed by the thread that sets one up,
between its `Init START` (from 2.18) and its `Init COMPLETE`; before 2.18 only the end is marked. So
each thread has a draft: the lines since its last boundary. A draft with a start keeps what comes
after the end too (connections made at first use, 2.22 and later); one without a start is closed by
its end. Lines on a thread that never set anything up go to the process's last communicator.

Processes name the same communicator by pointers of their own. They are joined by commId where it
is printed; a split by its parent, count and colour; else by order: the k-th communicator of n ranks
in which a process holds rank r.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from evener.analyze.model import Communicator, Member, NetEdge, Ring, Run, Table
from evener.analyze.parse import read
from evener.analyze.parse.hops import Hop, edges, kind
from evener.analyze.parse.init import CommInit, CommLayout
from evener.analyze.parse.network import (
    Cards,
    Direct,
    Env,
    Far,
    Loaded,
    Network,
    Sockets,
    Using,
)
from evener.analyze.parse.prefix import Source
from evener.analyze.parse.rings import SILENT_CUT, RingLine, RingPlace
from evener.analyze.parse.smi import Matrix
from evener.analyze.parse.table import Device, Head, Row, Starting, Summary
from evener.analyze.parse.topology import GraphChannel, Topology
from evener.analyze.parse.trees import TreePlace
from evener.analyze.parse.tuning import Choice

_SAMPLES = 20
_MAX_TEXTS = 1000
Process = tuple[str, int]


@dataclass
class _Draft:
    """The lines of one thread that belong to one communicator's set-up."""

    by: Source
    where: int
    started: bool = False
    connected: bool = False
    nodes: int = 0
    init: CommInit | CommLayout | None = None
    rings: list[tuple[RingLine, int]] = field(default_factory=list)
    places: list[tuple[RingPlace, int]] = field(default_factory=list)
    trees: list[tuple[TreePlace, ...]] = field(default_factory=list)
    edges: dict[tuple[int, int, int], NetEdge] = field(default_factory=dict)
    local: bytearray = field(default_factory=bytearray)
    """Edges inside the node as they stand in the log, a line each: there are very many, and they
    are read only where a ring has to be completed."""
    vias: Counter[bytes] = field(default_factory=Counter)
    transports: Counter[str] = field(default_factory=Counter)
    seen: dict[int, str] = field(default_factory=dict)
    """Rank to host, as far as hop lines tell."""


def collect(paths: list[Path]) -> Run:
    """Read all files. Raises parse.Unreadable where one cannot be opened."""
    collector = Collector()
    for number, path in enumerate(paths):
        collector.run.files.append(path)
        collector.table = None
        read(path, number, collector)
    return collector.finish()


class Collector:
    """A parse.stream.Sink that builds a Run."""

    def __init__(self) -> None:
        self.run = Run()
        self.table: Table | None = None
        self._open: dict[Source, _Draft] = {}
        self._threads: dict[tuple[str, int, int], _Draft] = {}
        self._drafts: list[_Draft] = []
        self._last: dict[Process, _Draft] = {}
        self._parts: dict[int, list[_Draft]] = {}
        """Drafts of each communicator, by its id()."""

    # --- lines of a communicator's set-up ---

    def _draft(self, by: Source, where: int) -> _Draft:
        draft = self._open.get(by)
        if draft is not None:
            return draft
        thread = (by.host, by.pid, by.tid)
        draft = self._threads.get(thread)
        if draft is None:
            last = self._last.get((by.host, by.pid))
            # A thread of its own after the set-up: connections made at first use.
            draft = last if last is not None and last.started else self._new(by, where)
        self._open[by] = draft
        return draft

    def _new(self, by: Source, where: int) -> _Draft:
        draft = _Draft(by, where)
        self._drafts.append(draft)
        thread = (by.host, by.pid, by.tid)
        self._threads[thread] = draft
        self._forget(thread)
        return draft

    def _forget(self, thread: tuple[str, int, int]) -> None:
        for by in [b for b in self._open if (b.host, b.pid, b.tid) == thread]:
            del self._open[by]

    def init(self, by: Source, record: CommInit | CommLayout, where: int) -> None:
        thread = (by.host, by.pid, by.tid)
        if isinstance(record, CommLayout):
            draft = self._draft(by, where)
            if draft.init is None:
                draft.init = record
            draft.started = True
            self._last[by.host, by.pid] = draft
            draft.nodes = record.nodes
            return
        if not record.done:
            draft = self._new(by, where)
            draft.started, draft.init = True, record
            self._last[by.host, by.pid] = draft
            return
        draft = self._draft(by, where)
        known = draft.init
        if known is not None and (known.pointer, known.rank) != (record.pointer, record.rank):
            draft = self._new(by, where)
        draft.init = record
        draft.where = where
        self._last[by.host, by.pid] = draft
        if not draft.started:
            self._threads.pop(thread, None)
            self._forget(thread)

    def ring(self, by: Source, record: RingLine, where: int) -> None:
        self._draft(by, where).rings.append((record, where))

    def ring_place(self, by: Source, record: RingPlace, where: int) -> None:
        self._draft(by, where).places.append((record, where))

    def trees(self, by: Source, record: tuple[TreePlace, ...], where: int) -> None:
        self._draft(by, where).trees.append(record)

    def connected(self, by: Source, what: str, where: int) -> None:
        if what.startswith("all rings"):
            self._draft(by, where).connected = True

    def hop(self, by: Source, record: Hop, where: int) -> None:
        draft = self._open.get(by) or self._draft(by, where)
        channel, connection, source, destination, direction, transport = record[:6]
        if transport != "NET":
            draft.transports[transport] += 1
            draft.seen.setdefault(source, by.host)
            return
        host = self.run.host(by.host)
        sends = direction != "receive"
        draft.transports["NET"] += 1
        draft.seen.setdefault(source if sends else destination, by.host)
        if record.proxy >= 0 and record.proxy != source:
            host.proxied += 1
            host.proxied_where = host.proxied_where or where
        host.used[record.network, record.device] += 1
        host.direct[record.direct] += 1
        if not record.direct:
            host.indirect_where = host.indirect_where or where
        if connection != 0:
            return  # point-to-point: every rank to every rank, no part of a ring or tree
        key = (channel, source, destination)
        edge = draft.edges.get(key)
        if edge is None:
            edge = draft.edges[key] = NetEdge(
                channel, source, destination, not draft.connected, record.network, where=where
            )
        if sends:
            edge.send_card, edge.send_direct = record.device, record.direct
            edge.proxy = record.proxy
        else:
            edge.receive_card, edge.receive_direct = record.device, record.direct

    def local(self, by: Source, edge: bytes, via: bytes, where: int) -> None:
        """A hop inside a node, not yet parsed: nine lines in ten of a large log."""
        draft = self._open.get(by) or self._draft(by, where)
        draft.vias[via] += 1
        if not draft.connected:
            draft.local += edge
            draft.local += b"\n"

    # --- lines of a process ---

    def network(self, by: Source, record: Network, where: int) -> None:
        host = self.run.host(by.host)
        if isinstance(record, Cards):
            for card in record.cards:
                host.cards.setdefault((record.network, card.index), card)
                host.card_lines.setdefault((record.network, card.index), where)
            host.oob = record.oob or host.oob
        elif isinstance(record, Using):
            host.networks[record.network] += 1
            host.network_where = host.network_where or where
        elif isinstance(record, Loaded):
            host.plugins.setdefault(record.network, (record.abi, where))
        elif isinstance(record, Sockets):
            host.sockets = host.sockets or (record.threads, record.per_thread, where)
        elif isinstance(record, Direct):
            host.gdr.setdefault((record.network, record.name), (record, where))
        elif isinstance(record, Far):
            host.far.setdefault((record.gpu, record.card), (record, where))
        elif isinstance(record, Env):
            values = self.run.settings.setdefault(record.name, {})
            if len(values) < _MAX_TEXTS:
                values.setdefault(record.value, where)

    def tuning(self, record: Choice, where: int) -> None:
        if len(self.run.choices) < 100_000:
            self.run.choices.setdefault((record.collective, record.size), (record, where))

    def version(self, version: str, where: int) -> None:
        if len(self.run.versions) < _MAX_TEXTS:
            self.run.versions.setdefault(version, where)

    def warning(self, text: str, where: int) -> None:
        if text in self.run.warnings:
            self.run.warnings[text][0] += 1
        elif len(self.run.warnings) < _MAX_TEXTS:
            self.run.warnings[text] = [1, where]

    def bench(self, record: Device | Row | Summary | Starting | Head, where: int) -> None:
        table = self.table
        fresh = isinstance(record, (Starting, Device)) and table is not None and table.average
        if isinstance(record, Starting) and table is not None and (table.rows or table.collective):
            # `Collective test starting` and the options' line open the same table.
            fresh = bool(table.rows) or bool(record.collective)
        if table is None or fresh:
            table = self.table = Table(where=where)
            self.run.tables.append(table)
        if isinstance(record, Row):
            table.rows.append((record, where))
        elif isinstance(record, Device):
            table.devices[record.rank] = record
        elif isinstance(record, Starting):
            table.collective = table.collective or record.collective
        elif isinstance(record, Summary):
            if record.what == "average":
                table.average = record.value
            else:
                table.out_of_bounds = record.value

    def matrix(self, record: Matrix, where: int) -> None:
        self.run.matrices.append((record, where))

    def topology(self, record: Topology, where: int) -> None:
        self.run.topologies.append((record, where))

    def graph(self, record: list[GraphChannel], where: int) -> None:
        self.run.graphs.append((record, where))

    def unknown(self, text: str, where: int) -> None:
        self.run.unknown += 1
        if len(self.run.unknown_samples) < _SAMPLES:
            self.run.unknown_samples.append((text, where))

    def lines(self, total: int, nccl: int) -> None:
        self.run.lines += total
        self.run.nccl_lines += nccl

    # --- joining ---

    def finish(self) -> Run:
        """Join the drafts of all threads and hosts into communicators."""
        self.run.tables = [t for t in self.run.tables if t.rows or t.devices]
        groups: dict[object, list[_Draft]] = {}
        order: Counter[object] = Counter()
        names: dict[tuple[Process, str], object] = {}
        for draft in self._drafts:
            key = self._key(draft, order, names)
            groups.setdefault(key, []).append(draft)
        unnamed: list[_Draft] = groups.pop(None, [])
        for key, drafts in groups.items():
            self.run.communicators.append(self._join(key, drafts))
        if unnamed and any(d.rings or d.edges or d.transports for d in unnamed):
            self._adopt(unnamed)
        for comm in self.run.communicators:
            self._place(comm)
            for member in comm.members.values():
                self.run.host(member.host)
        for table in self.run.tables:
            for device in table.devices.values():
                self.run.host(device.host)
        if len(self.run.hosts) > 1:
            self.run.hosts.pop("", None)
        return self.run

    def _key(
        self,
        draft: _Draft,
        order: Counter[object],
        names: dict[tuple[Process, str], object],
    ) -> object:
        record = draft.init
        if record is None:
            return None
        process = (draft.by.host, draft.by.pid)
        key: object
        if isinstance(record, CommInit) and record.comm_id:
            key = record.comm_id
        elif isinstance(record, CommInit) and record.parent:
            parent = names.get((process, record.parent), record.parent)
            key = ("split of", parent, record.split, record.ranks)
        else:
            nth = (process, record.rank, record.ranks)
            order[nth] += 1
            key = (f"{record.ranks} ranks", order[nth])
        names[process, record.pointer] = key
        return key

    def _join(self, key: object, drafts: list[_Draft]) -> Communicator:
        comm = Communicator(
            name=key if isinstance(key, str) else f"#{len(self.run.communicators)}",
            size=max((d.init.ranks for d in drafts if d.init), default=0),
            where=drafts[0].where,
        )
        for draft in drafts:
            record = draft.init
            if record is None:
                continue
            by = draft.by
            comm.nodes = max(comm.nodes, draft.nodes)
            device, bus = by.device, ""
            if isinstance(record, CommInit):
                bus = record.bus
                device = record.cuda_device if record.nvml_device is None else record.nvml_device
            comm.members[record.rank] = Member(
                record.rank, by.host, by.pid, device, bus, draft.where
            )
        for draft in drafts:
            self._merge(comm, draft)
        return comm

    def _adopt(self, drafts: list[_Draft]) -> None:
        """Lines of processes whose init lines are missing: a communicator of their own."""
        if len(self.run.communicators) == 1 and not self.run.communicators[0].rings:
            comm = self.run.communicators[0]
        else:
            comm = Communicator(name="unnamed", size=0, where=drafts[0].where)
            self.run.communicators.append(comm)
        for draft in drafts:
            if any(
                line.channel in comm.rings and comm.rings[line.channel].ranks != line.ranks
                for line, _ in draft.rings
            ):
                comm = Communicator(name="unnamed", size=0, where=draft.where)
                self.run.communicators.append(comm)
            self._merge(comm, draft)

    def _merge(self, comm: Communicator, draft: _Draft) -> None:
        for line, where in draft.rings:
            comm.rings.setdefault(line.channel, Ring(line.channel, line.ranks, not line.cut, where))
            comm.channels = max(comm.channels, line.channels)
        for places in draft.trees:
            for place in places:
                comm.trees.setdefault(place.channel, {})[place.rank] = place
        for key, edge in draft.edges.items():
            known = comm.edges.setdefault(key, edge)
            if known is not edge:
                if known.send_card < 0:
                    known.send_card, known.send_direct = edge.send_card, edge.send_direct
                    known.proxy = edge.proxy
                if known.receive_card < 0:
                    known.receive_card = edge.receive_card
                    known.receive_direct = edge.receive_direct
                known.ring = known.ring or edge.ring
        for via, count in draft.vias.items():
            if name := kind(via):
                draft.transports[name] += count
            else:
                self.run.unknown += count
        comm.transports.update(draft.transports)
        for rank, host in draft.seen.items():
            if rank not in comm.members:
                comm.members[rank] = Member(rank, host, draft.by.pid, -1, "", draft.where)
        self._parts.setdefault(id(comm), []).append(draft)

    def _place(self, comm: Communicator) -> None:
        """Whole or cut, rings from neighbours, hosts from a table of devices."""
        drafts = self._parts.get(id(comm), [])
        for ring in comm.rings.values():
            if comm.size and len(ring.ranks) < comm.size:
                ring.whole = False
            elif not comm.size and len(ring.ranks) == SILENT_CUT:
                ring.whole = self._table_size() == SILENT_CUT
        if not comm.size and comm.rings:
            whole = [len(r.ranks) for r in comm.rings.values() if r.whole]
            comm.size = max(whole, default=0)
        self._complete(comm, drafts)
        for table in self.run.tables:
            if table.devices and (comm.size in (0, len(table.devices))):
                comm.size = comm.size or len(table.devices)
                for rank, device in table.devices.items():
                    known = comm.members.get(rank)
                    if known is None or not known.host:
                        comm.members[rank] = Member(
                            rank, device.host, device.pid, device.device, device.bus, table.where
                        )
                break
        comm.channels = max(comm.channels, len(comm.rings))

    def _table_size(self) -> int:
        return max((len(t.devices) for t in self.run.tables), default=0)

    def _complete(self, comm: Communicator, drafts: list[_Draft]) -> None:
        """Close cut rings with what each rank said of its own neighbours."""
        follows: dict[int, dict[int, int]] = {}
        where: dict[int, int] = {}
        for draft in drafts:
            for place, line in draft.places:
                follows.setdefault(place.channel, {})[place.rank] = place.following
                where.setdefault(place.channel, line)
            if len(comm.rings) == comm.channels > 0 and all(r.whole for r in comm.rings.values()):
                continue
            for channel, source, destination in edges(draft.local):
                follows.setdefault(channel, {}).setdefault(source, destination)
                where.setdefault(channel, draft.where)
                if source not in comm.members:
                    comm.members[source] = Member(
                        source, draft.by.host, draft.by.pid, -1, "", draft.where
                    )
        for edge in comm.edges.values():
            if edge.ring:
                follows.setdefault(edge.channel, {}).setdefault(edge.source, edge.destination)
                where.setdefault(edge.channel, edge.where)
        for channel, following in follows.items():
            ring = comm.rings.get(channel)
            if ring is not None and ring.whole:
                continue
            order = _walk(following, ring.ranks[0] if ring else min(following))
            if comm.size and len(order) == comm.size and following.get(order[-1]) == order[0]:
                comm.rings[channel] = Ring(
                    channel, tuple(order), True, ring.where if ring else where[channel]
                )


def _walk(following: dict[int, int], start: int) -> list[int]:
    order, seen, rank = [], set[int](), start
    while rank not in seen:
        seen.add(rank)
        order.append(rank)
        if rank not in following:
            break
        rank = following[rank]
    return order
