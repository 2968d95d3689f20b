"""PyTorch's watchdog and heartbeat texts, and other reports that a rank waits for others.

    [rank3]:[E... ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout:
      WorkNCCL(SeqNum=8042, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=1800000) ran for
      1800023 milliseconds before timing out.
    [rank3]:[E...] [PG ID 0 PG GUID 0(default_pg) Rank 3]  failure detected by watchdog at work
      sequence id: 8042 PG status: last enqueued work: 8042, last completed work: 8041
`[rank3]:` is the global rank; `Rank 3` in brackets counts within the group. A rank says two to six
lines of the same wait: they are one record.
"""

from __future__ import annotations

import re

from evener.tools.analyze.evidence.lines import Line
from evener.tools.analyze.evidence.records import Beat, Desync, Evidence, Raised, Wait

_CAUGHT = re.compile(
    r"(?:\[Rank (\d{1,6})\] )?(?:Watchdog caught |Caught )?(?:[Cc]ollective "
    r"operation timeout): WorkNCCL\((.{0,600}?)\)? ran for (\d{1,12}) milliseconds"
)
_SHORT = re.compile(
    r"(?:\[Rank (\d{1,6})\] )?(?:Watchdog caught |Caught )?(?:[Cc]ollective "
    r"operation timeout): WorkNCCL\((.{0,600})"
)
_FIELD = re.compile(r"(\w{1,20})(?:\(ms\))?=(\[[^\]]{0,200}\]|[^,)\s]{1,60})")
_GROUP = re.compile(
    r"\[PG (?:ID )?([\w-]{1,40})(?: PG GUID ([\w-]{1,60}))? ?(?:\(([^)]{0,80})\))? Rank "
    r"(\d{1,6})\]"
)
_STATUS = re.compile(
    r"(?:work(?: sequence id)?: (\d{1,12})\W.{0,60}?)?[Ll]ast enqueued (?:NCCL )?work: (-?\d{1,12})"
    r"(?:, last started (?:NCCL )?work: -?\d{1,12})?, last completed (?:NCCL )?(?:work: ?)?"
    r"(-?\d{1,12})"
)
_BEHIND = re.compile(
    r"- \[([\d, ]{1,2000})\] finished collective #(\d{1,12}), but didn't join collective "
    r"#(\d{1,12})"
)
_BARRIER = re.compile(
    r"[Rr]anks? ([\d, ]{1,400}?) failed to (?:pass|reach) monitoredBarrier(?: in (\d{1,12}) ms)?"
)
_DETAIL = re.compile(
    r"Detected mismatch between collectives on ranks\. Rank (\d{1,6}) is running collective: "
    r"(?:CollectiveFingerPrint\()?(.{0,300}?)\)?, but Rank (\d{1,6}) is running collective: "
    r"(?:CollectiveFingerPrint\()?(.{0,300}?)\)?\.?(?:Collectives differ|$)"
)
_REACHED = re.compile(
    r"[Rr]ank (\d{1,6}) successfully reached monitoredBarrier.{0,80}from rank (\d{1,6})"
)
_THREW = re.compile(
    r"(?:\[Rank (\d{1,6})\] )?(?:[Pp]rocess group|NCCL) watchdog thread terminated with exception: "
    r"(?:\[Rank \d{1,6}\] )?((?:CUDA|HIP) error: .{1,300})"
)
_UNIQUE = re.compile(
    r"\[\d{1,6}\] is setting up NCCL communicator and retr\w+ ncclUniqueId from \[(\d{1,6})\]"
    r".{0,300}(?:[Tt]imeout|timed out)"
)
_DEEP_EP = re.compile(r"DeepEP timeout.{0,120}?\brank ?[=:] ?(\d{1,6})")
_STUCK = re.compile(r"watchdog got stuck for (\d{1,9}) seconds")
_OUTSTANDING = re.compile(r"workMetaList_\.size\(\) ?= ?(\d{1,9})")
_NEW = re.compile(r"Operation timed out after (\d{1,12}) ?ms")
_NEW_ABORT = re.compile(r"Aborting process on rank (\d{1,6}) due to (timeout|error) - ")
_STALLED = re.compile(r"\[missing ranks: ?([\d, ]{1,400})\]")
_READY = re.compile(r"([\w./-]{1,200}) \[ready ranks: ?([\d, ]{1,400})\]")
_LISTED = re.compile(r".*?\b(\d{1,6}): ?\[[^\]]")
WORDS = (
    b"atchdog", b"WorkNCCL(", b"ast enqueued", b"didn't join collective", b"monitoredBarrier",
    b"Detected mismatch between", b"workMetaList_", b"Operation timed out after",
    b"Aborting process on rank", b"missing ranks:", b"Missing ranks:", b"Stalled ranks:",
    b"ready ranks:", b"DeepEP timeout", b"retrieving nccl", b"retreiving nccl",
)  # fmt: skip


