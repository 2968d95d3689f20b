"""Ranks that did not find one another: torchrun's store, MASTER_ADDR, ports, names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from evener.tools.analyze.evidence.records import Meeting
from evener.tools.analyze.findings.base import CRASHED, ENDED, MEETING, Finding, check
from evener.tools.analyze.findings.deaths import roots
from evener.tools.analyze.picture import Picture

_ORDER = ("port", "name", "timeout", "refused", "unreached", "short", "closed", "nodes")
_ROUTE = "113"
_LINE = (1 << 40) - 1
_AFTER = 20
# Another family of addresses, which torch tries first.
_HARMLESS = ("97 ", "99 ")
_ABOUT = re.compile(r"Rendezvous|DistStoreError|DistNetworkError|TCPStore|client socket|gai error")


@check(
    {
        "cause.port-in-use": "the port of the rendezvous is taken",
        "cause.host-name": "the rendezvous' address is a name that does not resolve",
        "cause.rendezvous": "the rendezvous' address does not answer, or not all nodes came",
    }
)
def met(picture: Picture) -> Iterator[Finding]:
    """Why the rendezvous failed."""
    run = picture.run
    found = run.evidence.meetings
    found = [m for m in found if not (m.warning and m.extra.startswith(_HARMLESS))]
    only = all(m.warning for m in found)
    if only:
        # torch warns where it tries again. The run went on where anything came after it.
        last = max((m.where for m in found), default=0)
        went_on = (
            run.communicators or run.tables or run.evidence.waits or run.evidence.dumps
            or run.evidence.beats or run.lines - (last & _LINE) > _AFTER
        )  # fmt: skip
        others = run.evidence.raised or run.evidence.exits or run.ended
        about = any(_ABOUT.search(f"{r.name} {r.text}") for r in run.evidence.raised)
        if not about and (went_on or others):
            return
    unnamed = {m.host for m in found if m.kind == "name" and m.host}
    # That a name does not resolve is only warned of; it is why the connection then fails.
    found = [m for m in found if not m.warning or m.host in unnamed] or found
    if not found:
        return
    one = min(found, key=lambda m: (_ORDER.index(m.kind), not m.port))
    port = next((m.port for m in found if m.port and m.kind == one.kind), one.port)
    host = next((m.host for m in found if m.host and m.kind == one.kind), one.host)
    where = tuple(m.where for m in found[:5])
    worked = bool(picture.run.communicators) or bool(picture.run.evidence.waits)
    real = roots(picture.run.evidence)
    root = CRASHED if worked or (real and one.kind in ("short", "closed")) else MEETING
    root = 0 if only and not run.evidence.raised else root
    if one.kind == "closed" and any(r.where < one.where for r in run.evidence.raised):
        root = ENDED + 1  # the launcher's second try, after what ended the first
    if one.kind == "port":
        yield _port(port or "of the store", one, where, MEETING)
    elif one.kind == "name" or (one.kind in ("timeout", "refused") and _container(host)):
        yield _name(host, port, one, where, root)
    else:
        yield _silent(host, port, one, where, root)


def _container(host: str) -> bool:
    """Whether a name is one that a container makes for itself."""
    return len(host) == 12 and all(c in "0123456789abcdef" for c in host)


def _port(port: str, one: Meeting, where: tuple[int, ...], root: int) -> Finding:
    return Finding(
        "cause.port-in-use",
        "problem",
        f"port {port} is already in use on this host: the rendezvous cannot listen there",
        f"It says: {one.text[:240]}. Another job or a process that is left of one holds the port.",
        "measured",
        where,
        "End the other process, or give this job a free port: --master-port or --rdzv-endpoint "
        "with another port, or torchrun --standalone on one host (it takes a free one).",
        f"ss -ltnp | grep {port if port.isdigit() else 'PORT'}; torchrun --rdzv-backend=c10d "
        "--rdzv-endpoint=localhost:0 ...",
        "The store listens and all ranks join.",
        root=root,
    )


def _name(host: str, port: str, one: Meeting, where: tuple[int, ...], root: int) -> Finding:
    of = f" '{host}'" if host else ""
    inside = (
        " It looks like a container's own name, which nobody else knows, and which may not lead "
        "to itself."
        if _container(host)
        else ""
    )
    return Finding(
        "cause.host-name",
        "problem" if root else "warning",
        f"the rendezvous' host name{of} does not lead to the "
        f"store{f' (port {port})' if port else ''}",
        f"It says: {one.text[:240]}.{inside} The name does not resolve, or resolves to an address "
        "on which nothing listens.",
        "measured" if one.kind == "name" else "inferred",
        where,
        "Give an address that every node resolves: --rdzv-endpoint (or MASTER_ADDR) with an IP, a "
        "line in /etc/hosts, or host networking for the container (--network=host).",
        f"getent hosts {host or 'NAME'}; ss -ltn | grep {port or 'PORT'}",
        "The same address on every node, and the store answers.",
        root=root,
    )


def _silent(host: str, port: str, one: Meeting, where: tuple[int, ...], root: int) -> Finding:
    place = f"{host}:{port}" if host and port else host or "the store"
    if one.kind == "short":
        return Finding(
            "cause.rendezvous",
            "problem",
            f"only {one.host} of {one.port} processes came to the rendezvous",
            f"It says: {one.text[:240]}. The others did not start, wait at another address, or "
            "cannot reach this one.",
            "measured",
            where,
            "See which nodes have no line at all; start them with the same --nnodes, "
            "--rdzv-id and --rdzv-endpoint.",
            "nc -vz MASTER PORT    # from each node",
            "All processes join.",
            root=root,
        )
    if one.kind in ("closed", "nodes"):
        return Finding(
            "cause.rendezvous",
            "problem",
            "the rendezvous was closed or its numbers differ between nodes",
            f"It says: {one.text[:240]}.",
            "measured",
            where,
            "Start all nodes anew with one --rdzv-id and the same --nnodes.",
            "torchrun --rdzv-id=NEW ...",
            "All nodes join.",
            root=root,
        )
    if one.kind == "timeout" and not host:
        return Finding(
            "cause.rendezvous",
            "problem" if root else "warning",
            "not all nodes came to the rendezvous in time",
            f"It says: {one.text[:240]}. This node waited; which others did not come is not in its "
            "lines: they did not start, wait at another address, or cannot reach this one.",
            "measured",
            where,
            "Look at the launchers of the other nodes; start all with the same --nnodes, --rdzv-id "
            "and --rdzv-endpoint.",
            "getent hosts MASTER; nc -vz MASTER PORT    # from each node",
            "All nodes join.",
            root=root,
        )
    how = "does not answer"
    if one.kind == "refused" and _ROUTE not in one.extra:
        how = "refuses connections"
    elif one.kind == "unreached" and "timed out" not in one.text:
        how = "cannot be reached"
    return Finding(
        "cause.rendezvous",
        "problem" if root else "warning",
        f"the rendezvous at {place} {how}",
        f"It says: {one.text[:240]}. The node with rank 0 does not run, listens elsewhere, or a "
        "firewall is between.",
        "measured",
        where,
        "See that rank 0's node is up and MASTER_ADDR / --rdzv-endpoint is its address on a "
        "network "
        "that all share; open that port and NCCL's between the nodes.",
        f"nc -vz {host or 'MASTER'} {port or 'PORT'}; ss -ltn    # on the first node",
        "The connection is made.",
        root=root,
    )
