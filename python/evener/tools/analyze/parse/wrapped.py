"""Lines that a terminal or a form broke at a fixed width, put together again.

    [rank6]:[E429 13:55:49.384 ProcessGroupNCCL.cpp:1743] [PG ID 0 Rank 6] ProcessGroupNCCL'
    s watchdog got stuck for 480 seconds without making progress in monitoring enqueued ...

Only lines that begin as a logger begins them are continued, and only in a file whose longest lines
end all at one column, in the middle of a sentence. Tables have equal lines too, and are left alone.
"""

from __future__ import annotations

import re

_START = re.compile(
    rb"\s{0,4}(?:\d{1,5}: |\([^)]{1,80}\) |\[\d+,\d+\]<std\w+>: ?)?"
    rb"(?:\[(?:[Rr]ank|default) ?\d{1,6}\]:|\[?[EFWI](?:\d{3,4} | [A-Z])"
    rb"|[\w.-]*:\d{1,10}:\d{1,10} \["
    rb"|\[(?:Rank|PG) |\d{4}-\d\d-\d\d[T ])"
)
_SENTENCE_ENDS = b".)!]:'\"="
_LEAST, _MOST = 60, 400
_FEW = 4
_PIECES = 60


def width(head: bytes) -> int:
    """The column at which the lines of a file are broken, 0 where they are not."""
    lines = head.split(b"\n")[:-1]
    lengths = [len(line.rstrip(b"\r")) for line in lines]
    longest = max(lengths, default=0)
    if not _LEAST <= longest <= _MOST or lengths.count(longest) < _FEW:
        return 0
    full = [
        (line.rstrip(b"\r"), after)
        for line, length, after in zip(lines, lengths, lines[1:], strict=False)
        if length == longest and not line.rstrip(b"\r").endswith(b"  ")
    ]
    begun = [(line, after) for line, after in full if _START.match(line)]
    cut = [
        1 for line, after in begun
        if after.strip() and not _START.match(after) and line[-1:] not in _SENTENCE_ENDS
    ]  # fmt: skip
    return longest if len(begun) >= _FEW and len(cut) >= 0.7 * len(begun) else 0


def joined(lines: list[bytes], width: int) -> list[bytes]:
    """The same number of lines: what continues a line is in it, and empty where it stood."""
    found = list(lines)
    at = 0
    while at < len(found):
        begin, line = at, found[at].rstrip(b"\r")
        at += 1
        if len(line) != width or not _START.match(line):
            continue
        parts = [line]
        while (
            at < len(found) and len(parts) < _PIECES
            and len(parts[-1]) == width and not parts[-1].endswith(b"  ")
            and not _START.match(found[at])
        ):  # fmt: skip
            parts.append(found[at].rstrip(b"\r"))
            found[at] = b""
            at += 1
        found[begin] = b"".join(parts).rstrip()
    return found
