"""nccl-tests' text: devices, column heads, rows, averages; every version's columns.

    2.0              bytes N type op time(ms) algbw busbw res
    2.11 and older   ... algbw busbw  error        device [0x0f]
    2.13             ... algbw busbw #wrong        no `Group`
    2.15             device [0000:0f:00]
    2.19             `-I 1` adds i_min i_max i_p99 i_cv to each side, `-S 1` a time stamp at the end
The columns are read from the head where there is one, so a new column does not shift the others.
`error` is a relative difference, which is above zero in healthy runs; `#wrong` is a count.
Sizes are bytes, times microseconds, bandwidths GB/s (10^9).

A table may stand behind any prefix, in a table of Markdown, and a row may be parted by a log line:
`find` says where in a line it starts, `Broken` puts a parted row together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_DEVICE = re.compile(
    rb"#?\s*Rank\s+(\d{1,7})\s+(?:Group\s+(\d{1,7})\s+)?(?:Pid\s+(\d{1,10})\s+)?on\s+(\S*)\s+"
    rb"device\s+(\d{1,4}) \[(0x[0-9a-fA-F]{1,4}|[0-9a-fA-F:.]{2,16})\]\s*(.*)$"
)
_SUMMARY = re.compile(rb"#?\s*(Avg bus bandwidth|Out of bounds values)\s*:\s*(\S+)(?:\s+(\w+))?")
_STARTING = re.compile(rb"# Collective test (starting|concluded): (\S+)")
_OPTIONS = re.compile(rb"#? ?nThreads?:? \d+ nGpus:? \d+ minBytes")
_PROGRAM = re.compile(
    rb"\b(all_reduce|all_gather|reduce_scatter|broadcast|reduce|alltoallv?|gather|scatter|sendrecv"
    rb"|hypercube)_perf"
)
_LEFT = ("size", "count", "type", "redop", "root")
_SIDE = ("time", "algbw", "busbw", "wrong")
_NAMES = {"#wrong": "wrong", "bytes": "size", "N": "count", "op": "redop", "res": "error"}
_MINIMUM = 7  # size, count, type and one side
_TYPE = rb"(?:u?int\d{0,2}|u?char|half|float|double|bfloat16|bf16|f(?:p|loat)?8_?\w{0,5})"
_START = re.compile(
    rb"(?<![\w./\-\[])(?:\d{1,18}\s+\d{1,18}\s+" + _TYPE + rb"\s"
    rb"|#\s*(?:Rank\s+\d|nThread|Avg bus|Out of b|Collective test [sc]"
    rb"|(?:size|bytes)\s+(?:count|N)\s)"
    # Where an editor took the `#` away.
    rb"|Rank\s+\d+\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s|nThreads? \d+ nGpus \d+ minBytes"
    rb"|(?:Avg bus bandwidth|Out of bounds values)\s+:\s)"
)
_BARE_HEAD = re.compile(rb"size\s+count\s+type\s")
_REDOPS = rb"(?:sum|prod|max|min|avg|mulsum|none)"
_ROW_LEFT = re.compile(
    rb"(\d{1,18}\s+\d{1,18}\s+" + _TYPE + rb"(?:\s+" + _REDOPS + rb"(?:\s+(?:-1|\d{1,2}))?)?)\s*"
)


@dataclass(frozen=True, slots=True)
class Device:
    """One rank's GPU."""

    rank: int
    host: str
    pid: int
    device: int
    bus: str
    name: str


