"""One sentence, and the facts under it: the same in the terminal and in the page."""

from __future__ import annotations

from evener.tools.analyze.findings import Finding
from evener.tools.analyze.findings.base import CONTEXT, ENDED, FOLLOWS, UNDECIDED
from evener.tools.analyze.findings.tables import islands
from evener.tools.analyze.picture import Bandwidth, Picture
from evener.tools.analyze.words import count, size

_TABLES = 6
# Findings that tell of a state and not of an end.
_NO_END = (
    "cause.straggler", "cause.counts", "cause.unresponsive", "cause.suspended", "cause.dead-rank",
    "cause.blocked", "cause.unseen", "cause.data-loader", "cause.elsewhere", "cause.clock",
    "cause.slow-rank",
)  # fmt: skip


_ENDS = {
    "cause.exception", "cause.killed", "cause.gpu-memory", "cause.gpu-ecc", "cause.crash",
    "cause.gpu-program",
}  # fmt: skip


_SAY_AN_END = (
    "run.failed", "run.time-limit", "run.lost-peer", "cause.exception", "cause.killed",
    "cause.crash", "cause.missing-rank", "cause.mismatch", "cause.deadlock", "cause.host-gone",
    "cause.dead-rank", "cause.worker-died", "cause.rendezvous",
)  # fmt: skip


def verdict(picture: Picture, findings: list[Finding]) -> str:
    """What matters most, in one line."""
    worst = [finding for finding in findings if finding.severity != "note"]
    if not worst and not _judged(picture):
        return (
            "Nothing to judge: no row of a benchmark, no ring and no connection between ranks was "
            "read."
        )
    if not worst:
        what = "Nothing found that costs bandwidth"
        return f"{what}; {count(len(findings), 'note')}." if findings else f"{what}."
    rewire = next((f for f in findings if f.id == "fabric.rewire"), None)
    link = next((f for f in findings if f.id == "fabric.one-link"), None)
    found = picture.bandwidth
    reason = max(findings, key=lambda f: f.root, default=None)
    if reason is not None and reason.root > FOLLOWS:
        return f"{_state(findings, reason)}. {_total(worst)}"
    if rewire and found:
        cause = _capital(link.title) if link else rewire.detail
        return f"{cause}. To do: {rewire.title}, {found.peak:.3g} today."
    return f"{_capital(worst[0].title)}. {_total(worst)}"


def _total(worst: list[Finding]) -> str:
    problems = sum(finding.severity == "problem" for finding in worst)
    counts = ", ".join(
        count(number, word)
        for number, word in ((problems, "problem"), (len(worst) - problems, "warning"))
        if number
    )
    return f"{counts} in all." if counts else "No problem in all."


def _state(findings: list[Finding], reason: Finding) -> str:
    """How the run ended, and the reason."""
    ids = {finding.id for finding in findings}
    if reason.id in ("run.failed", *_NO_END):
        return _capital(reason.title)
    if CONTEXT <= reason.root < CONTEXT + 5:
        if not any(f.root in (UNDECIDED, ENDED) for f in findings):
            return _capital(reason.title)
        end = "A collective did not end" if ids & {"run.hung", "cause.inside"} else "The run failed"
        return f"{end} and no rank is named; first to mend: {reason.title}"
    if reason.id.startswith("cause.") and reason.root == UNDECIDED and reason.id != "run.hung":
        return _capital(reason.title)
    if reason.id == "run.hung":
        return _capital(reason.title)
    if not any(f.root in (ENDED, UNDECIDED) or f.id in _SAY_AN_END for f in findings) and (
        reason.id.startswith(("network.", "host."))
    ):
        return _capital(reason.title)  # a warning, after which the run may have gone on
    hung = ids & {
        "run.hung",
        "cause.missing-rank",
        "cause.mismatch",
        "cause.deadlock",
        "cause.inside",
    }
    how = "hung" if hung and not ids & _ENDS else "failed"
    return f"The run {how}: {reason.title}"


def _capital(title: str) -> str:
    """A title as a sentence; a host's name at its start stays as it is."""
    first = title.split(" ", 1)[0]
    named = any(not c.isalpha() for c in first.rstrip(","))
    return title if named else title[0].upper() + title[1:]


def _figures(found: Bandwidth) -> str:
    what = found.collective or "collective not named"
    if found.mixed:
        return f"{what}: {found.values} values of several runs that are mixed"
    printed = found.table.average
    apart = printed is not None and abs(printed - found.mean) > max(0.02, 0.01 * found.mean)
    said = f" (printed: {printed:.4g}, so rows are missing here)" if apart else ""
    return (
        f"{what}: mean {found.mean:.4g} GB/s over {found.values} values{said}, peak "
        f"{found.peak:.4g} {found.peak_side.replace('_', ' ')} at {size(found.peak_row.size)}"
    )


def _judged(picture: Picture) -> bool:
    run = picture.run
    return bool(
        picture.tables
        or run.topologies
        or run.matrices
        or any(comm.rings or comm.edges or comm.transports for comm in run.communicators)
    )


