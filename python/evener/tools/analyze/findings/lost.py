"""A run whose errors all say that a peer was gone: the rank that says nothing ended first.

What kills a process (SIGKILL, a host that goes away) leaves no word of that process. Launchers
report whichever exit they notice first, and that is often a rank that only lost its peer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from evener.tools.analyze.findings.base import ENDED, NAMED, Finding, check
from evener.tools.analyze.findings.deaths import roots
from evener.tools.analyze.findings.who import ranks, silent
from evener.tools.analyze.picture import Picture

_LOST = re.compile(
    r"[Cc]onnection (?:was )?(?:closed|reset)|closed by (?:remote )?peer|reset by peer"
    r"|NCCL operation failed|NCCL communicator was aborted"
    r"|[Bb]roken pipe|remote process exited|ncclRemoteError|a peer has gone|recv(?:Value|Bytes) "
    r"failed"
)


@check(
    {
        "cause.dead-rank": "a rank's process is gone: the others wait for it, or lost it",
        "run.lost-peer": "every error only says that a peer is gone; whose end was first is not "
        "here",
    }
)
def lost(picture: Picture) -> Iterator[Finding]:
    """Who ended without a word."""
    evidence = picture.run.evidence
    found = [one for one in evidence.raised if _LOST.search(f"{one.name}: {one.text}")]
    if roots(evidence) or any(e.signal not in (0, 6, 15) for e in evidence.exits):
        return
    if not found and evidence.raised:
        yield from _followed(picture)
    if not found:
        return
    spoke = {one.rank for one in evidence.raised if one.rank >= 0}
    gone = silent(picture)
    where = tuple(one.where for one in found[:5])
    said = f"{found[0].name.rsplit('.', 1)[-1]}: {found[0].text[:160]}"
    if gone and not evidence.waits:
        one = next((one for one in evidence.seen if one.rank == gone[0]), None)
        place = f" (process {one.pid} on {one.host}, step {one.step})" if one else ""
        yield Finding(
            "cause.dead-rank",
            "problem",
            f"{ranks(gone)} ended without a word{place}, and {ranks(spoke)} lost "
            f"{'it' if len(gone) == 1 else 'them'}",
            f"The errors of {ranks(spoke)} only say that a peer was gone ({said}); "
            f"{ranks(gone)} left none. A process that is killed ends so: by SIGKILL, for memory, "
            "or with its host.",
            "inferred",
            where,
            f"Look at the kernel's log and the batch system's record of the host of "
            f"{ranks(gone)}. If its log is only missing here, give it too.",
            "dmesg -T | grep -iE 'killed process|oom'; sacct -j JOB -o State,ExitCode,Reason",
            "No process ends without a word.",
            root=NAMED,
        )
    else:
        yield from _followed(picture)


def _followed(picture: Picture) -> Iterator[Finding]:
    """Errors that only follow, where nothing else says anything."""
    evidence = picture.run.evidence
    found = evidence.raised
    other = picture.run.ended or evidence.waits or evidence.meetings or evidence.signs
    if not other and not evidence.exits and not evidence.dumps and not evidence.desyncs:
        spoke = {one.rank for one in found if one.rank >= 0}
        where = tuple(one.where for one in found[:5])
        said = f"{found[0].name.rsplit('.', 1)[-1]}: {found[0].text[:160]}"
        late = any("imed out" in one.text or "imeout" in one.text for one in found)
        who = ranks(spoke) if spoke else "a process"
        yield Finding(
            "run.lost-peer",
            "problem",
            f"{who} waited for another one in vain; which one is not in these files"
            if late
            else f"{who} only lost a peer; the process that ended first is not in these files",
            f"{said}. Such an error follows from another process, which ended or hangs.",
            "inferred",
            where,
            "Give the output of all ranks and the launcher's own; look at the kernel's log of "
            "hosts whose ranks left nothing.",
            "dmesg -T | grep -iE 'killed process|oom|xid'; sacct -j JOB -o State,ExitCode,Reason",
            "An error that names its own reason.",
            root=ENDED,
        )
