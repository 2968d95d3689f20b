"""Python tracebacks, one stream at a time, behind whatever prefix.

A traceback begins at `Traceback (most recent call last):` and ends at the first line of its stream
that is not indented and not part of it: `package.Error: text`. What follows `During handling` or
`direct cause` belongs to the same event: the first exception of such a chain is its cause. What
precedes the first line may be unknown here (`trainer-1  | `, `worker-0: [rank3]: `, `msg="`): then
the lines that begin with the same, but for its numbers, are its stream.
"""

from __future__ import annotations

import re
from dataclasses import replace

from evener.tools.analyze.evidence.lines import Line
from evener.tools.analyze.evidence.records import GLOO, Evidence, Raised, Wait

HEAD = "Traceback (most recent call last)"
_FRAME = re.compile(r'^\s*File "([^"]{1,400})", line (\d{1,7})(?:, in (.{0,120}))?')
_ERROR = re.compile(
    r"^([A-Za-z_][\w.]{0,160}?(?:Error|Exception|Exit|Interrupt|Warning|Timeout|Abort\w*"
    r"|\w)): ?(.*)$"
)
_BARE = re.compile(r"^([A-Za-z_][\w.]{0,160}(?:Error|Exception|Exit|Interrupt|Timeout))\s*$")
_CHAIN = (
    "During handling of the above exception",
    "The above exception was the direct cause",
)
_LONE = re.compile(r"^(?:[a-z_][\w.]{0,120}\.)?([A-Z]\w{0,60}(?:Error|Exception)): ?(\S.*)$")
LONE = (b"Error: ", b"Exception: ", b"Exception ignored in", b"terminate called", b"what(): ")
_THROWN = re.compile(r"^terminate called after throwing an instance of '([\w:]{1,120})'")
_WHAT = re.compile(r"^\s*what\(\): {1,3}(\S.*)$")
# What the end of another rank makes torch's own threads throw.
_AFTER = re.compile(r"[Ww]atchdog|NCCL|[Cc]onnection|[Tt]imed? ?out|CUDA error")
CHAINS = tuple(text.encode() for text in _CHAIN)
_LIBRARY = re.compile(
    r"(?:site|dist)-packages/|/lib/python\d|<frozen |<string>|/torchrun$|^torch/|^importlib"
)
_TIMED_OUT = re.compile(r"Timed out waiting (\d{1,12}) ?ms for (?:recv|send|a) ")
_STREAMS = 4096
_LEADS = 64
_LEAD = 200
_NUMBERS = re.compile(r"\d+")
_RANK = re.compile(r"\[[Rr]ank ?(\d{1,6})\]")
_FRAMES = 400


class _Open:
    """A traceback under way in one stream."""

    __slots__ = (
        "chained", "deepest", "ended", "frames", "ignored", "inner", "keys", "line", "own", "where"
    )  # fmt: skip

    def __init__(self, where: int, line: Line) -> None:
        self.where, self.line, self.keys = where, line, {line.stream}
        self.inner = self.ignored = False
        self.own, self.deepest = "", ""
        self.frames = 0
        self.chained = False
        self.ended = False


