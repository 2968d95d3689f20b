"""Files in, records out, in one pass: the file is never held in memory, nor is a line kept.

A large log is nearly all lines of one kind. So a line is looked at with plain byte searches first;
the regular expression of a kind runs only where the first word says so, and the source in front
(`host:pid:tid [dev]`, a few thousand different ones in millions of lines) is remembered.
A new line of NCCL's needs a pattern in a module beside this one, a branch in `_Log.info` (or
`warn`, `other`), and a method of `Sink`, which `evener.tools.analyze.collect` is.

Whatever a line holds, it cannot stop the reading: no parser raises, and a line without an end is
cut at MAX_LINE.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from evener.tools.analyze.evidence import pickles
from evener.tools.analyze.parse import (
    failures,
    hops,
    init,
    network,
    results,
    rings,
    smi,
    table,
    trees,
    unwrap,
    wrapped,
)
from evener.tools.analyze.parse import topology as xml
from evener.tools.analyze.parse import tuning as tuning_lines
from evener.tools.analyze.parse.inputs import Input, Stream, UnreadableError
from evener.tools.analyze.parse.prefix import Source, plain, source, stream

MAX_LINE = 1 << 20
# NCCL formats into 1024 bytes; a longer line is not NCCL's, and could cost an expression that
# looks back much time.
MAX_NCCL = 2048
# Longer lines are not looked at for what programs and launchers say.
MAX_TEXT = 1 << 16
_BLOCK = 1 << 20
_MAX_DOCUMENT = 256 << 20
_INFO = b"NCCL INFO "
_WARN = b"NCCL WARN "
# A row ends in a number, `N/A`, or the bar of a table of Markdown; then there may be spaces.
_ROW_ENDS = frozenset(b"0123456789A|")
_TABLE_WORDS = (b"#", b"busbw", b"Rank ", b"nGpus", b"bandwidth")
_MAX_STREAMS = 64
# `host:pid:tid [dev] file:line WARN`, as up to 2.2.
_OLD = re.compile(rb"([\w.-]*:\d{1,10}:\d{1,10} \[\d{1,5}\] )(?:\S+:\d+ )?(INFO|WARN) (.*)$")
_LEAD = re.compile(rb"^\s*(?:\[[^\]]{1,40}\](?:<std\w+>)?:\s*|\d+: +|\([^)]{1,80}\) +)+")
# What comes before the word `NCCL` in a document about logs, or at the start of such a line.
_QUOTES = tuple(b"%c" % c for c in b"`\"'(*/")
_MARKS = tuple(b"%c" % c for c in b"#-*/$`\"'")

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
    Cuda RCCL Kernel Hipruntime HIP Dmabuf Missing dlvsym Plugin Received Initialized New Limiting
    UDS retrieving Retrieving ncclProxyProgressAsync ncclPollProxyResponse resp.opId Hostname
    Librccl hsaAmdPortableExport Net NET Device nranks Duplicating MSCCL MSCCL++: Loading
    transport:0 initialized SHM IPC RMA GIN Inserted ProfilerPlugin Latency AllGather allocating
    Created Set Call rank ncclMaxSharedMem Opening Connection
    Interface Removed Reusing recvProxy sendProxy DMA_BUF
    """.split()
)
# Settings, calls, and what a network says of itself: built in, or a plug-in's.
_PLAIN_BEGINNINGS = (
    b"NCCL_", b"RCCL_", b"ncclComm", b"ncclTopo", b"NET/", b"ROCm", b"ROCr", b"resp.",
    b"proxyProgress", b"NCCL git",
)  # fmt: skip
# Source files that say how much they allocate: `init.cc:1798 Cuda Host Alloc Size 4 pointer ...`.
_PLACED = re.compile(rb"[\w./-]+\.(?:cc|h|cu):\d+ (?:Cuda|CUDA|Hip|Mem|memory|NCCL|Ibv|Realloc)")

