"""nccl-tests' text: devices, column heads, rows, averages; every version's columns.

    2.11 and older   ... algbw busbw  error        device [0x0f]
    2.13             ... algbw busbw #wrong        no `Group`
    2.15             device [0000:0f:00]
    2.19             `-I 1` adds i_min i_max i_p99 i_cv to each side, `-S 1` a time stamp at the end
The columns are read from the head where there is one, so a new column does not shift the others.
Sizes are bytes, times microseconds, bandwidths GB/s (10^9).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_DEVICE = re.compile(
    rb"#\s+Rank\s+(\d{1,7})\s+(?:Group\s+(\d{1,7})\s+)?Pid\s+(\d{1,10}) on\s+(\S*)\s+device\s+"
    rb"(\d{1,4}) \[(0x[0-9a-fA-F]{1,4}|[0-9a-fA-F:.]{2,16})\]\s*(.*)$"
)
_SUMMARY = re.compile(rb"#\s*(Avg bus bandwidth|Out of bounds values)\s*:\s*(\S+)")
_STARTING = re.compile(rb"# Collective test starting: (\S+)")
_OPTIONS = re.compile(rb"# nThread \d+ nGpus \d+ minBytes")
_LEFT = ("size", "count", "type", "redop", "root")
_SIDE = ("time", "algbw", "busbw", "wrong")
_MINIMUM = 9  # size, count, type, and one side with a second time at the least


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
    """One measurement; `wrong` is None where the values were not checked."""

    time_us: float
    algbw: float
    busbw: float
    wrong: float | None


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
    """The names of the columns, left to right, `#wrong` and `error` both as `wrong`."""

    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """`average` (GB/s) or `out_of_bounds` (a count), as printed."""

    what: str
    value: float


@dataclass(frozen=True, slots=True)
class Starting:
    """A test begins; `collective` is empty where the version does not name it."""

    collective: str


def comment(line: bytes) -> Device | Head | Summary | Starting | None:
    """The record in a `#` line, None where it is none of these."""
    if found := _DEVICE.match(line):
        rank, _group, pid, host, device, bus, name = found.groups()
        return Device(
            int(rank),
            host.decode("utf-8", "replace"),
            int(pid),
            int(device),
            bus.decode("ascii"),
            name.decode("utf-8", "replace").strip(),
        )
    if found := _SUMMARY.match(line):
        value = number(found[2])
        if value is None:
            return None
        return Summary("average" if found[1].startswith(b"Avg") else "out_of_bounds", value)
    if found := _STARTING.match(line):
        return Starting(found[1].decode("utf-8", "replace").removesuffix("_perf"))
    if _OPTIONS.match(line):
        return Starting("")
    words = line.lstrip(b"# \t").split()
    if len(words) >= _MINIMUM and words[:3] == [b"size", b"count", b"type"]:
        names = (w.decode("ascii", "replace") for w in words)
        return Head(tuple("wrong" if n in ("#wrong", "error") else n for n in names))
    return None


def row(line: bytes, head: Head | None) -> Row | None:
    """A row under `head` (None: nccl-tests 2.x's columns), None where it is none."""
    words = line.split()
    if len(words) < _MINIMUM or not (words[0].isdigit() and words[1].isdigit()):
        return None
    if len(words[0]) > 18 or len(words[1]) > 18 or number(words[2]) is not None:
        return None
    columns = head.columns if head else _default(words)
    left = next((i for i, name in enumerate(columns) if name == "time"), 0)
    if left < 3 or len(words) < left + 3:
        return None
    names = dict(zip(columns[:left], words[:left], strict=False))
    starts = [i for i, name in enumerate(columns) if name == "time"][:2]
    sides = [_side(words, columns, start) for start in starts]
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


def _default(words: list[bytes]) -> tuple[str, ...]:
    """Columns by their number: versions differ in `redop` and `root` before the first time."""
    left = min(max(len(words) - 8, 3), 5)
    names = _LEFT[:left] if left != 4 else ("size", "count", "type", "root")
    return names + _SIDE * 2


def _side(words: list[bytes], columns: tuple[str, ...], start: int) -> Side | None:
    values: dict[str, float | None] = {}
    for name, word in zip(columns[start : start + 4], words[start : start + 4], strict=False):
        values[name] = number(word)
    time, algbw, busbw = (values.get(name) for name in ("time", "algbw", "busbw"))
    if time is None or algbw is None or busbw is None:
        return None
    return Side(time, algbw, busbw, values.get("wrong"))
