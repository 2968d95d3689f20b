"""Who wrote a line: `host:pid:tid [dev] NCCL INFO message`, whatever something put before it.

NCCL writes `host:pid:tid [dev] NCCL LEVEL` (src/debug.cc); a WARN carries `file:line` between the
device and the level, and from 2.26 a time stamp before the host. What launchers and collectors of
logs put before that is not listed here: the source is looked for at the end of what precedes
`NCCL`, so any prefix does. `[dev]` is the current CUDA device of the thread that logs, which on
proxy threads is another one: nothing is keyed by it.

Reports that people wrote by hand often lack the source: `[3] NCCL INFO ...`. Such lines belong to
a process without a name, one per device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# `<...>` is a host whose name was blacked out. The time stamps of log collectors have colons too:
# only `host:pid:tid [dev]` ends in a bracket.
_SOURCE = re.compile(rb"(<[\w .-]{1,80}>(?=:\d)|[\w.-]*):(\d{1,10}):(\d{1,10}) \[(-?\d{1,5})\]")
_STREAM = re.compile(rb"<std(?:out|err)>$")
_NAMELESS = re.compile(rb"^\s*(?:[\w.-]+ )?\[(\d{1,5})\]\s*$")
_LINKS = re.compile(rb"\[([^\]\s]{1,200})\]\(https?://[^)\s]{1,300}\)")
_ESCAPES = re.compile(
    rb"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[=>()][0-9A-Z]?)"
)
_ISO = re.compile(
    rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:\d\d|[+-]\d{4}(?!\d))?"
)
_TIMES = re.compile(
    rb"\d{4}[-/]\d\d[-/]\d\d[T ]?|\d{1,2}:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
    rb"|\b\d+\.\d{2,}\b"
    rb"|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)\b"
)


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """The thread that wrote a line. `host` is empty where NCCL could not find its name.

    Compared by identity: the reader makes one of each, and looks it up once per line.
    """

    host: str
    pid: int
    tid: int
    device: int


def source(prefix: bytes) -> Source | None:
    """The thread in what precedes `NCCL`; None where there is none."""
    if b"T" in prefix:  # a time may stand right before the host, without a space
        prefix = _ISO.sub(b" ", prefix)
    found = None
    for match in _SOURCE.finditer(prefix):
        found = match
    if found:
        host, pid, tid, device = found.groups()
        if _STREAM.match(host):
            host = b""
        return Source(host.decode("utf-8", "replace"), int(pid), int(tid), int(device))
    if nameless := _NAMELESS.match(prefix):
        device = int(nameless[1])
        return Source("", device, device, device)
    return Source("", -1, -1, -1) if not prefix.strip() else None


def plain(data: bytes) -> bytes:
    """Text as it was printed: without colours and what else moves a terminal's cursor, without
    links that a forum made of file names and addresses, and with its own angle brackets."""
    if b"\x1b" in data:
        data = _ESCAPES.sub(b"", data)
    if b"](http" in data:
        data = _LINKS.sub(rb"\1", data)
    if b"&gt;" in data:
        data = data.replace(b"&lt;", b"<").replace(b"&gt;", b">").replace(b"&amp;", b"&")
    return data


def stream(lead: bytes) -> bytes:
    """Which of several streams in one file a line belongs to: its prefix without the time."""
    return b" ".join(_TIMES.sub(b"", lead[:200]).split())
