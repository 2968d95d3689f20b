"""What a mismatch of collectives is called, in records of files and of a live job alike."""

from __future__ import annotations

from evener.tools.analyze.evidence.records import GLOO
from evener.tools.analyze.findings.base import NAMED, Finding
from evener.tools.analyze.findings.who import ranks
from evener.tools.analyze.stuck import Culprit


def operation(culprit: Culprit) -> str:
    """`ALLREDUCE 8042 of group 1 (dp)`."""
    op = culprit.op or "a collective"
    number = f" {culprit.seq}" if culprit.seq >= 0 else ""
    group = culprit.group if culprit.group != GLOO else ""
    known = f" of group {group}" if group and "default" not in group and group != "0" else ""
    return f"{op}{number}{known}"


def waited(culprit: Culprit) -> str:
    """` for 600 s`, empty where nothing says how long."""
    return f" for {culprit.waited_ms / 1000:.4g} s" if culprit.waited_ms > 0 else ""


def mismatch(culprit: Culprit, size: int) -> Finding:
    """Ranks that ran different operations, sizes or types, in words."""
    who = ranks(culprit.ranks) if culprit.ranks else ranks(culprit.waiting)
    op = operation(culprit)
    what = {"size": "other sizes", "dtype": "another type"}.get(culprit.kind, "another operation")
    if culprit.kind == "ahead":
        title = (
            f"{who} left the order: finished collective {culprit.seq}, in which "
            f"{ranks(culprit.waiting)} wait, and waits in {culprit.theirs}"
        )
        detail = "By the numbers of the watchdogs: what it finished was another operation."
    elif not culprit.ranks or len(culprit.ranks) == size == 2 or culprit.source.startswith("TORCH"):
        one = ranks(culprit.ranks or culprit.waiting)
        title = f"{one} ran different collectives under one number ({op}), and waited for ever"
        said = culprit.others if not culprit.theirs else f"{culprit.theirs}; {culprit.others}"
        detail = f"{said}. No majority says which of them is wrong."
    elif culprit.kind == "mismatch":
        number = f" (collective {culprit.seq})" if culprit.seq >= 0 else ""
        title = (
            f"{who} ran {culprit.theirs} where {ranks(culprit.waiting)} ran {culprit.others}"
            f"{number}, and all waited{waited(culprit)}"
        )
        detail = f"{culprit.source.capitalize()} say so."
    else:
        title = (
            f"{who} brought {what} to {op}: {culprit.theirs} where {ranks(culprit.waiting)} "
            f"brought {culprit.others}, so it never ended"
        )
        detail = f"{culprit.source.capitalize()} say so. NCCL does not check sizes or types."
    if culprit.frame or culprit.own_frame:
        detail += (
            f" {who.capitalize()}: {culprit.own_frame or '?'}; the others: {culprit.frame or '?'}."
        )
    return Finding(
        "cause.mismatch",
        "problem",
        title,
        detail + " The order of collectives differs between ranks: a branch, a skipped batch, "
        "or parameters in another order.",
        "measured" if culprit.sure else "inferred",
        culprit.where,
        f"Find where {who} leave{'s' if len(culprit.ranks) == 1 else ''} the order: decide such "
        "branches together on all ranks (gather the flag first). One run with the check on names "
        "the first call that differs.",
        "export TORCH_DISTRIBUTED_DEBUG=DETAIL    # slow: for one run",
        "The same operation, size and type on every rank.",
        root=NAMED,
    )
