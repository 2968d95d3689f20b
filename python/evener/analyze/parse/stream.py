"""Files in, records out, in one pass: the file is never held in memory, nor is a line kept.

A large log is nearly all lines of one kind. So a line is looked at with plain byte searches first;
the regular expression of a kind runs only where the first word says so, and the source in front
(`host:pid:tid [dev]`, a few thousand different ones in millions of lines) is remembered.
Whatever a line holds, it cannot stop the reading: no parser raises, and a line without an end is
cut at MAX_LINE.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from evener.analyze.parse import hops, init, network, results, rings, smi, table, trees
from evener.analyze.parse import topology as xml
from evener.analyze.parse import tuning as tuning_lines
from evener.analyze.parse.prefix import Source, source, strip_launcher
from evener.errors import UsageError

MAX_LINE = 1 << 20
# NCCL formats into 1024 bytes; what is longer is no line of its, and could cost an expression that
# looks back much time.
MAX_NCCL = 2048
_BLOCK = 1 << 20
_MAX_DOCUMENT = 256 << 20
_INFO = b" NCCL INFO "
_WARN = b" NCCL WARN "

# What a line that is not NCCL's may start with, if it is a table's or matrix's or behind a prefix.
_FIRST = frozenset(b"0123456789#[ \t\x1bNG")

# First words of lines that are understood and say nothing that a finding needs. What is not here
# and has no parser is counted as unknown.
_PLAIN = frozenset(
    b"""Bootstrap Setting cudaDriverVersion threadThresholds Launch Threads CC DMA-BUF Comm MNNVL
    P2P NVLS Symmetric Pattern Search Symmem RAS PXN ncclCommInitRank ncclCommInitAll TUNER/Plugin:
    PROFILER/Plugin: TUNER/Plugin PROFILER/Plugin ENV/Plugin: GIN/Plugin: RMA/Plugin: Tree Init
    NET/Plugin NET/Plugin: NET/IB NET/IB: NET/Socket NET/OFI misc/utils.cc proxy.cc [Proxy [Service
    Destroy bootstrapSplit: GDRCOPY Could Latency/AlgBw Algorithm TOPO/NET === CPU/0 GPU/0 comm
    CollNet Check MEM Allocated Register register Channel/Conn ncclTopoGetCpuAffinity: UDS: New
    bootstrap: Connected coll Memory Using Trees NCCL_TOPO_FILE ROCr XML Topology ProxyCall
    AllocDevice Mem Cleanup DEVICE Attribute Attempting Failed Loading Closing Enabled
    Bootstrap: GPU Assigned Initialized Successfully Affinity ncclTopoPopulateNics timings: CUDA
    Disabling External NVLSTree Skipping CUMEM MMAP P2p ncclP2pSchedule:
    """.split()
)
# Settings, calls, and what a network says of itself: built in, or a plug-in's.
_PLAIN_BEGINNINGS = (b"NCCL_", b"ncclCommInit", b"ncclCommSplit", b"ncclCommDestroy", b"NET/")

# What subsystems GRAPH and TUNING dump: the topology as a tree (`+ PCI[24.0] - GPU/0-1b000`), paths
# (`GPU/0-1b000 :GPU/0-1b000 (0/5000.0/LOC) ...`), searched graphs (` 0 : NET/0 GPU/0 ...`), and
# tables of latency and bandwidth (`AllReduce | 14.0/ 8.1 | ...`).
_DUMPED = re.compile(
    rb"(?:[A-Z][A-Z0-9]{2}/[0-9A-F]+(?:-|\b)|\+ [A-Z]|===|\d+ :(?: [A-Z]{3}/|$)"
    rb"|(?:[A-Z][A-Za-z]+|Max NThreads) *\||[\d./ -]+\|)"
)


class UnreadableError(UsageError):
    """A file that cannot be read, or that is none of the formats."""


class Sink(Protocol):
    """Who takes the records. `where` packs the file's number and the line: file << 40 | line."""

    def ring(self, by: Source, record: rings.RingLine, where: int) -> None: ...
    def ring_place(self, by: Source, record: rings.RingPlace, where: int) -> None: ...
    def trees(self, by: Source, record: tuple[trees.TreePlace, ...], where: int) -> None: ...
    def hop(self, by: Source, record: hops.Hop, where: int) -> None: ...
    def local(self, by: Source, edge: bytes, via: bytes, where: int) -> None: ...
    def init(self, by: Source, record: init.CommInit | init.CommLayout, where: int) -> None: ...
    def network(self, by: Source, record: network.Network, where: int) -> None: ...
    def connected(self, by: Source, what: str, where: int) -> None: ...
    def tuning(self, record: tuning_lines.Choice, where: int) -> None: ...
    def version(self, version: str, where: int) -> None: ...
    def warning(self, text: str, where: int) -> None: ...
    def bench(
        self,
        record: table.Device | table.Row | table.Summary | table.Starting | table.Head,
        where: int,
    ) -> None: ...
    def matrix(self, record: smi.Matrix, where: int) -> None: ...
    def topology(self, record: xml.Topology, where: int) -> None: ...
    def graph(self, record: list[xml.GraphChannel], where: int) -> None: ...
    def unknown(self, text: str, where: int) -> None: ...
    def lines(self, total: int, nccl: int) -> None: ...


def read(path: Path, number: int, sink: Sink) -> None:
    """Read one file into `sink`; `number` is the file's in `where`.

    Raises UnreadableError where it cannot be opened.
    """
    try:
        with path.open("rb") as file:
            head = file.read(4096).lstrip()
            if head.startswith((b"{", b"<")):
                file.seek(0)
                document = file.read(_MAX_DOCUMENT)
                if _document(document, number, sink):
                    return
            file.seek(0)
            _Log(number, sink).read(_lines(file.read, _BLOCK))
    except OSError as error:
        raise UnreadableError(
            f"{path}: {error.strerror or error}", "name a file that exists and can be read"
        ) from None


def _document(text: bytes, number: int, sink: Sink) -> bool:
    where = number << 40 | 1
    if text.lstrip().startswith(b"<"):
        found = xml.topology(text)
        if isinstance(found, xml.Topology):
            sink.topology(found, where)
        elif found:
            sink.graph(found, where)
        return found is not None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not results.is_report(document):
        return False
    for record in results.report(document):
        sink.bench(record, where)
    return True


def _lines(read: object, block: int) -> Iterator[list[bytes]]:
    """Lists of whole lines without their ends."""
    rest = b""
    while data := read(block):  # type: ignore[operator]
        data = rest + data
        lines = data.split(b"\n")
        rest = lines.pop()
        # What of a line is over the limit goes, the line stays one: numbers of lines are evidence.
        rest = rest[:MAX_LINE]
        yield lines
    if rest:
        yield [rest]


class _Log:
    """The state that lines of one file need: a table's head, a matrix under way, known sources."""

    def __init__(self, number: int, sink: Sink) -> None:
        self.base = number << 40
        self.sink = sink
        self.head: table.Head | None = None
        self.matrix: smi.Matrix | None = None

    def read(self, blocks: Iterator[list[bytes]]) -> None:
        sink = self.sink
        # By what precedes NCCL: the whole of it, which is one look-up where no time stands in it,
        # and its last two words, which are the source.
        prefixes: dict[bytes, Source] = {}
        sources: dict[bytes, Source | None] = {}
        parse_hop, sink_hop, sink_local = hops.hop, sink.hop, sink.local
        where, nccl = self.base, 0
        for lines in blocks:
            for line in lines:
                where += 1
                at = line.find(_INFO)
                if at < 0:
                    if _WARN in line:
                        nccl += 1
                        self.warn(line, where)
                    elif line and (line[0] in _FIRST or self.matrix) and len(line) < 4096:
                        self.other(line, where)
                    continue
                nccl += 1
                if len(line) > MAX_NCCL:
                    sink.unknown(_show(line), where)
                    continue
                by = prefixes.get(line[:at])
                if by is None:
                    key = line[line.rfind(b" ", 0, line.rfind(b" ", 0, at)) + 1 : at]
                    try:
                        by = sources[key]
                    except KeyError:
                        by = source(key)
                        if len(sources) < 200_000:
                            sources[key] = by
                    if by is None:
                        sink.unknown(_show(line), where)
                        continue
                    if len(prefixes) < 50_000:
                        prefixes[line[:at]] = by
                message = line[at + 11 :]
                if message.startswith(b"Channel "):
                    via = message.find(b" via ")
                    if via > 0 and message.startswith((b"P2P/", b"SHM/"), via + 5):
                        sink_local(by, message[8:via], message[via + 5 :], where)
                        continue
                    record = parse_hop(message)
                    if record is not None:
                        sink_hop(by, record, where)
                        continue
                elif message.find(b": opCount ", 0, 40) > 0:
                    continue  # one line a call of a collective: the many of subsystem COLL
                self.info(by, message, where)
        sink.lines(where - self.base, nccl)

    def info(self, by: Source, message: bytes, where: int) -> None:
        """Any INFO line but a hop."""
        sink = self.sink
        message = message.strip()
        word = message[: message.find(b" ")] if b" " in message else message
        if word == b"Channel":
            if ring := rings.channel(message):
                return sink.ring(by, ring, where)
        elif word == b"Ring":
            if place := rings.place(message):
                return sink.ring_place(by, place, where)
            if old := hops.hop(message):
                return sink.hop(by, old, where)
        elif word == b"Trees":
            if found := trees.trees(message):
                return sink.trees(by, found, where)
        elif word == b"Connected":
            return sink.connected(by, message[10:].decode("utf-8", "replace"), where)
        elif b" - Init " in message or b"- Init " in message or b" nNodes " in message:
            if comm := init.init(message):
                return sink.init(by, comm, where)
        elif b" Bytes -> Algo " in message:
            if choice := tuning_lines.choice(message):
                return sink.tuning(choice, where)
        elif message.startswith((b"NET/", b"Using network", b"GPU Direct", b"NCCL_")) or (
            b"NET plugin" in message
        ):
            if net := network.network(message):
                return sink.network(by, net, where)
        elif message.startswith(b"NCCL version") and (version := init.version(message)):
            return sink.version(version, where)
        if word in _PLAIN or word.startswith(_PLAIN_BEGINNINGS) or _DUMPED.match(message):
            return None
        if b" coll channels, " in message or b" COMPLETE" in message or b" START" in message:
            return None
        return sink.unknown(_show(message), where)

    def warn(self, line: bytes, where: int) -> None:
        self.sink.warning(_show(line.partition(_WARN)[2]), where)

    def other(self, line: bytes, where: int) -> None:
        """A line that is not NCCL's: nccl-tests' table, nvidia-smi's matrix, or the program's."""
        line = line.rstrip(b"\r")
        text = line.lstrip()
        if text[:1] in (b"[", b"\x1b") or text[1:3] == b": " or text[2:4] == b": ":
            text = strip_launcher(text).lstrip()
        first = text[:1]
        if first.isdigit():
            if row := table.row(text, self.head):
                self.sink.bench(row, where)
        elif first == b"#":
            record = table.comment(text)
            if isinstance(record, table.Head):
                self.head = record
            if record is not None:
                self.sink.bench(record, where)
        elif first == b"N" and text.startswith(b"NCCL version "):
            if version := init.version(text):
                self.sink.version(version, where)
        elif first == b"G" and (matrix := smi.head(text)):
            self.matrix = matrix
            self.sink.matrix(matrix, where)
        elif self.matrix is not None:
            smi.row(text, self.matrix)


def _show(raw: bytes) -> str:
    text = raw[:300].decode("utf-8", "replace").strip()
    return "".join(c if c.isprintable() else " " for c in text)
