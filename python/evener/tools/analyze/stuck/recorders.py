"""From flight recorders: what each rank issued in each group, so a graph of who waits for whom.

A rank waits in its oldest unfinished operation, for every member of that group that has not issued
it. A rank that others wait for and that waits for nobody is the root. If the operations under one
number differ, the minority is the odd one: torch's own analyzer assumes the first rank is right.
"""

from __future__ import annotations

import re
from collections import defaultdict

from evener.tools.analyze.evidence.recorder import own_frame
from evener.tools.analyze.evidence.records import Dump, Operation
from evener.tools.analyze.stuck.culprit import Culprit, Kind, minority, ordered, split
from evener.tools.analyze.stuck.waits import even
from evener.tools.analyze.words import ranges

Group = tuple[str, tuple[int, ...]]
_PEER = re.compile(r"^(send|recv) (\d+)(->|<-)(\d+)")


def recorded(dumps: list[Dump]) -> Culprit | None:
    """What the dumps of one moment carry. None where there is none, or no rank waits."""
    ranks = {dump.rank: dump for dump in dumps if dump.rank >= 0}
    if not ranks:
        return None
    groups = _groups(ranks)
    pending: dict[int, tuple[Group, Operation]] = {}
    issued: dict[Group, dict[int, int]] = defaultdict(dict)
    entries: dict[Group, dict[int, dict[int, Operation]]] = defaultdict(lambda: defaultdict(dict))
    for rank, dump in ranks.items():
        for operation in dump.operations:
            if operation.p2p or operation.seq < 0:
                continue
            group = groups[rank].get(operation.group) or (operation.group, ())
            entries[group][rank].setdefault(operation.seq, operation)
        for name, group in groups[rank].items():
            mine = entries[group][rank]
            issued[group][rank] = max([*mine, dump.status.get(name, (-1, -1))[0]], default=-1)
    for rank, dump in ranks.items():
        if (found := _pending(dump, groups[rank])) is not None:
            pending[rank] = found
    edges = _edges(pending, issued, ranks)
    _messages(ranks, groups, edges, pending)
    differing = _differing(pending, entries)
    if differing is not None:
        return differing
    if not pending:
        return None
    return _roots(ranks, pending, edges, groups)


def _groups(ranks: dict[int, Dump]) -> dict[int, dict[str, Group]]:
    """Each rank's groups; a group is its name and its members."""
    return {
        rank: {name: (name, members) for name, (_, members) in dump.groups.items()}
        for rank, dump in ranks.items()
    }


def _pending(
    dump: Dump,
    groups: dict[str, Group],
) -> tuple[Group, Operation] | None:
    """The rank's oldest unfinished operation."""
    done = any(o.state == "completed" for o in dump.operations)
    open_: list[tuple[Group, Operation]] = []
    for operation in dump.operations:
        if operation.state == "completed" or operation.seq < 0 or operation.p2p:
            continue
        completed = dump.status.get(operation.group, (-1, -1))[1]
        if operation.seq <= completed:
            continue
        open_.append((groups.get(operation.group) or (operation.group, ()), operation))
    if not open_:
        return None
    if not done and not any(status[1] >= 0 for status in dump.status.values()):
        return max(open_, key=lambda item: (item[1].created, item[1].seq))
    return min(open_, key=lambda item: (item[1].created, item[1].seq))


def _edges(
    pending: dict[int, tuple[Group, Operation]],
    issued: dict[Group, dict[int, int]],
    ranks: dict[int, Dump],
) -> dict[int, set[int]]:
    """Rank > the ranks it waits for: members of its group that have not issued its operation."""
    edges: dict[int, set[int]] = {}
    for rank, (group, operation) in pending.items():
        members = group[1] or tuple(issued[group])
        edges[rank] = {
            other
            for other in members
            if other != rank and other in ranks and issued[group].get(other, -1) < operation.seq
        }
    return edges


def _messages(
    ranks: dict[int, Dump],
    groups: dict[int, dict[str, Group]],
    edges: dict[int, set[int]],
    pending: dict[int, tuple[Group, Operation]],
) -> None:
    """Add what waits for a message: an open receive without an open or finished send, and so on."""
    open_: dict[int, list[tuple[str, int, Operation]]] = defaultdict(list)
    for rank, dump in ranks.items():
        for operation in dump.operations:
            found = _PEER.match(operation.op)
            if not found or operation.state == "completed":
                continue
            group = groups[rank].get(operation.group)
            mine, peer = int(found[2]), int(found[4])
            members = group[1] if group else ()
            if members and peer < len(members) and mine < len(members):
                peer = members[peer]
            open_[rank].append((found[1], peer, operation))
    for rank, waiting in open_.items():
        first = min(waiting, key=lambda item: item[2].created)
        kind, peer, operation = first
        known = pending.get(rank)
        if known is not None and known[1].created <= operation.created:
            continue
        group = groups[rank].get(operation.group) or (operation.group, ())
        pending[rank] = (group, operation)
        answer = "recv" if kind == "send" else "send"
        matched = any(k == answer and p == rank for k, p, _ in open_.get(peer, []))
        edges[rank] = {peer} if peer in ranks and not matched else set()