# What subsystems GRAPH and TUNING dump: the topology as a tree (`+ PCI[24.0] - GPU/0-1b000`), paths
# (`GPU/0-1b000 :GPU/0-1b000 (0/5000.0/LOC) ...`), searched graphs (` 0 : NET/0 GPU/0 ...`), and
# tables of latency and bandwidth (`AllReduce | 14.0/ 8.1 | ...`).
_DUMPED = re.compile(
    rb"(?:[A-Z][A-Z0-9]{2}/[0-9A-F]+(?:-|\b)|\+ [A-Z]|===|\d+ :(?: [A-Z]{3}/|$)"
    rb"|(?:[A-Z][A-Za-z]+|Max NThreads) *\||[\d./ -]+\|)"
)


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
    def warning(self, by: Source | None, text: str, where: int, place: str = "") -> None: ...
    def fabric(self, by: Source, text: str, where: int) -> None: ...
    def step(self, by: Source, record: failures.Step, where: int) -> None: ...
    def ended(self, record: failures.Ended, where: int) -> None: ...
    def program(self, collective: str, where: int) -> None: ...
    def broken(self, lead: bytes, where: int) -> None: ...
    def bench(
        self,
        record: table.Device | table.Row | table.Summary | table.Starting | table.Head,
        where: int,
        lead: bytes = b"",
    ) -> None: ...
    def matrix(self, record: smi.Matrix, where: int) -> None: ...
    def topology(self, record: xml.Topology, where: int) -> None: ...
    def graph(self, record: list[xml.GraphChannel], where: int) -> None: ...
    def unknown(self, text: str, where: int) -> None: ...
    def text(self, raw: bytes, where: int, host: str = "") -> None: ...
    def block(self, text: bytes) -> None: ...
    def value(self, document: Any, name: str, where: int) -> bool: ...
    def lines(self, total: int, nccl: int) -> None: ...
    def cut(self) -> None: ...


def read(given: Input, number: int, sink: Sink) -> bool:
    """Read one file into `sink`; `number` is the file's in `where`. Whether it was read: a file
    that was found in a folder and is no text is left out.

    Raises UnreadableError where it cannot be opened or is none of the formats.
    """
    try:
        with Stream(given) as file:
            taken = _read(file, given, number, sink)
            if file.cut and taken:
                sink.cut()
            return taken
    except OSError as error:
        raise UnreadableError(
            f"{given.name}: {error.strerror or error}", "name a file that exists and can be read"
        ) from None


def _read(file: Stream, given: Input, number: int, sink: Sink) -> bool:
    if pickles.is_pickle(file.head):
        return _pickle(file, given, number, sink)
    if file.binary:
        if given.found:
            return False
        raise UnreadableError(
            f"{given.name}: binary, and no flight recorder's dump",
            "give text, or unpack it first",
        )
    if _maybe_document(file.head):
        document = file.all(_MAX_DOCUMENT)
        if _document(document, given, number, sink):
            return True
    _Log(number, sink, wrapped.width(plain(file.head))).read(_lines(file.read, _BLOCK))
    return True


def _pickle(file: Stream, given: Input, number: int, sink: Sink) -> bool:
    data = file.all(_MAX_DOCUMENT + 1)
    if len(data) > _MAX_DOCUMENT:
        raise UnreadableError(
            f"{given.name}: a pickle of more than {_MAX_DOCUMENT >> 20} MiB", "give one rank's dump"
        )
    try:
        value = pickles.loads(data, str(given.name))
    except pickles.RefusedError:
        if given.found and "code" not in given.name.name and not _named_as_dump(given):
            return False
        raise
    if sink.value(value, str(given.name), number << 40 | 1):
        return True
    if given.found:
        return False
    raise UnreadableError(
        f"{given.name}: a pickle that is no flight recorder's dump", "give a file of PyTorch's"
    )


def _named_as_dump(given: Input) -> bool:
    return "trace" in given.name.name


def _maybe_document(head: bytes) -> bool:
    """Whether a file may be one document of JSON or XML, by its begin: only then is it read whole.
    `[rank0]: ...` and a JSON object to each line are none."""
    text = head.lstrip()
    if text[:1] not in (b"{", b"["):
        return text[:1] == b"<"
    if results.RCCL in text:
        return True  # lines of JSON that are one table
    try:
        json.loads(text)
    except RecursionError:
        return False
    except UnicodeDecodeError as error:
        return error.start > len(text) - 4  # cut in a letter
    except json.JSONDecodeError as error:
        # What ends too early says nothing: there is more of it.
        cut = error.msg.startswith(("Unterminated string", "Invalid \\escape", "Invalid \\u"))
        return cut or error.pos >= len(text) - 16
    return True