@dataclass(frozen=True, slots=True)
class Side:
    """One measurement; `wrong` is None where the values were not checked.

    `error` is the largest relative difference, of versions that print it instead of a count.
    """

    time_us: float
    algbw: float
    busbw: float
    wrong: float | None
    error: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One size. A side is None where the benchmark does not run it."""

    size: int
    count: int
    type: str
    redop: str
    root: int | None
    out_of_place: Side | None
    in_place: Side | None


@dataclass(frozen=True, slots=True)
class Head:
    """The names of the columns, left to right; `milliseconds` where the times are (2.0)."""

    columns: tuple[str, ...]
    milliseconds: bool = False


@dataclass(frozen=True, slots=True)
class Summary:
    """`average` (GB/s) or `out_of_bounds` (a count), as printed; `failed` where it says FAILED."""

    what: str
    value: float
    failed: bool = False


@dataclass(frozen=True, slots=True)
class Starting:
    """A test begins; `collective` is empty where the version does not name it."""

    collective: str
    options: bool = False
    """It is the line of options, which every process that runs by itself prints."""
    ends: bool = False
    """It ends: the name belongs to the table before it."""


@dataclass(slots=True)
class Broken:
    """A row whose beginning was read and whose end is elsewhere: a log line came in between."""

    words: list[bytes] = field(default_factory=list)

    def add(self, text: bytes, head: Head | None) -> Row | None:
        """Take the next piece; the row where it is whole now. Empties itself where it cannot be."""
        if not self.words:
            return None
        words = text.split()
        if not words or len(words) > 16 or not all(_value(word) for word in words):
            return None
        self.words += words
        wanted = len(head.columns) if head else 5 + 2 * len(_SIDE)
        if len(self.words) < wanted - 1:
            return None
        line, self.words = b" ".join(self.words), []
        return row(line, head)


def find(line: bytes) -> int:
    """Where a line of a table starts in `line`, behind any prefix; -1 where there is none."""
    found = _START.search(line)
    if found:
        return found.start()
    return found.start() if b"busbw" in line and (found := _BARE_HEAD.search(line)) else -1


def parted(prefix: bytes) -> tuple[list[bytes], int]:
    """The words of a row that a log line cuts off, and where in `prefix` the log line begins.

    `  1024  256  float  sum  -1node-a:1:2 [0] ` gives five words and the place of `node-a`.
    """
    found = _ROW_LEFT.search(prefix)
    if not found:
        return [], 0
    return found[1].split(), found.end()


def program(line: bytes) -> str:
    """The collective of a program that a line names (`./build/all_reduce_perf -b 8`), or empty."""
    found = _PROGRAM.search(line)
    return found[1].decode() if found else ""


def comment(line: bytes) -> Device | Head | Summary | Starting | None:
    """The record in a `#` line, None where it is none of these."""
    if found := _DEVICE.match(line):
        rank, _group, pid, host, device, bus, name = found.groups()
        return Device(
            int(rank),
            host.decode("utf-8", "replace"),
            int(pid or 0),
            int(device),
            bus.decode("ascii"),
            name.decode("utf-8", "replace").strip(),
        )
    if found := _SUMMARY.match(line):
        value = number(found[2])
        if value is None:
            return None
        if found[1].startswith(b"Avg"):
            return Summary("average", value)
        return Summary("out_of_bounds", value, found[3] == b"FAILED")
    if found := _STARTING.match(line):
        name = found[2].decode("utf-8", "replace")
        collective = program(found[2]) or name.removesuffix("_perf")
        return Starting(collective, ends=found[1] == b"concluded")
    if _OPTIONS.match(line):
        return Starting("", options=True)
    words = line.lstrip(b"# \t").split()
    if len(words) >= _MINIMUM and words[:3] in (
        [b"size", b"count", b"type"],
        [b"bytes", b"N", b"type"],
    ):
        names = (w.decode("ascii", "replace") for w in words)
        return Head(tuple(_NAMES.get(n, n) for n in names), words[0] == b"bytes")
    return None


def row(line: bytes, head: Head | None) -> Row | None:
    """A row under `head` (None: nccl-tests 2.x's columns), None where it is none."""
    words = line.split()
    if len(words) < _MINIMUM or not (words[0].isdigit() and words[1].isdigit()):
        return None
    if len(words[0]) > 18 or len(words[1]) > 18 or number(words[2]) is not None:
        return None
    columns = head.columns if head else _default(words)
    if head:
        words = _blanks(words, columns)
    left = next((i for i, name in enumerate(columns) if name == "time"), 0)
    if left < 3 or len(words) < left + 3:
        return None
    names = dict(zip(columns[:left], words[:left], strict=False))
    starts = [i for i, name in enumerate(columns) if name == "time"][:2]
    factor = 1e3 if head and head.milliseconds else 1.0
    sides = [_side(words, columns, start, factor) for start in starts]
    if all(side is None for side in sides):
        return None
    sides += [None] * (2 - len(sides))
    root = names.get("root", b"")
    return Row(
        size=int(words[0]),
        count=int(words[1]),
        type=names.get("type", b"").decode("ascii", "replace"),
        redop=names.get("redop", b"").decode("ascii", "replace"),
        root=int(root) if re.fullmatch(rb"-?\d{1,7}", root) else None,
        out_of_place=sides[0],
        in_place=sides[1],
    )


def number(word: bytes) -> float | None:
    """A finite, non-negative number, None where it is none."""
    try:
        value = float(word)
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None


def _value(word: bytes) -> bool:
    return word == b"N/A" or number(word) is not None


def _blanks(words: list[bytes], columns: tuple[str, ...]) -> list[bytes]:
    """The words with an empty one where the row leaves `redop` or `root` blank (alltoall does)."""
    for name in ("redop", "root"):
        if name not in columns or len(words) >= len(columns):
            continue
        at = columns.index(name)
        if at >= len(words):
            continue
        missing = len(columns) - len(words)
        # A row that was cut lacks words too; -1 is a root, and no time.
        is_one = (
            words[at].isalpha()
            if name == "redop"
            else missing % len(_SIDE) != 1 or words[at] == b"-1"
        )
        if not is_one:
            words = [*words[:at], b"", *words[at:]]
    return words


def _default(words: list[bytes]) -> tuple[str, ...]:
    """Columns by their number: versions differ in `redop` and `root` before the first time."""
    left = min(max(len(words) - 8, 3), 5)
    names = _LEFT[:left] if left != 4 else ("size", "count", "type", "root")
    if left == 4 and words[3].isalpha():
        names = _LEFT[:4]
    side = _SIDE
    if any(b"e-" in word for word in words[left + 3 :: 4]) or b"0e+00" in words:
        side = (*_SIDE[:3], "error")  # a relative difference
    return names + side * 2


def _side(words: list[bytes], columns: tuple[str, ...], start: int, factor: float) -> Side | None:
    values: dict[str, float | None] = {}
    for name, word in zip(columns[start : start + 4], words[start : start + 4], strict=False):
        values[name] = number(word)
    time, algbw, busbw = (values.get(name) for name in ("time", "algbw", "busbw"))
    if time is None or algbw is None or busbw is None:
        return None
    return Side(time * factor, algbw, busbw, values.get("wrong"), values.get("error"))
