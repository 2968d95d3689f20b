"""NCCL's RAS client (`ncclras`), text and JSON: how far each rank of a communicator launched.

    #0-0 (c41e88d20b7a90f3) MISMATCH
      Communicator ranks have different AllGather operation counts
      30 ranks have launched up to operation 640
      2 ranks have launched up to operation 641
      Rank 12 -- GPU 4 managed by process 410032 on node 10.31.4.12
The ranks listed are those of the group that the line before them counts.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from evener.tools.analyze.evidence.lines import Line
from evener.tools.analyze.evidence.records import Absentee, Counts, Evidence

_SUMMARY = re.compile(r"^Job summary\s*$")
_COMM = re.compile(r"^\s*#(\d+-\d+) \(([0-9a-fx]{4,40})\)\s+([A-Z]+)")
_SECTION = re.compile(r"^\s*(INCOMPLETE|DEAD|TIMEOUT|MISMATCH)\s*$")
_DIFFER = re.compile(r"ranks have different (?:(\w+) )?(?:collective )?operation counts")
_UP_TO = re.compile(r"^\s*(\d+) ranks? ha(?:s|ve) launched up to operation (\d+)")
_ONE = re.compile(r"^\s*Rank (\d+) has launched up to operation (\d+)")
_RANK = re.compile(r"^\s*Rank (\d+) -- GPU")
_MISSING = re.compile(r"^\s*The missing ranks?: ([\d, -]+)")
_PROCESS = re.compile(r"^\s*Process (\d+) on node (\S+)(?: managing GPUs? ([\d,]+))?")
_DEAD = re.compile(r"(\d+) job process(?:es)? (?:is|are) considered dead")
_UNSEEN = re.compile(r"Missing communicator data from (\d+) (rank|job process)")
WORDS = (b"Job summary", b"launched up to operation", b"different", b"missing rank")


class Ras:
    """RAS reports in one file; each `Job summary` begins a new snapshot."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._on = False
        self._comm = ""
        self._counts: Counts | None = None
        self._size, self._count = 0, -1
        self._dead = False
        self._blank = 0

    @property
    def active(self) -> bool:
        """Whether every line matters now."""
        return self._on

    def line(self, line: Line) -> None:
        """Take any line."""
        text = line.text
        if _SUMMARY.match(text):
            self._on = True
            self._evidence.snapshots += 1
            self._evidence.read["ncclras"] += 1
            self._counts, self._comm, self._blank = None, "", 0
            return
        if not self._on and not _UP_TO.match(text) and not _DIFFER.search(text):
            return
        self._blank = 0 if text.strip() else self._blank + 1
        if self._blank > 40:
            self._on = False
        if found := _COMM.match(text):
            self._on, self._comm, self._counts = True, found[2], None
            self._dead = found[3] == "DEAD"
        elif found := _SECTION.match(text):
            self._dead = found[1] == "DEAD"
            self._comm = "" if found[1] in ("DEAD", "TIMEOUT") else self._comm
        elif found := _DIFFER.search(text):
            self._counts = Counts(
                self._comm, found[1] or "collective", Counter(), {}, line.where,
                max(self._evidence.snapshots, 1),
            )  # fmt: skip
            self._on = True
            self._evidence.add(self._counts)
        elif (found := _UP_TO.match(text)) and self._counts:
            self._size, self._count = int(found[1]), int(found[2])
            self._counts.counts[self._count] += self._size
        elif (found := _ONE.match(text)) and self._counts:
            self._counts.counts[int(found[2])] += 1
            self._name(int(found[2]), int(found[1]))
        elif (found := _RANK.match(text)) and self._counts and self._count >= 0:
            self._name(self._count, int(found[1]))
        elif _DEAD.search(text):
            self._dead = True
        elif found := _UNSEEN.search(text):
            self._evidence.add(Absentee(self._comm, (), text.strip(), False, line.where))
        elif found := _MISSING.match(text):
            ranks = tuple(
                n for part in found[1].split(",") if part.strip(" -") for n in _range(part.strip())
            )
            self._evidence.add(Absentee(self._comm, ranks, text.strip(), self._dead, line.where))
        elif found := _PROCESS.match(text):
            self._evidence.add(Absentee(self._comm, (), text.strip(), self._dead, line.where))

    def _name(self, count: int, rank: int) -> None:
        assert self._counts is not None
        named = self._counts.named
        if len(named.get(count, ())) < 10_000:
            named[count] = (*named.get(count, ()), rank)


def _range(part: str) -> range:
    low, _, high = part.partition("-")
    first = int(low)
    last = int(high) if high.strip().isdigit() else first
    return range(first, min(last, first + 10_000) + 1)


def is_ras(document: Any) -> bool:
    """Whether a JSON document is an answer of RAS."""
    return isinstance(document, dict) and isinstance(document.get("communicators"), list)


def report(document: dict[str, Any], evidence: Evidence, where: int) -> None:
    """Take a JSON answer of RAS."""
    evidence.snapshots += 1
    evidence.read["ncclras"] += 1
    for comm in document["communicators"][:10_000]:
        if not isinstance(comm, dict):
            continue
        name = str(comm.get("hash", ""))[:40]
        ranks = [r for r in _list(comm.get("ranks")) if isinstance(r, dict)]
        by_op: dict[str, dict[int, int]] = {}
        for rank in ranks:
            number = rank.get("rank")
            counts = rank.get("collective_counts")
            if not isinstance(number, int) or not isinstance(counts, dict):
                continue
            for op, value in counts.items():
                if isinstance(value, int):
                    by_op.setdefault(str(op)[:40], {})[number] = value
        for op, values in by_op.items():
            if len(set(values.values())) > 1:
                counter = Counter(values.values())
                named = {
                    count: tuple(sorted(r for r, v in values.items() if v == count))
                    for count in counter
                }
                evidence.add(Counts(name, op, counter, named, where, evidence.snapshots))
        for rank in _list(comm.get("missing_ranks")):
            if not isinstance(rank, dict) or not isinstance(rank.get("rank"), int):
                continue
            status = rank.get("status")
            dead = isinstance(status, dict) and bool(status.get("considered_dead"))
            host = f" on {rank['host']}" if isinstance(rank.get("host"), str) else ""
            text = f"rank {rank['rank']}{host}" + (
                " is considered dead" if dead else " does not answer"
            )
            evidence.add(Absentee(name, (rank["rank"],), text, dead, where))


def _list(value: Any) -> list[Any]:
    return value[:200_000] if isinstance(value, list) else []
