"""Drafts of threads, joined into communicators.

Processes name the same communicator by pointers of their own. They are joined by commId where it
is printed; a split by its parent, count and colour; else by order: the k-th communicator of n ranks
in which a process holds rank r.

Up to 2.8 no line parts the edges of rings from those of trees. But each rank has one next rank per
channel, and rings are connected first: a rank's first edge of a channel is its ring's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from evener.tools.analyze.model import Communicator, Member, NetEdge, Process, Ring, Run
from evener.tools.analyze.parse.hops import edges, kind
from evener.tools.analyze.parse.init import CommInit, CommLayout
from evener.tools.analyze.parse.prefix import Source
from evener.tools.analyze.parse.rings import SILENT_CUT, RingLine, RingPlace
from evener.tools.analyze.parse.trees import TreePlace


@dataclass
class Draft:
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
    sends: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """By channel and source, the first NET edge before the rings are said to be connected: length
    of `local` then, and destination. It tells rings from trees where nothing else does (to 2.8)."""
    receives: dict[tuple[int, int], int] = field(default_factory=dict)
    """By channel and destination, the source of the first."""
    seen: dict[int, str] = field(default_factory=dict)
    """Rank to host, as far as hop lines tell."""


def join(run: Run, drafts: list[Draft]) -> None:
    """Join the drafts of all threads and hosts into `run.communicators`."""
    _Joiner(run, drafts).finish()


class _Joiner:
    def __init__(self, run: Run, drafts: list[Draft]) -> None:
        self.run = run
        self._drafts = drafts
        self._parts: dict[int, list[Draft]] = {}
        """Drafts of each communicator, by its id()."""

    def finish(self) -> None:
        groups: dict[object, list[Draft]] = {}
        order: Counter[object] = Counter()
        names: dict[tuple[Process, str], object] = {}
        for draft in self._drafts:
            key = self._key(draft, order, names)
            groups.setdefault(key, []).append(draft)
        unnamed: list[Draft] = groups.pop(None, [])
        for key, drafts in groups.items():
            self.run.communicators.append(self._join(key, drafts))
        if unnamed and any(d.rings or d.edges or d.transports or d.vias for d in unnamed):
            self._adopt(unnamed)
        for comm in self.run.communicators:
            self._place(comm)
            for member in comm.members.values():
                self.run.host(member.host)

    def _key(
        self,
        draft: Draft,
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

    def _join(self, key: object, drafts: list[Draft]) -> Communicator:
        comm = Communicator(
            name=key if isinstance(key, str) else f"#{len(self.run.communicators)}",
            size=max((d.init.ranks for d in drafts if d.init), default=0),
            where=drafts[0].where,
        )
        holders: dict[int, set[tuple[str, int, str]]] = {}
        for draft in drafts:
            record = draft.init
            if record is None:
                continue
            by = draft.by
            holders.setdefault(record.rank, set()).add((by.host, by.pid, record.pointer))
            comm.nodes = max(comm.nodes, draft.nodes)
            device, bus = by.device, ""
            if isinstance(record, CommInit):
                comm.started.add(record.rank)
                if record.done:
                    comm.finished.add(record.rank)
                bus = record.bus
                device = record.cuda_device if record.nvml_device is None else record.nvml_device
            comm.members[record.rank] = Member(
                record.rank, by.host, by.pid, device, bus, draft.where
            )
        if not isinstance(key, str):
            comm.copies = max(map(len, holders.values()), default=1)
        for draft in drafts:
            self._merge(comm, draft)
        return comm

    def _adopt(self, drafts: list[Draft]) -> None:
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

    def _merge(self, comm: Communicator, draft: Draft) -> None:
        for line, where in draft.rings:
            comm.rings.setdefault(line.channel, Ring(line.channel, line.ranks, not line.cut, where))
            comm.channels = max(comm.channels, line.channels)
        for places in draft.trees:
            for place in places:
                comm.trees.setdefault(place.channel, {})[place.rank] = place
        if not draft.connected:
            _first_edges(draft)
        for key, edge in draft.edges.items():
            known = comm.edges.setdefault(key, edge)
            if known is not edge:
                if known.send_card < 0:
                    known.send_card, known.send_direct = edge.send_card, edge.send_direct
                    known.proxy = edge.proxy
                if known.receive_card < 0:
                    known.receive_card = edge.receive_card
                    known.receive_direct = edge.receive_direct
                # The sender knows: it has one next rank per channel.
                sends = edge.send_card >= 0
                known.ring = edge.ring if sends else known.ring
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
                    if known is None or not known.host or known.device < 0:
                        host = known.host if known and known.host else device.host
                        comm.members[rank] = Member(
                            rank, host, device.pid, device.device, device.bus, table.where
                        )
                break
        comm.channels = max(comm.channels, len(comm.rings))

    def _table_size(self) -> int:
        return max((len(t.devices) for t in self.run.tables), default=0)

    def _complete(self, comm: Communicator, drafts: list[Draft]) -> None:
        """Close cut rings with what each rank said of its own neighbours."""
        follows: dict[int, dict[int, int]] = {}
        where: dict[int, int] = {}
        for edge in comm.edges.values():
            if edge.ring:
                follows.setdefault(edge.channel, {}).setdefault(edge.source, edge.destination)
                where.setdefault(edge.channel, edge.where)
        for draft in drafts:
            for place, line in draft.places:
                follows.setdefault(place.channel, {})[place.rank] = place.following
                where.setdefault(place.channel, line)
            if len(comm.rings) == comm.channels > 0 and all(r.whole for r in comm.rings.values()):
                continue
            for _, channel, source, destination in edges(draft.local):
                follows.setdefault(channel, {}).setdefault(source, destination)
                where.setdefault(channel, draft.where)
                if source not in comm.members:
                    comm.members[source] = Member(
                        source, draft.by.host, draft.by.pid, -1, "", draft.where
                    )
        for channel, following in follows.items():
            ring = comm.rings.get(channel)
            if ring is not None and ring.whole:
                continue
            order = _walk(following, ring.ranks[0] if ring else min(following))
            if comm.size and len(order) == comm.size and following.get(order[-1]) == order[0]:
                comm.rings[channel] = Ring(
                    channel, tuple(order), True, ring.where if ring else where[channel]
                )


def _first_edges(draft: Draft) -> None:
    """Leave `ring` on the first edge of each rank and channel, where nothing else tells."""
    first = dict(draft.sends)
    if first:
        for place, channel, source, destination in edges(draft.local):
            known = first.get((channel, source))
            if known is not None and place < known[0]:
                first[channel, source] = (place, destination)
    for (channel, source, destination), edge in draft.edges.items():
        if edge.send_card >= 0:
            edge.ring = first.get((channel, source), (0, -1))[1] == destination
        else:
            edge.ring = draft.receives.get((channel, destination)) == source


def _walk(following: dict[int, int], start: int) -> list[int]:
    order, seen, rank = [], set[int](), start
    while rank not in seen:
        seen.add(rank)
        order.append(rank)
        if rank not in following:
            break
        rank = following[rank]
    return order