class Watchdog:
    """Waits of ranks, merged over the lines that tell of one."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._waits: dict[tuple[int, int, str], Wait] = {}
        self._last: dict[int, Wait] = {}
        self._list = 0

    def line(self, line: Line) -> None:
        """Take one line that has one of WORDS."""
        text = line.text
        group = _GROUP.search(text)
        if found := _CAUGHT.search(text) or _SHORT.search(text):
            self._caught(line, found, group)
        if found := _STATUS.search(text):
            self._status(line, found, group)
        if found := _OUTSTANDING.search(text):
            self._beat(line, int(found[1]), group)
        elif found := _STUCK.search(text):
            self._beat(line, -1, group, int(found[1]))
        if found := _BEHIND.search(text):
            self._evidence.add(
                Desync("behind", _numbers(found[1]), text.strip(), line.where, int(found[2]))
            )
        elif found := _UNIQUE.search(text):
            op = "the set-up of a communicator"
            self._evidence.add(Desync("behind", (int(found[1]),), text[:300], line.where, op=op))
        elif found := _THREW.search(text):
            self._threw(line, found, group)
        elif found := _DEEP_EP.search(text):
            self._wait(line, int(found[1]), -1, "DeepEP", local=True).op = "a DeepEP kernel"
        elif found := _REACHED.search(text):
            came = (int(found[1]), int(found[2]))
            self._evidence.add(Desync("reached", came, text[:300], line.where, op="BARRIER"))
        elif found := _BARRIER.search(text):
            ranks = _numbers(found[1])
            self._evidence.add(Desync("behind", ranks, text[:300], line.where, op="BARRIER"))
        elif found := _DETAIL.search(text):
            self._evidence.add(
                Desync(
                    "mismatch",
                    (int(found[1]), int(found[3])),
                    text[:400],
                    line.where,
                    op=found[2].strip(),
                    others=found[4].strip(),
                )
            )
        elif found := _STALLED.search(text):
            self._stalled(_numbers(found[1]), line)
        for found in _READY.finditer(text):
            self._evidence.add(Desync("ready", _numbers(found[2]), found[1], line.where))
        if text.strip() in ("Missing ranks:", "Stalled ranks:"):
            self._list = 1000
        elif self._list:
            self._list -= 1
            if found := _LISTED.match(line.raw):
                self._stalled((int(found[1]),), line)
            else:
                self._list = 0
        if (found := _NEW.search(text)) and line.rank >= 0:
            self._wait(line, line.rank, -1, "").waited_ms = int(found[1])
        elif (found := _NEW_ABORT.search(text)) and found[2] == "timeout":
            self._wait(line, int(found[1]), -1, "")

    @property
    def active(self) -> bool:
        """Whether a list of ranks is under way, so that every line matters."""
        return self._list > 0

    def _stalled(self, ranks: tuple[int, ...], line: Line) -> None:
        self._evidence.add(Desync("stalled", ranks, line.text[:300], line.where))

    def _threw(self, line: Line, found: re.Match[str], group: re.Match[str] | None) -> None:
        """An error of the GPU that the watchdog met: this rank's own, no wait for others."""
        rank, local = self._rank(line, found[1], group)
        name, text = found[2].split(": ", 1)
        self._evidence.add(
            Raised(-1 if local else rank, line.host, name, text, line.where, line.time, "")
        )
        if rank >= 0 and not local:
            self._evidence.ranks.setdefault(rank, line.where)

    def _caught(self, line: Line, found: re.Match[str], group: re.Match[str] | None) -> None:
        fields = dict(_FIELD.findall(found[2]))
        rank, local = self._rank(line, found[1], group)
        if rank < 0:
            return
        name = _name(group)
        wait = self._wait(line, rank, _number(fields.get("SeqNum", "")), name, local)
        wait.op = wait.op or fields.get("OpType", "")
        wait.numel_in = max(wait.numel_in, _number(fields.get("NumelIn", "")))
        wait.numel_out = max(wait.numel_out, _number(fields.get("NumelOut", "")))
        if "TensorShape" in fields and wait.numel_in < 0:
            wait.numel_in = _product(fields["TensorShape"])
        if found.re is _CAUGHT:
            wait.waited_ms = max(wait.waited_ms, int(found[3]))

    def _status(self, line: Line, found: re.Match[str], group: re.Match[str] | None) -> None:
        rank, local = self._rank(line, None, group)
        if rank < 0:
            return
        seq = int(found[1]) if found[1] else -1
        wait = self._last.get(rank)
        if wait is None or (seq >= 0 and wait.seq not in (seq, -1)):
            if seq < 0:
                if not local:
                    self._evidence.idle[rank] = Wait(
                        rank, line.where, group=_name(group), enqueued=int(found[2]),
                        completed=int(found[3]),
                    )  # fmt: skip
                return
            wait = self._wait(line, rank, seq, _name(group), local)
        wait.enqueued = max(wait.enqueued, int(found[2]))
        wait.completed = max(wait.completed, int(found[3]))
        wait.group = wait.group or _name(group)

    def _wait(self, line: Line, rank: int, seq: int, group: str, local: bool = False) -> Wait:
        last = self._last.get(rank)
        if last is not None and (seq < 0 or seq == last.seq) and group in ("", last.group):
            return last
        known = self._waits.get((rank, seq, group)) or self._waits.get((rank, seq, ""))
        if known is None:
            known = Wait(rank, line.where, seq, group=group, time=line.time, local=local)
            self._waits[rank, seq, group] = known
            self._evidence.add(known)
            self._evidence.ranks.setdefault(rank, line.where)
        known.group = known.group or group
        self._last[rank] = known
        return known

    def _beat(
        self, line: Line, outstanding: int, group: re.Match[str] | None, seconds: int = -1
    ) -> None:
        rank, _ = self._rank(line, None, group)
        if found := _STUCK.search(line.text):
            seconds = int(found[1])
        beat = self._evidence.beats.setdefault(rank, Beat(rank, -1, -1, line.where))
        beat.outstanding = max(beat.outstanding, outstanding)
        beat.seconds = max(beat.seconds, seconds)
        self._evidence.read["Beat"] += 1
        if rank >= 0:
            self._evidence.ranks.setdefault(rank, line.where)

    def _rank(self, line: Line, said: str | None, group: re.Match[str] | None) -> tuple[int, bool]:
        """The rank, and whether it counts within a group only."""
        if line.rank >= 0:
            return line.rank, False
        if said is not None:
            return int(said), False
        if group:
            return int(group[4]), group[3] not in (None, "default_pg", "undefined") and True
        return -1, False


def _name(group: re.Match[str] | None) -> str:
    """One name for a group, however a line spells it."""
    if group is None:
        return ""
    return f"{group[2] or group[1]}" + (f" ({group[3]})" if group[3] else "")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d{1,6}", text))


def _number(text: str) -> int:
    return int(text) if text.isdigit() and len(text) < 16 else -1


def _product(shape: str) -> int:
    product = 1
    for size in re.findall(r"\d{1,12}", shape)[:16]:
        product *= int(size)
    return product
