"""Why a job failed: the first error in all that its processes wrote, in one line.

A launcher writes last, so the end of the text is its summary: torchrun's own traceback and a table
that names the rank that failed first, but not its error.
"""

from __future__ import annotations

import re
from pathlib import Path

_FIRST = re.compile(r"Root Cause.*?rank +: (\d+).*?exitcode +: (-?\d+)", re.DOTALL)
_MARK = re.compile(r"\[rank(\d+)\]: ")  # torch's, before each line of a rank's traceback
_HEAD = "Traceback (most recent call last):"
_PLACE = re.compile(r'  File "(.+)", line (\d+)')
_TOLD = re.compile(r"(\w+: )?[Ee]rror: ")


def cause(text: str) -> str:
    """The first error in `text` and where it was raised; empty where `text` has none.

    Where torchrun names the rank that failed first and torch has marked its lines, it is the first
    of that rank: a peer that lost its connection may have written before it.
    """
    first = _FIRST.search(text)
    lines = text.splitlines()
    own = [line for line in lines if first and line.startswith(f"[rank{first[1]}]: ")]
    inside, place = False, ""
    for line in own or lines:
        rank, line = (mark[1], line[mark.end() :]) if (mark := _MARK.match(line)) else ("", line)
        if line == _HEAD:
            inside = True
        elif inside and (at := _PLACE.match(line)):
            place = f" ({Path(at[1]).name}:{at[2]})"
        elif _TOLD.match(line) or (inside and line and not line.startswith(" ")):
            if "ChildFailedError" in line:
                break
            return (f"rank {rank}: " if rank else "") + line[:300] + place
    return f"rank {first[1]} ended with status {first[2]}" if first else ""