class Traces:
    """Tracebacks of all streams of one file."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._open: dict[str, _Open] = {}
        self._done: dict[str, Raised] = {}
        self._leads: dict[str, tuple[re.Pattern[str], int]] = {}
        """Unknown prefixes: how lines with them begin, and the rank that they name."""
        self._thrown: dict[str, str] = {}
        """The type of the C++ exception of which each stream says next what it was."""
        self._ignored: str | None = None
        """The stream whose next traceback Python itself ignores, as at its exit."""

    @property
    def active(self) -> bool:
        """Whether a traceback is under way, so that every line matters."""
        return bool(self._open)

    def line(self, line: Line, raw: str) -> bool:
        """Take a line; whether it belongs to a traceback."""
        at = raw.find(HEAD)
        if at >= 0:
            self._begin(line, raw, at)
            return True
        line = self._bare(line, raw)
        one = self._open.get(line.stream)
        if one is None:
            if line.text.startswith("Exception ignored in"):
                self._ignored = line.stream
            self._lone(line)
            return self._chain(line)
        text = line.text
        if frame := _FRAME.match(text):
            one.frames += 1
            place = f"{frame[1]}:{frame[2]}"
            if one.frames <= _FRAMES:
                one.deepest = place
                if not _LIBRARY.search(frame[1]):
                    one.own = place
            return True
        if not text.strip() or text.startswith((" ", "\t", "[")):
            return bool(text.strip())
        found = _ERROR.match(text) or _BARE.match(text)
        if not found:
            return False  # another line that came between
        for key in one.keys:
            self._open.pop(key, None)
        self._end(one, line, found)
        return True

    def _lone(self, line: Line) -> None:
        """The last line of a traceback whose head is not here, or C++'s last words."""
        if (found := _THROWN.match(line.text)) and len(self._thrown) < _STREAMS:
            self._thrown[line.stream] = found[1]
        elif (found := _WHAT.match(line.text)) and (name := self._thrown.pop(line.stream, "")):
            known = any(one.rank == line.rank for one in self._evidence.raised)
            if not known and not _AFTER.search(found[1]):
                self._evidence.add(
                    Raised(line.rank, line.host, name, found[1].strip()[:400], line.where,
                           line.time, "", "", line.task, line.stream)
                )  # fmt: skip
        if (found := _LONE.match(line.text)) and len(self._evidence.lone) < _STREAMS:
            name = line.text[: found.end(1)]
            self._evidence.lone.append(
                Raised(line.rank, line.host, name, found[2].strip()[:400], line.where, line.time,
                       "", "", line.task, line.stream)
            )  # fmt: skip

    def _begin(self, line: Line, raw: str, at: int) -> None:
        if len(self._open) >= _STREAMS:
            self._open.pop(next(iter(self._open)))
        one = _Open(line.where, line)
        one.inner = raw[:at].endswith("Original ")
        one.ignored, self._ignored = line.stream == self._ignored, None
        self._open[line.stream] = one
        lead = raw[:at].removesuffix("Original ")
        unknown = line.text[: max(line.text.find(HEAD), 0)].removesuffix("Original ")
        if unknown.strip() and len(lead) <= _LEAD and (len(self._leads) < _LEADS):
            # Times change from line to line, and names with numbers do not: both are allowed for.
            parts = _NUMBERS.split(lead)
            told = _RANK.findall(lead)
            rank = int(told[-1]) if told else line.rank
            key = f"rank {rank}" if rank >= 0 else lead
            begins = re.compile(r"\d+".join(re.escape(part) for part in parts))
            if rank >= 0 or key not in self._leads:
                self._leads.setdefault(key, (begins, rank))
            one.keys.add(key)
            one.line = replace(line, rank=rank, stream=key)
            self._open[key] = one

    def _bare(self, line: Line, raw: str) -> Line:
        """A line without an unknown prefix that a traceback began with."""
        for key, (begins, rank) in self._leads.items():
            if key in self._open and (found := begins.match(raw)):
                told = _RANK.findall(found[0])
                if told and int(told[-1]) != rank:
                    continue
                text = raw[found.end() :]
                if found[0].count('"') % 2:  # a quoted field, whose own quotes are doubled
                    text = text.replace('\\"', '"').replace('""', '"').removesuffix('"')
                return replace(line, text=text, rank=rank, stream=key)
        return line

    def _chain(self, line: Line) -> bool:
        known = self._done.get(line.stream)
        if known is not None and line.text.startswith(_CHAIN):
            self._done[line.stream] = known
            known.stream = "chain"
            return True
        return False

    def _end(self, one: _Open, line: Line, found: re.Match[str]) -> None:
        before = self._done.get(line.stream)
        if one.ignored:
            return
        if one.inner and before is not None and before.text.startswith("Caught "):
            # A data loader's worker: what it raised says more than that it did.
            before.text = (
                f"{found[2].strip() if found.re is _ERROR else ''} (in a worker of the data loader)"
            )
            before.name, before.line = found[1], one.own or before.line
            return
        if before is not None and before.stream == "chain":
            before.stream = line.stream  # the first of a chain is what began it
            # A wrapper of the same event says less; only what is more specific is taken over.
            return
        text = found[2] if found.re is _ERROR else ""
        rank = one.line.rank if one.line.rank >= 0 else line.rank
        raised = Raised(
            rank,
            one.line.host or line.host,
            found[1],
            text.strip()[:400],
            line.where,
            one.line.time if one.line.time >= 0 else line.time,
            one.own,
            one.deepest,
            one.line.task,
            line.stream,
        )
        self._evidence.add(raised)
        if rank >= 0 and (late := _TIMED_OUT.search(raised.text)):
            self._evidence.add(
                Wait(rank, line.where, waited_ms=int(late[1] or -1), group=GLOO, time=raised.time)
            )
        if raised.rank >= 0:
            self._evidence.ranks.setdefault(raised.rank, line.where)
        self._done[line.stream] = raised