_SOURCES = {
    "Wait": "watchdogs", "Desync": "reports of waiting ranks", "Beat": "heartbeats",
    "Dump": "flight recorders", "Counts": "RAS counts", "Absentee": "RAS absentees",
    "Timing": "Inspector's collectives", "Raised": "tracebacks", "Exit": "exits",
    "Meeting": "rendezvous errors", "Xid": "Xids", "Sign": "lines of the system",
    "Seen": "ranks seen",
}  # fmt: skip


def _topologies(picture: Picture) -> list[str]:
    """What a matrix of nvidia-smi or NCCL's file says of a host, in a line each."""
    lines = []
    for matrix, where in picture.run.matrices[:4]:
        gpus, cards = matrix.gpus(), matrix.cards()
        joined = [one for one in islands(matrix) if len(one) > 1]
        nvlink = "no NVLink"
        if joined:
            all_of = len(joined) == 1 and len(joined[0]) == len(gpus)
            nvlink = (
                "NVLink between all"
                if all_of
                else "NVLink in " + ", ".join("-".join(one) for one in joined[:4])
            )
        lines.append(
            f"{count(len(gpus), 'GPU')}, {nvlink}; {count(len(cards), 'card')} "
            f"({picture.run.cite(where)})"
        )
    for topology, where in picture.run.topologies[:4]:
        lines.append(
            f"{count(len(topology.gpus), 'GPU')}, {count(len(topology.nets), 'card')} "
            f"({picture.run.cite(where)})"
        )
    return lines


def facts(picture: Picture) -> list[tuple[str, str]]:
    """Names and values of the head of a report; what is not known is left out."""
    run, world, found = picture.run, picture.world, picture.bandwidth
    rows: list[tuple[str, str]] = []
    if world is not None and world.members:
        hosts = world.hosts()
        shown = ", ".join(h or "(without a name)" for h in hosts[:6])
        shown += " ..." if len(hosts) > 6 else ""
        ranks = world.size or len(world.members)
        missing = world.size - len(world.members)
        counted = missing > 0 or picture.same_names
        number = max(len(hosts), world.nodes) if counted else len(hosts)
        text = f"{count(number, 'host')}, {count(ranks, 'rank')}: {shown}"
        if missing > 0:
            apart = number - len(hosts)
            unseen = f"{count(apart, 'host')}, " if 0 < apart <= missing else ""
            text += f" (no line of {unseen}{count(missing, 'rank')})"
        elif picture.same_names:
            text += " (several have one name)"
        rows.append(("cluster", text))
    elif devices := [d for table in run.tables[:1] for d in table.devices.values()]:
        hosts = sorted(run.tables[0].hosts)
        shown = ", ".join(hosts[:6]) + (" ..." if len(hosts) > 6 else "")
        text = f"{count(len(hosts), 'host')}, {count(len(devices), 'rank')}: {shown}"
        rows.append(("cluster", text))
    rows += [("topology", text) for text in _topologies(picture)]
    if run.evidence.read:
        known = ", ".join(f"{_SOURCES.get(k, k)} {n}" for k, n in run.evidence.read.most_common(8))
        rows.append(("evidence", known))
    if run.versions:
        rows.append(("NCCL", ", ".join(sorted(run.versions))))
    if (several := sum(comm.copies for comm in run.communicators)) > 1:
        rows.append(("analyzed", f"the largest of {several} communicators"))
    names = {name for host in run.hosts.values() for name in host.networks}
    names |= {name for host in run.hosts.values() for name, _ in host.used}
    if names:
        rows.append(("network", ", ".join(sorted(names))))
    if found is not None:
        text = _figures(found)
        if picture.line_rate:
            text += f", line rate {picture.line_rate:.4g}"
        rows.append(("bandwidth", text))
    others = [table for table in picture.tables if table is not found]
    for table in others[:_TABLES]:
        rows.append(("and", f"{_figures(table)} ({run.cite(table.table.where)})"))
    if len(others) > _TABLES:
        rows.append(("and", f"{len(others) - _TABLES} more tables (--json has all)"))
    if world is not None and world.rings:
        orders = world.distinct_rings()
        text = f"{count(len(world.rings), 'channel')}, {count(len(orders), 'distinct ring')}"
        rows.append(("rings", text + " (" + ", ".join(f"x{len(c)}" for _, c in orders[:8]) + ")"))
    if picture.pairs:
        shown = ", ".join(f"{p.source}>{p.destination}" for p in picture.pairs[:12])
        more = " ..." if len(picture.pairs) > 12 else ""
        rows.append(("pairs", f"{len(picture.pairs)} between hosts: {shown}{more}"))
        status, confidence, why = picture.rails()
        known = "" if confidence == "unknown" else f"{confidence}: "
        rows.append(("rails", f"{status} ({known}{why})"))
    if picture.traffic:
        share = picture.traffic.today.crossing_share
        rows.append(("fabric", f"{share:.0%} of the traffic between hosts leaves its switch"))
    return rows
