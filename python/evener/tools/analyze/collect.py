"""From records to the model: which line belongs to which communicator.

Ring, tree and hop lines name no communicator. They are printed by the thread that sets one up,
between its `Init START` (from 2.18) and its `Init COMPLETE`; before 2.18 only the end is marked. So
each thread has a draft: the lines since its last boundary. A draft with a start keeps what comes
after the end too (connections made at first use, 2.22 and later); one without a start is closed by
its end. Lines on a thread that never set anything up go to the process's last communicator.
join.py makes communicators of the drafts.

One file may hold several tables, one after another or side by side (pods, ranks): each stream of a
file, known by its prefix, has one open table.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from evener.tools.analyze.evidence import Reader, ras, recorder, seen
from evener.tools.analyze.evidence.records import Sign
from evener.tools.analyze.join import Draft, join
from evener.tools.analyze.model import NetEdge, Process, Run, Table, Warned
from evener.tools.analyze.parse import expand, read
from evener.tools.analyze.parse.failures import Ended, Step
from evener.tools.analyze.parse.hops import Hop
from evener.tools.analyze.parse.init import CommInit, CommLayout
from evener.tools.analyze.parse.network import (
    Absent,
    Address,
    Cards,
    Direct,
    Env,
    Far,
    Loaded,
    Network,
    NoPeers,
    Provider,
    Sockets,
    Speed,
    Using,
)
from evener.tools.analyze.parse.prefix import Source
from evener.tools.analyze.parse.rings import RingLine, RingPlace
from evener.tools.analyze.parse.smi import Matrix
from evener.tools.analyze.parse.table import Device, Head, Row, Starting, Summary
from evener.tools.analyze.parse.topology import GraphChannel, Topology
from evener.tools.analyze.parse.trees import TreePlace
from evener.tools.analyze.parse.tuning import Choice

_SAMPLES = 20
_MAX_TEXTS = 1000
_LINE = (1 << 40) - 1
_LAST = 100


def collect(paths: list[Path]) -> Run:
    """Read all files. Raises parse.Unreadable where one cannot be opened."""
    collector = Collector()
    for given in expand(paths):
        collector.run.files.append(given.name)
        collector.opened(str(given.name))
        if not read(given, len(collector.run.files) - 1, collector):
            collector.run.skipped.append(collector.run.files.pop())
    return collector.finish()


class Collector:
    """A parse.stream.Sink that builds a Run."""

    def __init__(self) -> None:
        self.run = Run()
        self._tables: dict[bytes, Table] = {}
        """The open table of each stream of the file that is read."""
        self._program = ""
        self._open: dict[Source, Draft] = {}
        self._threads: dict[tuple[str, int, int], Draft] = {}
        self._drafts: list[Draft] = []
        self._last: dict[Process, Draft] = {}
        self._reader = Reader(self.run.evidence)
        self._ends: dict[int, int] = {}
        """Lines of each file."""

    def opened(self, name: str = "") -> None:
        """A new file begins: no table of the last one goes on in it."""
        self._tables, self._program = {}, ""
        self._reader = Reader(self.run.evidence, name)

    def text(self, raw: bytes, where: int, host: str = "") -> None:
        self._reader.line(raw, where, host)

    def block(self, text: bytes) -> None:
        self._reader.block(text)

    def value(self, document: Any, name: str, where: int) -> bool:
        """Take a document of JSON or a pickle; whether it is one of the formats."""
        if recorder.is_dump(document):
            recorder.dump(document, name, where, self.run.evidence)
        elif ras.is_ras(document):
            ras.report(document, self.run.evidence, where)
        elif seen.is_seen(document):
            seen.seen(document, where, self.run.evidence)
        elif seen.is_watch(document):
            seen.watch(document, where, self.run.evidence)
        elif (stack := _error_file(document)) is not None:
            self._reader.block(stack)
            for line in stack.split(b"\n"):
                self._reader.line(line, where)
        else:
            return False
        self.run.lines += 1
        return True

    # --- lines of a communicator's set-up ---

    def _draft(self, by: Source, where: int) -> Draft:
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

    def _new(self, by: Source, where: int) -> Draft:
        draft = Draft(by, where)
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
        draft = self._draft(by, where)
        draft.rings.append((record, where))
        if record.ranks[0] == 0:
            draft.seen.setdefault(0, by.host)  # rank 0 prints the rings

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
            if connection == 0 and not draft.connected:
                draft.local += b"%d : %d -> %d\n" % (channel, source, destination)
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
            if not draft.connected:
                if sends:
                    draft.sends.setdefault((channel, source), (len(draft.local), destination))
                else:
                    draft.receives.setdefault((channel, destination), source)
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
            if record.address and len(host.addresses) < _MAX_TEXTS:
                host.addresses.add(record.address)
        elif isinstance(record, Address):
            if len(host.addresses) < _MAX_TEXTS:
                host.addresses.add(record.address)
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
        elif isinstance(record, Absent):
            if len(host.absent) < _MAX_TEXTS:
                host.absent.setdefault((record.network, record.why), where)
        elif isinstance(record, Provider):
            host.provider = host.provider or (record, where)
        elif isinstance(record, Speed):
            host.speeds.setdefault(record.name, record.mbps)
        elif isinstance(record, NoPeers):
            host.no_peers = host.no_peers or (record.text, where)

    def tuning(self, record: Choice, where: int) -> None:
        if len(self.run.choices) < 100_000:
            self.run.choices.setdefault((record.collective, record.size), (record, where))

    def version(self, version: str, where: int) -> None:
        if len(self.run.versions) < _MAX_TEXTS:
            self.run.versions.setdefault(version, where)

    def warning(self, by: Source | None, text: str, where: int, place: str = "") -> None:
        warning = self.run.warnings.get(text)
        if warning is None:
            if len(self.run.warnings) >= _MAX_TEXTS:
                return
            warning = self.run.warnings[text] = Warned(0, where, place=place)
        warning.times += 1
        if by is not None and by.host:
            self.run.host(by.host)
        if by is not None and len(warning.processes) < _MAX_TEXTS:
            warning.processes.setdefault((by.host, by.pid))

    def fabric(self, by: Source, text: str, where: int) -> None:
        """A line of multi-node NVLink's set-up."""
        self.run.host(by.host)
        if len(self.run.evidence.signs) < _MAX_TEXTS:
            self.run.evidence.add(Sign("mnnvl", text, where, by.host, by.pid))

    def step(self, by: Source, record: Step, where: int) -> None:
        if by.host:
            self.run.host(by.host)
        trail = self.run.trails.setdefault((by.host, by.pid), [])
        if len(trail) < _SAMPLES:
            trail.append((record, where))

    def ended(self, record: Ended, where: int) -> None:
        if len(self.run.ended) < _MAX_TEXTS:
            self.run.ended.append((record, where))

    def program(self, collective: str, where: int) -> None:
        self._program = collective

    def broken(self, lead: bytes, where: int) -> None:
        if (table := self._tables.get(lead)) is not None:
            table.broken += 1

    def bench(
        self,
        record: Device | Row | Summary | Starting | Head,
        where: int,
        lead: bytes = b"",
    ) -> None:
        table = self._tables.get(lead)
        if table is None or _opens(table, record):
            table = self._tables[lead] = Table(where=where, hint=self._program)
            self.run.tables.append(table)
        if isinstance(record, Row):
            table.rows.append((record, where))
        elif isinstance(record, Device):
            self.run.host(record.host)
            table.hosts.add(record.host)
            known = table.devices.get(record.rank)
            if known is not None and (known.host, known.pid) != (record.host, record.pid):
                table.twice[record.rank] = where
            table.devices.setdefault(record.rank, record)
        elif isinstance(record, Starting):
            table.collective = table.collective or record.collective
            table.options += record.options
        elif isinstance(record, Head):
            table.heads += 1
        elif record.what == "average":
            table.averages += 1
            table.average = table.average if table.averages > 1 else record.value
        else:
            table.out_of_bounds = record.value
            table.failed = table.failed or record.failed

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

    def cut(self) -> None:
        self.run.cut.append(len(self.run.files) - 1 << 40 | 1)

    def lines(self, total: int, nccl: int) -> None:
        self.run.lines += total
        self._ends[len(self.run.files) - 1] = total
        self.run.nccl_lines += nccl

    def finish(self) -> Run:
        """Join what was read. Tables that hold nothing are left out."""
        run = self.run
        _mixed(run.tables)
        run.tables = [
            t
            for t in run.tables
            if not t.replaced and (t.rows or t.devices or t.options or t.heads)
        ]
        join(run, self._drafts)
        self._last_words()
        if len(run.hosts) > 1:
            nameless = run.hosts.get("")
            if nameless is not None and not nameless.used:
                run.hosts.pop("")
        return run

    def _last_words(self) -> None:
        """Take errors of one line for tracebacks where nothing else says how the run ended.

        Programs print such lines of what they handled, too: only those near a file's end count, and
        of a run that hung only those before a rank gave up.
        """
        run = self.run
        evidence = run.evidence
        if evidence.raised or ((run.nccl_lines or run.tables) and not (run.ended or evidence)):
            return
        hung = min((w.where for w in evidence.waits), default=1 << 62)
        hung = min((beat.where for beat in evidence.beats.values()), default=hung)
        for one in evidence.lone:
            left = self._ends.get(one.where >> 40, 0) - (one.where & _LINE)
            if left < _LAST and one.where < hung:
                evidence.add(one)


