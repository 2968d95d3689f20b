"""Whether the run ended well: before anything of its speed counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from evener.tools.analyze.findings.base import ENDED, Finding, Severity, check
from evener.tools.analyze.findings.causes import follows
from evener.tools.analyze.findings.who import ranks
from evener.tools.analyze.model import Process, Run
from evener.tools.analyze.parse.failures import RESULTS, Ended
from evener.tools.analyze.picture import Picture
from evener.tools.analyze.words import count, names, ranges

# Where a trail that reaches these files starts, NCCL gave the call up. Networks that are only tried
# leave trails in net.cc, net_ib.cc and socket.cc.
_GIVEN_UP = ("init", "group", "enqueue", "proxy", "transport", "bootstrap")
# Warnings after which nothing goes on, where no trail follows (NCCL_DEBUG=WARN, excerpts).
_FATAL = (
    "Cuda failure", "Got completion", "Error while creating shared memory",
    "Error while attaching to shared memory", "Duplicate GPU", "Socket recv failed",
    "Connection closed by remote peer", "Timeout waiting", "Mismatched collective",
    "Message truncated", "unhandled", "posix_fallocate failed", "failed to extend",
)  # fmt: skip


_WAITS: tuple[tuple[str, Severity, str, str, str], ...] = (
    (
        "limit",
        "warning",
        "the job ran into its time limit",
        "It was ended from outside: it hung, was slow, or the limit is short.",
        "Look at the time of the last step before it.",
    ),
    (
        "stalled",
        "warning",
        "Horovod reports ranks that waited for others",
        "Some ranks offered tensors that others did not. At start that is a rank that loads for "
        "longer; where it does not pass, ranks run different code or one has ended.",
        "Compare which ranks stall: the ones not listed are late.",
    ),
)


def failing(run: Run) -> dict[Process, int]:
    """Processes whose NCCL gave up, and where their first trail or fatal warning stands."""
    found: dict[Process, int] = {}
    warned = {process for warning in run.warnings.values() for process in warning.processes}
    for process, trail in run.trails.items():
        up = [where for step, where in trail if PurePosixPath(step.file).stem in _GIVEN_UP]
        if up and all(step.code in (3, 7) for step, _ in trail) and process not in warned:
            continue  # an abort that the program asked for, or `in progress`
        if up or process in warned:
            found[process] = trail[0][1]
    for text, warning in run.warnings.items():
        if any(fatal in text for fatal in _FATAL):
            for process in warning.processes:
                found[process] = min(found.get(process, warning.where), warning.where)
    return found


@check(
    {
        "run.failed": "a call of NCCL, a rank or the job ended with an error",
        "run.time-limit": "the job ran into its time limit",
        "run.stalled": "Horovod reports ranks that waited for others",
    }
)
def ended(picture: Picture) -> Iterator[Finding]:
    """The run ended with an error."""
    run = picture.run
    kinds: dict[str, list[tuple[Ended, int]]] = {}
    for record, where in run.ended:
        kinds.setdefault(record.kind, []).append((record, where))
    said = kinds.get("failed", [])
    yield from _waited(kinds, run)
    processes = failing(run)
    if not processes and not said:
        return
    hosts = sorted({host for host, _ in processes if host})
    warnings = [
        (follows(text, run.warnings), w.where, text)
        for text, w in run.warnings.items()
        if set(w.processes) & set(processes)
    ]
    first = min(warnings)[1:] if warnings and not min(warnings)[0] else None
    codes = sorted(
        {s.code for p in processes for s, _ in run.trails.get(p, []) if s.code in RESULTS}
    )
    parts = []
    if first:
        parts.append(f"The first warning: {first[1][:200]}.")
    elif said:
        parts.append(f"It says: {said[0][0].text.rstrip('.')}.")
    if codes:
        parts.append("NCCL's result: " + "; ".join(f"{c}, {RESULTS[c]}" for c in codes) + ".")
    if processes:
        of = f" on {names(hosts)}" if hosts else ""
        many = "1 process" if len(processes) == 1 else f"{len(processes)} processes"
        parts.append(f"{many} gave up{of}.")
    evidence = [first[0]] if first else []
    evidence += sorted(processes.values())[:3] + [where for _, where in said[:3]]
    yield Finding(
        "run.failed",
        "problem",
        "the run failed",
        " ".join(parts),
        "measured",
        tuple(evidence),
        "Mend what the earliest error says; errors of other ranks mostly follow from it. No "
        "bandwidth of this run counts.",
        "export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV NCCL_DEBUG_FILE=nccl.%h.%p.log",
        "A run that ends with status 0.",
        root=ENDED,
    )


def _waited(kinds: dict[str, list[tuple[Ended, int]]], run: Run) -> Iterator[Finding]:
    for kind, severity, title, detail, do in _WAITS:
        found = kinds.get(kind, [])
        if found:
            yield Finding(
                f"run.{'time-limit' if kind == 'limit' else kind}",
                severity,
                title,
                f"{found[0][0].text.rstrip('.')}. {detail}{_missing(kind, run)}",
                "measured",
                tuple(where for _, where in found[:5]),
                do,
            )


def _missing(kind: str, run: Run) -> str:
    """The ranks that Horovod names as missing."""
    missing = {r for d in run.evidence.desyncs if d.kind == "stalled" for r in d.ranks}
    return f" Missing: {ranks(missing)}." if kind == "stalled" and missing else ""


@check(
    {
        "run.init-unfinished": "ranks that began to set up a communicator and did not end it",
        "run.no-rows": "a benchmark that printed its head and no row",
    }
)
def unfinished(picture: Picture) -> Iterator[Finding]:
    """The log ends in the middle: a hang, or a log that was cut."""
    run = picture.run
    ran = any(table.rows for table in run.tables)
    if run.ended or ran or failing(run) or run.evidence:
        return
    for comm in run.communicators:
        missing = sorted(comm.started - comm.finished)
        if not missing or comm.size < 2:
            continue
        some = "no rank" if not comm.finished else f"{len(comm.finished)} of {comm.size} ranks"
        yield Finding(
            "run.init-unfinished",
            "warning",
            f"{some} ended the set-up of a communicator of {count(comm.size, 'rank')}",
            f"Ranks {ranges(missing)} began it (Init START) and no line says that they ended it "
            "(Init COMPLETE). The set-up hangs, or the log was cut. A set-up hangs where ranks do "
            "not reach one another: another interface, a firewall, a rank that never started.",
            "inferred",
            (comm.where,),
            "Name the interface that all hosts share, and look for ranks without any line.",
            "export NCCL_SOCKET_IFNAME=IFACE",
            "Init COMPLETE of every rank.",
        )
        break
    for table in run.tables:
        begun = bool(table.heads or table.options) and table.average is None
        if begun and not table.rows and table.copies() == 1:
            yield Finding(
                "run.no-rows",
                "warning",
                "the benchmark printed its head and no row",
                "It hung or ended at the first size, or the log was cut there.",
                "inferred",
                (table.where,),
                "Try one size and one host first, then two hosts.",
                "evener bench all_reduce -b 8 -e 8 -g 1",
                "A row.",
            )
            break
