"""Who wrote a line that is not NCCL's: rank, host and time in whatever a launcher put before it.

[rank3]:[E1206 14:30:02.000835987 ProcessGroupNCCL.cpp:616] ...      torchrun, glog
[1,3]<stderr>:...          mpirun --tag-output
3: ...                     srun -l: the task, which is no rank where torchrun is the task
[default3]: ...            torchrun --tee: the local rank
(Worker pid=214, ip=10.0.0.1) ...      Ray
[pod/worker-0/pytorch] ...  kubectl logs --prefix
2026-05-18T03:12:44.120Z stderr F ...  the container runtime's file
May 18 03:12:44 node-7 kernel: ...     syslog, journalctl
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MONTHS = {
    name: number
    for number, name in enumerate(
        ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"], 1
    )
}
_TIME = r"(\d{1,2}):(\d\d):(\d\d(?:[.,]\d{1,9})?)"
_LEADS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("rank", re.compile(r"\[[Rr]ank ?(\d{1,6})\]:? ?")),
    ("rank", re.compile(r"[Rr]ank ?(\d{1,6}): ")),
    ("local", re.compile(r"\[default(\d{1,5})\]: ?")),
    ("mpi", re.compile(r"\[\d{1,9},(\d{1,6})\]<std(?:out|err)>: ?")),
    ("pod", re.compile(r"\[pod/([^/\]]{1,253})/[^\]]{0,253}\] ?")),
    ("actor", re.compile(r"\((?:[\w.:-]{1,80} )?(?:rank=(\d{1,6}),? ?)?pid=(\d{1,10})(?:, "
                         r"ip=([\d.]+))?\) ?")),
    ("cri", re.compile(rf"(\d{{4}})-(\d\d)-(\d\d)T{_TIME}(?:Z|[+-]\d\d:?\d\d)? std(?:out|err) "
                       rf"[FP] ")),
    ("iso", re.compile(rf"\[?(\d{{4}})[-/](\d\d)[-/](\d\d)[T_ ]{_TIME} ?(?:Z|UTC"
                       rf"|[+-]\d\d:?\d\d)?\]?:? ?")),
    ("long", re.compile(rf"\[(?:\w{{3}}) (\w{{3}}) +(\d{{1,2}}) {_TIME} \d{{4}}\] ?")),
    ("syslog", re.compile(rf"(\w{{3}}) +(\d{{1,2}}) {_TIME} ([\w.-]{{1,80}}) "
                          rf"(?:[\w./-]{{1,60}}(?:\[\d+\])?: ?)")),
    ("uptime", re.compile(r"(?:kern  :\w+ *: )?\[ *\d{1,9}\.\d{6}\](?:\[ *T\d+\])? ?")),
    ("task", re.compile(r"(\d{1,5}): (?=\S)")),
)  # fmt: skip
_GLOG = re.compile(rf"\[?([A-Z])(\d{{3,4}}) {_TIME}(?: +\d+)? ([\w./-]{{1,200}}):(\d+)\] ?")


@dataclass(slots=True)
class Line:
    """One line without its prefixes."""

    text: str
    where: int
    raw: str = ""
    """The whole line."""
    rank: int = -1
    local: int = -1
    task: int = -1
    host: str = ""
    pid: int = -1
    time: float = -1.0
    """Seconds since the year's start, as the line's own clock has it; -1 where it has none."""
    stream: str = ""
    """The rank, or the prefixes without their times: equal for lines of one stream."""


def split(text: str, where: int) -> Line:
    """Take the known prefixes off a line."""
    line = Line(text, where, text)
    position, parts = 0, []
    for _ in range(6):
        while position < len(text) and text[position] in " \t" and not _indented(text, position):
            position += 1
        for kind, pattern in _LEADS:
            found = pattern.match(text, position)
            if found is None or (kind in ("task", "rank") and _taken(line, kind)):
                continue
            if kind not in ("cri", "iso", "long", "uptime", "syslog"):
                parts.append(found[0].strip())
            _put(line, kind, found)
            position = found.end()
            break
        else:
            break
    line.text = text[position:]
    line.stream = f"rank {line.rank}" if line.rank >= 0 else " ".join(parts)
    if (glog := _GLOG.match(line.text)) and line.time < 0:
        day = glog[2]
        line.time = _seconds(int(day[:-2]), int(day[-2:]), glog[3], glog[4], glog[5])
    return line


def _indented(text: str, position: int) -> bool:
    """Whether the space here is the text's own (a traceback's), not a prefix's."""
    return text.startswith("  ", position)


def _taken(line: Line, kind: str) -> bool:
    return line.rank >= 0 if kind == "rank" else line.task >= 0 or line.rank >= 0


def _put(line: Line, kind: str, found: re.Match[str]) -> None:
    if kind in ("rank", "mpi"):
        line.rank = int(found[1])
    elif kind == "local":
        line.local = int(found[1])
    elif kind == "task":
        line.task = int(found[1])
    elif kind == "pod":
        line.host = found[1]
    elif kind == "actor":
        line.rank = int(found[1]) if found[1] else line.rank
        line.pid = int(found[2])
        line.host = line.host or found[3] or ""
    elif kind in ("cri", "iso"):
        line.time = _seconds(int(found[2]), int(found[3]), *found.groups()[3:6])
    elif kind == "long":
        line.time = _seconds(_MONTHS.get(found[1].lower(), 1), int(found[2]), *found.groups()[2:5])
    elif kind == "syslog":
        line.time = _seconds(_MONTHS.get(found[1].lower(), 1), int(found[2]), *found.groups()[2:5])
        line.host = line.host or found[6]


def _seconds(month: int, day: int, hour: str, minute: str, second: str) -> float:
    days = month * 31 + day
    return days * 86400 + int(hour) * 3600 + int(minute) * 60 + float(second.replace(",", "."))