def _document(text: bytes, given: Input, number: int, sink: Sink) -> bool:
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
        lines = results.rccl_lines(text)
        for line in lines:
            sink.bench(line, where)
        return bool(lines)
    if results.is_report(document):
        for record in results.report(document):
            sink.bench(record, where)
        return True
    if sink.value(document, str(given.name), where):
        return True
    entries = unwrap.document(document)
    if entries is None:
        return False
    log = _Log(number, sink)
    places = _places(text, len(entries))
    for (texts, host), place in zip(entries, places, strict=True):
        log.host = host
        log.base = (number << 40) + place - 1
        log.read(iter([[_flat(one)] for one in texts]), pieces=True)
    return True


def _places(text: bytes, count: int) -> list[int]:
    """The lines in which the entries of a document stand, where that can be told."""
    lines = [
        number
        for number, line in enumerate(text.split(b"\n"), 1)
        if re.match(rb'\s*[{,]?\s*"(?:log|textPayload|message|MESSAGE|msg|line)"\s*:', line)
    ]
    return lines if len(lines) == count else [1] * count


def _flat(line: bytes) -> bytes:
    return plain(line[:MAX_LINE])


def _lines(read: object, block: int) -> Iterator[list[bytes]]:
    """Lists of whole lines without their ends."""
    rest = b""
    while data := read(block):  # type: ignore[operator]
        data = rest + data
        cut = data.rfind(b"\n")
        if cut < 0:
            # What of a line is over the limit goes, the line stays one: its number is evidence.
            rest = data[:MAX_LINE]
            continue
        rest = data[cut + 1 :][:MAX_LINE]
        data = data[:cut]
        yield plain(data).split(b"\n")
    if rest:
        yield [plain(rest)]


