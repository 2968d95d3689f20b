"""Who wrote a line: `host:pid:tid [dev] NCCL INFO message`, whatever a launcher put before it.

NCCL writes `host:pid:tid [dev] NCCL LEVEL` (src/debug.cc); a WARN carries `file:line` between the
device and the level, and from 2.26 a time stamp before the host. mpirun --tag-output puts
`[1,0]<stdout>:` before it, srun -l `0: `, torchrun `[default0]:`. `[dev]` is the current CUDA
device of the thread that logs, which on proxy threads is another one: nothing is keyed by it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# The time stamps of log collectors have colons too: only `host:pid:tid [dev]` ends in a bracket.
_SOURCE = re.compile(rb"([^\s:<>\[\]]*):(\d{1,10}):(\d{1,10}) \[(-?\d{1,5})\]")
_LAUNCHER = re.compile(rb"^(?:\[\d+,\d+\](?:<std\w+>)?:|\[[a-z]+\d+\]:|\d+: )")
_ESCAPES = re.compile(rb"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """The thread that wrote a line. `host` is empty where NCCL could not find its name.

    Compared by identity: the reader makes one of each, and looks it up once a line.
    """

    host: str
    pid: int
    tid: int
    device: int


def source(prefix: bytes) -> Source | None:
    """The thread in what precedes ` NCCL `; None where there is none."""
    found = _SOURCE.search(prefix)
    if not found:
        return None
    host, pid, tid, device = found.groups()
    return Source(host.decode("utf-8", "replace"), int(pid), int(tid), int(device))


def strip_launcher(line: bytes) -> bytes:
    """The line without what mpirun, srun or torchrun put before it, and without colours."""
    if b"\x1b" in line:
        line = _ESCAPES.sub(b"", line)
    found = _LAUNCHER.match(line)
    return line[found.end() :] if found else line
