"""A run that hung: who held it up, or why that is not decided."""

from __future__ import annotations

from collections.abc import Iterator

from evener.tools.analyze.findings import live
from evener.tools.analyze.findings.base import NAMED, UNDECIDED, Finding, check
from evener.tools.analyze.findings.mismatch import mismatch, operation, waited
from evener.tools.analyze.findings.who import ranks, world_size
from evener.tools.analyze.picture import Picture
from evener.tools.analyze.stuck import Culprit, decide
from evener.tools.analyze.words import count

_DUMP = (
    "export TORCH_FR_BUFFER_SIZE=2000 TORCH_FR_DUMP_ON_TIMEOUT=1    # before torch 2.9: "
    "TORCH_NCCL_TRACE_BUFFER_SIZE, TORCH_NCCL_DUMP_ON_TIMEOUT"
)
_LOOK = "py-spy dump --pid PID    # of that rank, while it hangs"


@check(
    {
        "run.hung": "ranks waited in a collective until a watchdog gave up; who is missing is "
        "not known",
        "cause.missing-rank": "a rank that never joined a collective in which the others waited",
        "cause.mismatch": "ranks that ran different operations, sizes or types under one number",
        "cause.deadlock": "ranks that wait for one another in different groups",
        "cause.inside": "all ranks are in the same collective and it does not end",
    }
)
def hung(picture: Picture) -> Iterator[Finding]:
    """The culprits of a hang."""
    run = picture.run
    ended = [(record, where) for record, where in run.ended if record.kind == "hung"]
    culprit = decide(run.evidence, world_size(picture))
    if culprit is not None and live.explains(run.evidence, culprit, world_size(picture)):
        return
    if culprit is not None:
        yield finding(culprit, world_size(picture))
    elif ended:
        at = next((r.line for r in run.evidence.raised if r.line), "")
        yield Finding(
            "run.hung",
            "problem",
            "a collective did not end: a rank gave up waiting" + (f" at {at}" if at else ""),
            f"{ended[0][0].text.rstrip('.')}. Some rank did not take part, or its network stopped. "
            "The lines do not say which rank wrote them.",
            "measured",
            tuple(where for _, where in ended[:5]),
            "Give the logs of all ranks, each line with its rank (torchrun writes `[rank3]:`).",
            _DUMP,
            "A dump of each rank: evener analyze FOLDER names the one that is missing.",
            root=UNDECIDED,
        )


def finding(culprit: Culprit, size: int) -> Finding:
    """One culprit in words."""
    speak = {
        "missing": _missing, "silent": _missing, "behind": _missing, "mismatch": mismatch,
        "size": mismatch, "dtype": mismatch, "ahead": mismatch,
        "cycle": _cycle, "inside": _inside,
    }.get(culprit.kind, _undecided)  # fmt: skip
    if not culprit.ranks and culprit.kind in ("missing", "silent", "behind"):
        speak = _undecided
    return speak(culprit, size)


def _stack(culprit: Culprit) -> str:
    text = f" They wait at {culprit.frame}." if culprit.frame else ""
    if culprit.own_frame and culprit.own_frame != culprit.frame:
        text += f" The last that {ranks(culprit.ranks)} issued is from {culprit.own_frame}."
    return text


def _missing(culprit: Culprit, size: int) -> Finding:
    who, op = ranks(culprit.ranks), operation(culprit)
    verb = "is" if len(culprit.ranks) == 1 else "are"
    others = ranks(culprit.waiting) if culprit.waiting else "the others"
    if culprit.source == "heartbeat monitors":
        title = f"{who} stopped first: the watchdog's heartbeat stopped on {others} too"
        if culprit.theirs:
            title = (
                f"{who} stopped first: {culprit.theirs}, the others {culprit.others}, when the "
                "watchdog got stuck"
            )
        detail = (
            "The heartbeat monitors say that the watchdog threads made no progress: a CUDA or NCCL "
            "call blocks, or a thread holds the GIL in one. No collective's number is in these "
            "lines. "
        )
    elif culprit.kind == "behind":
        title = (
            f"{who} {verb} behind: {others} waited{waited(culprit)} in {op}, which {who} "
            f"never issued"
        )
        detail = f"The numbers of {culprit.source} say so. "
    elif culprit.kind == "silent":
        title = f"{who} never joined {op}: {others} waited in it{waited(culprit)}"
        some = (
            f"{count(len(culprit.waiting), 'rank')} of "
            f"{size or len(culprit.waiting) + len(culprit.ranks)}"
        )
        if culprit.source == "flight recorders":
            detail = (
                f"The flight recorders of {some} hold it unfinished, and {who} left no dump: a "
                "rank that was killed or is stopped writes none. "
            )
        else:
            title += " and timed out"
            detail = (
                f"{some} say that they waited, {who} "
                f"{'says' if len(culprit.ranks) == 1 else 'say'} nothing of it: a rank that waits "
                "complains, the one that is missing does not. "
            )
    else:
        title = f"{who} never joined {op}: {others} waited in it{waited(culprit)}"
        detail = f"{culprit.source.capitalize()} say so. "
    if not culprit.sure and culprit.kind == "silent":
        detail += f"If the log of {who} is only missing here, give it too. "
    return Finding(
        "cause.missing-rank",
        "problem",
        title,
        (detail + _stack(culprit).strip()).strip(),
        "measured" if culprit.sure else "inferred",
        culprit.where,
        f"See what {who} did then: code that only some ranks run (evaluation, sampling, saving), a "
        "batch more or less than the others, a `continue`, an exception that was caught, or a data "
        "loader. If it only takes long, let the others wait longer: "
        "init_process_group(timeout=...). If the process was gone, look for its end.",
        _LOOK,
        "All ranks call the same collectives in the same order.",
        root=NAMED,
    )


