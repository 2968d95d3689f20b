"""Gloo's threads at the end of a process.

A thread drops the tensors of a collective after the call that waited for it returned, and needs
Python's lock for that. One that asks for it when the interpreter ends aborts the process, whose
results were right. A group that nobody holds waits for its threads when it is destroyed; the others
are given until they rest, while the lock is there for them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
from pathlib import Path

# Seconds: for how long to see whether a thread does anything, and how long it may go on.
_LOOK, _LIMIT = 0.01, 2.0


def threads() -> dict[str, list[str]]:
    """The threads of Gloo's groups by number: the state of each, and how often it was switched."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (task / "comm").read_text().startswith("pt_gloo"):
                lines = (task / "status").read_text().splitlines()
                kept = [line for line in lines if line.startswith("State") or "_ctxt_" in line]
                found[task.name] = kept
    return found


def settle() -> None:
    """Wait until the threads rest, for 2 seconds at most."""
    deadline = time.monotonic() + _LIMIT
    before, now = None, threads()
    # At rest a thread sleeps and is never switched to; who waits for the lock looks for it often.
    while now and time.monotonic() < deadline:
        if now == before and all("sleeping" in lines[0] for lines in now.values()):
            break
        time.sleep(_LOOK)
        before, now = now, threads()


@functools.cache
def settle_at_exit() -> None:
    """Call `settle` when this process ends, once."""
    atexit.register(settle)
