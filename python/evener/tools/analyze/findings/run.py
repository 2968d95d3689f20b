"""Whether the run ended well: before anything of its speed counts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from evener.tools.analyze.findings.base import ENDED, Finding, Severity, check
from evener.tools.analyze.findings.causes import explained, follows
from evener.tools.analyze.findings.gave_up import failing
from evener.tools.analyze.findings.result import bare
from evener.tools.analyze.findings.who import ranks, world_size
from evener.tools.analyze.model import Process, Run
from evener.tools.analyze.parse.failures import RESULTS, Ended
from evener.tools.analyze.picture import Picture
from evener.tools.analyze.words import count, names, ranges

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
    yield from _waited(kinds, picture)
    processes = failing(run)
    if not processes and not said:
        return
    hosts = sorted({host for host, _ in processes if host})
    warnings = [
        (follows(text, run), w.where, text)
        for text, w in run.warnings.items()
        if set(w.processes) & set(processes)
    ]
    first = min(warnings)[1:] if warnings and not min(warnings)[0] else None
    unnamed = [(w.where, text) for text, w in run.warnings.items() if not w.processes]
    if first is None and unnamed and not follows(min(unnamed)[1], run):
        first = min(unnamed)  # what torch repeats of NCCL's last error
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
    title, root, command = "the run failed", ENDED, ""
    if not explained(run):
        if first and len(kinds.get("hung", [])) == 0:
            title = f"the run failed, and NCCL says: {first[1][:110].rstrip('. ')}"
        elif peers := _peers(run, processes):
            who = names(hosts) if hosts else "a process"
            title = f"the run failed: {who} only lost the connection to {peers}"
            parts.append("What ended first is there, or between them.")
        elif not run.nccl_lines and (known := bare(run)):
            title, meaning, command, root = known
            parts.append(meaning)
    yield Finding(
        "run.failed",
        "problem",
        title,
        " ".join(parts),
        "measured",
        tuple(evidence),
        "Mend what the earliest error says; errors of other ranks mostly follow from it. No "
        "bandwidth of this run counts.",
        "export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV NCCL_DEBUG_FILE=nccl.%h.%p.log"
        + (f"; {command}" if command else ""),
        "A run that ends with status 0.",
        root=root,
    )


def _peers(run: Run, processes: dict[Process, int]) -> str:
    """The peers that closed connections, without those that noticed an end themselves."""
    own = {host for host, _ in processes}
    found = {
        peer[1]
        for text in run.warnings
        if (peer := re.search(r"closed by remote peer ([\w.:-]{1,200}?)<", text))
    }
    others = sorted(p for p in found if not any(host and p.startswith(host) for host in own))
    return names(others) if others else ""


def _waited(kinds: dict[str, list[tuple[Ended, int]]], picture: Picture) -> Iterator[Finding]:
    for kind, severity, title, detail, do in _WAITS:
        found = kinds.get(kind, [])
        if found:
            yield Finding(
                f"run.{'time-limit' if kind == 'limit' else kind}",
                severity,
                (kind == "stalled" and _stalled(picture)) or title,
                f"{found[0][0].text.rstrip('.')}. {detail}",
                "measured",
                tuple(where for _, where in found[:5]),
                do,
            )


def _stalled(picture: Picture) -> str:
    """Whom Horovod's report names, empty where it names nobody."""
    reports = picture.run.evidence.desyncs
    missing = {r for d in reports if d.kind == "stalled" for r in d.ranks}
    ready = {d.ranks: d.text for d in reports if d.kind == "ready"}
    sets = sorted((set(r) for r in ready), key=len)
    if len(sets) > 1 and not sets[0] & sets[-1]:
        return (
            f"{ranks(sets[0])} and {ranks(sets[-1])} wait in different tensors of Horovod: "
            f"{ready[next(r for r in ready if set(r) == sets[0])][:60]} is not what the others "
            "offer"
        )
    if sets and not missing:
        came = set.intersection(*sets)
        missing = set(range(max(world_size(picture), max(sets[-1]) + 1))) - came
    return f"Horovod reports ranks that waited for {ranks(missing)}" if missing else ""


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