def _cycle(culprit: Culprit, _size: int) -> Finding:
    return Finding(
        "cause.deadlock",
        "problem",
        f"{ranks(culprit.ranks)} hang in a deadlock: each waits in another group for one of the "
        f"others",
        f"Flight recorders say so, for instance in {operation(culprit)}.{_stack(culprit)}",
        "measured",
        culprit.where,
        "Let all ranks use their groups in the same order.",
        _DUMP,
        "No rank waits for one that waits for it.",
        root=NAMED,
    )


def _inside(culprit: Culprit, _size: int) -> Finding:
    return Finding(
        "cause.inside",
        "problem",
        f"a collective did not end: all {len(culprit.waiting)} ranks that left a record are inside "
        f"{operation(culprit)}",
        f"Every rank issued it{waited(culprit).replace(' for', ' and waited')}, so the order "
        f"of calls "
        "is not the cause: a link, a card, a GPU or a peer stopped below. What says which is "
        "not in "
        f"these files, unless a finding here names it.{_stack(culprit)}",
        "measured",
        culprit.where,
        "Collect from each host: the kernel's log (Xid, link down), NCCL's log, and the state of "
        "each connection.",
        "dmesg -T | grep -iE 'xid|link is down|mlx5'; nvidia-smi -q -d ECC,ROW_REMAPPER; ss -tin; "
        "ncclras -v",
        "One host, card or GPU that differs from the others.",
        root=UNDECIDED,
    )


def _stuck(culprit: Culprit) -> Finding:
    """Watchdogs that are stuck, and nothing else."""
    return Finding(
        "run.hung",
        "problem",
        f"the watchdog is stuck on {ranks(culprit.waiting)}{waited(culprit)}: what blocks it is "
        "not decided",
        "A call of CUDA or NCCL does not return there, or a thread holds the GIL in one. That "
        "need not be a collective: it happens too while a process ends and frees its groups. No "
        "collective's number is in these lines.",
        "measured",
        culprit.where,
        "Look at the stacks of those processes while they hang, or give the logs of all ranks. If "
        "the program had reached its end, let all ranks call destroy_process_group() there.",
        "py-spy dump --native --pid PID    # of each of those ranks",
        "The call that does not return.",
        root=UNDECIDED,
    )


def _undecided(culprit: Culprit, size: int) -> Finding:
    if culprit.source == "heartbeat monitors":
        return _stuck(culprit)
    known = count(len(culprit.waiting), "rank")
    of = f" of {size}" if size > len(culprit.waiting) else ""
    absent = f" ({ranks(culprit.among)} left no line)" if culprit.among else ""
    note = f" But {culprit.theirs}." if culprit.theirs else ""
    if len(culprit.waiting) > 1 and culprit.waiting == tuple(range(len(culprit.waiting))):
        note += (
            f" If the job has no rank but these {len(culprit.waiting)}, nobody is missing: then a "
            "link, a card or a GPU stopped below; look at the kernel's log of each host."
        )
    return Finding(
        "run.hung",
        "problem",
        f"a collective did not end: {known}{of} timed out in "
        f"{operation(culprit)}{waited(culprit)}; "
        "which rank is missing is not decided",
        f"{ranks(culprit.waiting).capitalize()} waited{absent}. The ranks that waited say so; the "
        f"one that is missing does not, and too few logs are here to tell.{note}",
        "measured",
        culprit.where,
        "Give the logs of all ranks, or flight recorders' dumps: then the rank that is missing has "
        "a name. Look first at the ranks that left no line.",
        _DUMP,
        "evener analyze FOLDER names the rank.",
        root=UNDECIDED,
    )