def _differing(
    pending: dict[int, tuple[Group, Operation]],
    entries: dict[Group, dict[int, dict[int, Operation]]],
) -> Culprit | None:
    """The first number under which ranks of a group ran different things, near where they wait."""
    waiting: dict[Group, list[int]] = defaultdict(list)
    for group, operation in pending.values():
        if not operation.p2p:
            waiting[group].append(operation.seq)
    for group, seqs in waiting.items():
        lowest = min(seqs)
        for seq in range(lowest - 200, max(seqs) + 1):
            ran = {r: ops[seq] for r, ops in entries[group].items() if seq in ops}
            if len(ran) < 2:
                continue
            ops = {rank: o.op for rank, o in ran.items()}
            if len(set(ops.values())) > 1:
                return _differ("mismatch", ran, ops, group, seq)
            if seq < lowest or not even(next(iter(ops.values()))):
                continue
            sizes = {rank: _elements(o) for rank, o in ran.items()}
            if len(set(sizes.values())) > 1:
                return _differ("size", ran, sizes, group, seq)
            dtypes = {rank: ", ".join(o.dtypes) for rank, o in ran.items()}
            if len(set(dtypes.values())) > 1:
                return _differ("dtype", ran, dtypes, group, seq)
    return None


def _elements(operation: Operation) -> str:
    total = 0
    for sizes in operation.sizes_in:
        product = 1
        for size in sizes:
            product *= size
        total += product
    return f"{total} elements"


def _differ(
    kind: Kind, ran: dict[int, Operation], values: dict[int, str], group: Group, seq: int
) -> Culprit:
    found = minority(values)
    if found is None:
        assert split(values)
        each = "; ".join(
            f"{'rank' if sum(v == value for v in values.values()) == 1 else 'ranks'} "
            f"{ranges(r for r, v in values.items() if v == value)}: {value}"
            for value in list(dict.fromkeys(values.values()))[:6]
        )
        return Culprit(
            kind, (), ordered(ran), next(iter(ran.values())).op, seq, group[0], "", each,
            source="flight recorders",
        )  # fmt: skip
    odd, theirs, others = found
    rest = [rank for rank in ran if rank not in odd]
    return Culprit(
        kind, odd, ordered(rest), ran[rest[0]].op, seq, group[0], theirs, others,
        own_frame(ran[rest[0]].frames), own_frame(ran[odd[0]].frames), source="flight recorders",
    )  # fmt: skip


def _roots(
    ranks: dict[int, Dump],
    pending: dict[int, tuple[Group, Operation]],
    edges: dict[int, set[int]],
    groups: dict[int, dict[str, Group]],
) -> Culprit:
    waited_for = set().union(*edges.values()) if edges else set()
    roots = ordered(rank for rank in waited_for if rank not in pending or not edges.get(rank))
    longest = sorted(pending)
    if roots:
        first = next((r for r in longest if edges.get(r, set()) & set(roots)), longest[0])
        group, operation = pending[first]
        return Culprit(
            "missing", roots, ordered(set(pending) - set(roots)), operation.op, operation.seq,
            group[0], frame=own_frame(operation.frames), source="flight recorders",
            own_frame=_last_frame(ranks, roots),
        )  # fmt: skip
    if waited_for:  # everyone that is waited for waits too
        group, operation = pending[longest[0]]
        return Culprit(
            "cycle", ordered(waited_for), ordered(pending), operation.op, operation.seq, group[0],
            frame=own_frame(operation.frames), source="flight recorders",
        )  # fmt: skip
    group, operation = pending[longest[0]]
    members = set(group[1]) or {m for g in groups.values() for _, ms in g.values() for m in ms}
    absent = ordered(members - set(ranks))
    kind: Kind = "undecided" if absent else "inside"
    if len(absent) == 1 and len(pending) >= 2:
        return Culprit(
            "silent", absent, ordered(pending), operation.op, operation.seq, group[0],
            frame=own_frame(operation.frames), sure=False, source="flight recorders",
        )  # fmt: skip
    return Culprit(
        kind, (), ordered(pending), operation.op, operation.seq, group[0],
        frame=own_frame(operation.frames), source="flight recorders", among=absent,
    )  # fmt: skip


def _last_frame(ranks: dict[int, Dump], roots: tuple[int, ...]) -> str:
    """The line of the last thing that the root did, where its dump has one."""
    operations = ranks[roots[0]].operations if roots[0] in ranks else []
    last = max(operations, key=lambda o: (o.created, o.seq), default=None)
    return own_frame(last.frames) if last else ""