class _Log:
    """The state that lines of one file need: heads of tables, a matrix under way, known sources.

    Several streams may be in one file (pods, ranks): each has its table and its parted row.
    """

    def __init__(self, number: int, sink: Sink, width: int = 0) -> None:
        """width: the column at which lines were broken, 0 where they were not."""
        self.base = number << 40
        self.width = width
        self.sink = sink
        self.heads: dict[bytes, table.Head] = {}
        self.parts: dict[bytes, table.Broken] = {}
        self.matrix: smi.Matrix | None = None
        # By what precedes NCCL: the whole of it, which is one look-up where no time stands in it,
        # and its last two words, which are the source.
        self.prefixes: dict[bytes, Source] = {}
        self.sources: dict[bytes, Source | None] = {}
        self.hosts: set[bytes] = set()
        self.old = 0
        self.said = False
        self.host = ""
        """The host that a collector names beside a wrapped line."""

    def read(self, blocks: Iterator[list[bytes]], pieces: bool = False) -> None:
        """Read whole lines. `pieces` are all of the same line of the file."""
        sink, prefixes = self.sink, self.prefixes
        parse_hop, sink_hop, sink_local = hops.hop, sink.hop, sink.local
        total, nccl = self.base, 0
        for lines in blocks:
            if self.width:
                lines = wrapped.joined(lines, self.width)
            numbers: Sequence[int] = range(total + 1, total + 1 + len(lines))
            if pieces:
                numbers = [self.base + 1] * len(lines)
            elif any(line[:1] == b"{" or b"}" in line[-2:] for line in lines):
                lines, numbers = self.unwrapped(lines, numbers)
            total = max(numbers[-1], total) if numbers else total
            sink.block(b"\n".join(lines))
            for line, where in zip(lines, numbers, strict=True):
                at = line.find(_INFO)
                if at < 0:
                    if _WARN in line:
                        nccl += 1
                        self.warn(line, where)
                    elif line:
                        if len(line) < MAX_TEXT:
                            sink.text(line, where, self.host)
                        if len(line) < 4096:
                            self.other(line, where)
                    continue
                nccl += 1
                if len(line) > MAX_NCCL:
                    sink.unknown(_show(line), where)
                    continue
                by = prefixes.get(line[:at])
                if by is None:
                    by = self.by(line[:at], where)
                    if by is None:
                        if self.prose(line, at):
                            nccl -= 1
                        else:
                            sink.unknown(_show(line), where)
                        continue
                message = line[at + 10 :]
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
                    continue  # one line per call of a collective: the many of subsystem COLL
                self.info(by, message, where)
        sink.lines(total - self.base, nccl + self.old)
        self.old = 0

    def unwrapped(
        self, lines: list[bytes], numbers: Sequence[int]
    ) -> tuple[list[bytes], Sequence[int]]:
        """The lines that stand in JSON of a log's collector, and in which line each does."""
        found: list[bytes] = []
        places: list[int] = []
        for line, number in zip(lines, numbers, strict=True):
            inner = unwrap.line(line)
            if inner is None:
                found.append(line)
                places.append(number)
                continue
            texts, host = inner
            if host:
                self.host = host
            found += [_flat(text) for text in texts]
            places += [number] * len(texts)
        return found, places

    def by(self, prefix: bytes, where: int) -> Source | None:
        """The thread of a new prefix. Takes a parted row's words out of it."""
        words, end = table.parted(prefix)
        if words:
            lead = self.lead(prefix[: prefix.find(words[0])])
            self.part(lead, where, words)
            prefix = prefix[end:]
        elif self.parts:
            prefix = self.rest(prefix, where)
        key = prefix[prefix.rfind(b" ", 0, prefix.rstrip().rfind(b" ")) + 1 :].rstrip()
        try:
            by = self.sources[key]
        except KeyError:
            by = source(key) or source(prefix)
            if by and b'"' in key:  # a line of JSON: {"log":"node-a:1:2 [0] NCCL INFO ...
                by = source(key[key.rfind(b'"') + 1 :]) or by
            if len(self.sources) < 200_000:
                self.sources[key] = by
            if by and by.host and len(self.hosts) < 10_000:
                self.hosts.add(by.host.encode())
        if by is not None and not words and len(self.prefixes) < 50_000:
            self.prefixes[prefix] = by
        return by

    def prose(self, line: bytes, at: int) -> bool:
        """Whether `NCCL INFO` stands in a sentence or a command, not at a log line's place."""
        before = line[:at].strip()
        return before[-1:] in _QUOTES or before[:1] in _MARKS or b"grep" in before

    def part(self, lead: bytes, where: int, words: list[bytes]) -> None:
        known = self.parts.get(lead)
        if known is not None and known.words:
            self.sink.broken(lead, where)
        if len(self.parts) < _MAX_STREAMS:
            self.parts[lead] = table.Broken(words)

    def rest(self, prefix: bytes, where: int) -> bytes:
        """Where a log line comes after the middle of a parted row: the prefix without that."""
        glued = prefix.lstrip()
        for lead, broken in self.parts.items():
            if broken.words and lead:
                glued = _after(glued, lead)
        if not glued[:1].isdigit() or len(glued.split()) < 4:
            return prefix
        found = re.search(rb"(\S*):\d+:\d+ \[-?\d+\]", glued)
        if not found:
            return prefix
        word = found[1]
        host = max((h for h in self.hosts if word.endswith(h)), key=len, default=b"")
        numbers = glued[: found.end(1) - len(host)] if host else glued[: found.start(1)]
        for lead, broken in self.parts.items():
            # The next stream's prefix may stand between the numbers and the log line.
            piece = numbers.rstrip().removesuffix(lead)
            if broken.words and (row := broken.add(piece, self.heads.get(lead))):
                self.sink.bench(row, where, lead)
        return glued[len(numbers) :]

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
        elif word == b"MNNVL":
            return sink.fabric(by, _show(message), where)
        elif word == b"Connected":
            return sink.connected(by, message[10:].decode("utf-8", "replace"), where)
        elif (
            b" - Init " in message or b"- Init " in message or b" nNodes " in message
        ) or word == b"comm":
            if comm := init.init(message):
                return sink.init(by, comm, where)
        elif b" -> " in message and (trail := failures.step(message)):
            return sink.step(by, trail, where)
        elif b" Bytes -> Algo " in message:
            if choice := tuning_lines.choice(message):
                return sink.tuning(choice, where)
        elif message.startswith(
            (
                b"NET/",
                b"Bootstrap",
                b"Using network",
                b"GPU Direct",
                b"NCCL_",
                b"P2P ",
                b"Could not",
                b"Failed to",
            )
        ) or (b"NET plugin" in message):
            if net := network.network(message):
                return sink.network(by, net, where)
        elif message.startswith((b"NCCL version", b"RCCL version")) and (
            version := init.version(message)
        ):
            return sink.version(version, where)
        if word in _PLAIN or message.startswith(_PLAIN_BEGINNINGS) or _DUMPED.match(message):
            return None
        if b" coll channels, " in message or b" COMPLETE" in message or b" START" in message:
            return None
        if _PLACED.match(message):
            return None
        return sink.unknown(_show(message), where)

    def warn(self, line: bytes, where: int) -> None:
        at = line.find(_WARN)
        before = line[:at][-600:]
        words, end = table.parted(before)
        if words:
            self.part(self.lead(before[: before.find(words[0])]), where, words)
            before = before[end:]
        # `host:pid:tid [dev] file:line `, where anything may precede.
        place = before.rstrip().rfind(b" ")
        by = source(before[: place + 1]) or source(before)
        if by is None and self.prose(line, at):
            return
        self.sink.warning(by, _show(line[at + 10 :]), where, _show(before[place + 1 :])[:80])

    def lead(self, prefix: bytes) -> bytes:
        """The stream that a prefix belongs to; all beyond a number of them are one."""
        lead = stream(prefix) if prefix.strip() else b""
        return lead if lead in self.heads or len(self.heads) < _MAX_STREAMS else b""

    def other(self, line: bytes, where: int) -> None:
        """A line that is not NCCL's: nccl-tests' table, nvidia-smi's matrix, or the program's."""
        line = line.rstrip()
        if not line or (self.matrix is not None and smi.row(line.lstrip(), self.matrix)):
            return
        if line[-1] in _ROW_ENDS or any(word in line for word in _TABLE_WORDS):
            text = line.replace(b"|", b" ") if line.count(b"|") > 4 else line
            if (start := table.find(text)) >= 0:
                self.tabled(text[start:], self.lead(text[:start]), where)
                return
            if self.parts and self.piece(text, where):
                return
        if (b"NCCL version" in line or b"RCCL version" in line) and (version := init.version(line)):
            self.sink.version(version, where)
        if self.said and b"%|" not in line:  # torch prints NCCL's last error on the next line
            self.said = False
            if b"Exception raised from" not in line:  # then its last error is empty
                self.sink.warning(None, _show(_LEAD.sub(b"", line)), where)
        elif line.endswith(b"Last error:"):
            self.said = True
        elif (b"] INFO " in line or b" WARN " in line) and (found := _OLD.search(line)):
            self.before_2_3(found, where)
        elif b"GPU0" in line and (matrix := smi.head(line.lstrip())):
            self.matrix = matrix
            self.sink.matrix(matrix, where)
        elif ended := failures.ended(line):
            self.sink.ended(ended, where)
        elif b"_perf" in line and (collective := table.program(line)):
            self.sink.program(collective, where)

    def before_2_3(self, found: re.Match[bytes], where: int) -> None:
        """A line of NCCL 2.2 and older: `host:pid:tid [dev] INFO message`, without its name."""
        by = self.by(found[1], where)
        if by is None:
            return
        self.old += 1
        if found[2] == b"WARN":
            self.sink.warning(by, _show(found[3]), where)
        else:
            self.info(by, found[3], where)

    def tabled(self, text: bytes, lead: bytes, where: int) -> None:
        head = self.heads.get(lead)
        if text[:1].isdigit():
            if broken := self.parts.get(lead):
                if broken.words:
                    self.sink.broken(lead, where)
                broken.words = []
            if row := table.row(text, head):
                self.sink.bench(row, where, lead)
            return
        record = table.comment(text)
        if isinstance(record, table.Head):
            self.heads[lead] = record
        if record is not None:
            self.sink.bench(record, where, lead)

    def piece(self, text: bytes, where: int) -> bool:
        """The rest of a parted row, which a log line came into."""
        for lead, broken in self.parts.items():
            if not broken.words:
                continue
            before = len(broken.words)
            row = broken.add(_after(text, lead), self.heads.get(lead))
            if row:
                self.sink.bench(row, where, lead)
            if row or len(broken.words) != before:
                return True
        return False


def _after(text: bytes, lead: bytes) -> bytes:
    """A line of a stream without the stream's prefix, where it has it as it stands."""
    text = text.lstrip()
    return text[len(lead) :].lstrip() if lead and text.startswith(lead) else text


def _show(raw: bytes) -> str:
    text = raw[:300].decode("utf-8", "replace").strip()
    return "".join(c if c.isprintable() else " " for c in text)