def _error_file(document: Any) -> bytes | None:
    """The traceback in a file that torchrun lets a failed rank write; None where it is none."""
    message = document.get("message") if isinstance(document, dict) else None
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    return stack.encode("utf-8", "replace") if isinstance(stack, str) else None


def _opens(table: Table, record: Device | Row | Summary | Starting | Head) -> bool:
    """Whether a record belongs to the table after this one.

    A second line of options before any device does not start a new table: it is another process
    that runs by itself, whose output is mixed with this one's. After devices it is a new start, as
    of a script that tries again.
    """
    if isinstance(record, Starting) and record.ends:
        return False
    if isinstance(record, Starting):
        named = table.collective and record.collective and table.collective != record.collective
        again = bool(table.devices) and record.options and not table.rows
        return bool(table.rows) or table.average is not None or bool(named) or again
    if isinstance(record, Head):
        return bool(table.rows)
    if isinstance(record, Device):
        known = table.devices.get(record.rank)
        same = known is None or (known.host, known.pid) == (record.host, record.pid)
        return table.average is not None or (bool(table.rows) and not same)
    if not isinstance(record, Row) or table.average is None:
        return False
    # Where rows stood twice, what goes on after an average is another process's end.
    return not table.doubled() or record.size < table.rows[-1][0].size


def _mixed(tables: list[Table]) -> None:
    """Two starts with devices of their own on different hosts, and then rows of both, are mixed."""
    for before, after in pairwise(tables):
        if before.rows or not before.devices or not after.devices or not after.options:
            continue
        hosts = {d.host for d in before.devices.values()}, {d.host for d in after.devices.values()}
        if hosts[0] != hosts[1] and 0 in before.devices and 0 in after.devices:
            after.twice[0] = before.where
            after.hosts |= before.hosts
            before.replaced = True
