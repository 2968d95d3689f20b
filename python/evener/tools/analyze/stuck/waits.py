"""From watchdog texts: each rank says in which operation of which group it waited.

A rank that waits reports; the one that is missing does not, or reports a lower number or another
operation. Silence is a weaker sign than a number: a log may be missing too.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from evener.tools.analyze.evidence.records import Beat, Desync, Wait
from evener.tools.analyze.stuck.culprit import Culprit, Kind, minority, ordered, split
from evener.tools.analyze.words import ranges

# Operations whose ranks may bring different sizes.
_UNEVEN = ("ALLTOALL", "SCATTER", "GATHER", "SEND", "RECV", "COALESCED", "BARRIER", "UNKNOWN")
# Messages between two ranks count in a series of their own.
_MESSAGES = ("SEND", "RECV", "COALESCED")
_EVEN = ("_REDUCE_SCATTER_BASE", "_ALLGATHER_BASE")
# One side of these holds what the other does, once for each rank of the group.
_SHARED = (*_EVEN, "REDUCE_SCATTER", "ALLGATHER")


def even(op: str) -> bool:
    """Whether all ranks of an operation bring the same number of elements."""
    op = op.upper()
    return op in _EVEN or not any(word in op for word in _UNEVEN)


def reported(desyncs: list[Desync], waits: list[Wait]) -> Culprit | None:
    """What a report names itself."""
    said = {wait.rank for wait in waits}
    came = {d.ranks[0] for d in desyncs if d.kind == "reached"}
    behind = [d for d in desyncs if d.kind == "behind" and set(d.ranks) - came]
    behind = [replace(d, ranks=tuple(r for r in d.ranks if r not in came)) for d in behind]
    if came and not behind:
        return _barrier(desyncs, came)
    if behind:
        lowest = min(d.last for d in behind)
        first = [d for d in behind if d.last == lowest]
        ranks = ordered(r for d in first for r in d.ranks)
        return Culprit(
            "missing", ranks, ordered(said - set(ranks)), first[0].op,
            lowest + 1 if lowest >= 0 else -1, where=tuple(d.where for d in first[:3]),
            source="the report of a rank that waited",
            waited_ms=max((w.waited_ms for w in waits), default=-1),
        )  # fmt: skip
    for one in desyncs:
        if one.kind == "mismatch":
            return Culprit(
                "mismatch", one.ranks, (), "", -1, theirs=one.op, others=one.others,
                where=(one.where,), source="TORCH_DISTRIBUTED_DEBUG=DETAIL", sure=False,
            )  # fmt: skip
    return None


def _barrier(desyncs: list[Desync], came: set[int]) -> Culprit:
    """Ranks that came to a monitored barrier: the one that they missed there, if it was silent."""
    reached = [d for d in desyncs if d.kind == "reached"]
    missed = {d.ranks[1] for d in reached} - came
    blamed = any(d.kind == "behind" for d in desyncs)  # it spoke: it was there
    came = came | missed if blamed else came
    return Culprit(
        "undecided" if blamed else "silent", () if blamed else ordered(missed), ordered(came),
        "BARRIER", -1, where=tuple(d.where for d in reached[:5]), sure=False, source="ranks",
        theirs="the one that is said to be missing says that it came: too late, or Gloo does not "
        "connect the two" if blamed else "",
    )  # fmt: skip


def told(waits: list[Wait], idle: dict[int, Wait]) -> Culprit | None:
    """Ranks that another one told of the hang, and that never enqueued what the others wait in."""
    seqs = {wait.seq for wait in waits}
    if len(seqs) != 1 or len({wait.group for wait in waits if wait.group}) > 1:
        return None
    (seq,) = seqs
    members = {wait.rank: wait for wait in waits if not wait.local}
    group = next((wait.group for wait in waits if wait.group), "")
    late = {
        rank: wait for rank, wait in idle.items()
        if rank not in members and wait.enqueued < seq and wait.group in ("", group)
    }  # fmt: skip
    if not late or len(late) > len(members) or seq < 0:
        return None
    shown = {**members, **late}
    return _culprit("behind", shown, ordered(late), group, seq, "", "")


def waited(
    waits: list[Wait],
    world: int,
    seen: set[int],
    victims: set[int] = frozenset(),  # type: ignore[assignment]
) -> Culprit | None:
    """What the watchdogs' lines carry. `seen` are ranks that left any line."""
    if not waits:
        return None
    groups: dict[str, dict[int, Wait]] = defaultdict(dict)
    for wait in waits:
        group = "(local) " + wait.group if wait.local else wait.group
        known = groups[group].get(wait.rank)
        if known is None or 0 <= wait.seq < known.seq:
            groups[group][wait.rank] = wait
    _join_unnamed(groups)
    answers = []
    for group, members in groups.items():
        answers += [
            answer
            for answer in (
                _differs(members, group),
                _behind(members, group),
                _ahead(members, group),
            )
            if answer is not None
        ]
    if answers:
        return min(answers, key=lambda a: (len(a.ranks) == 0, -len(a.waiting)))
    return _silent(groups, world, seen, victims)


def _join_unnamed(groups: dict[str, dict[int, Wait]]) -> None:
    """Lines that name no group belong to the only one that is named, where there is one."""
    named = [name for name in groups if name]
    if "" in groups and len(named) == 1:
        for rank, wait in groups.pop("").items():
            groups[named[0]].setdefault(rank, wait)


def _differs(members: dict[int, Wait], group: str) -> Culprit | None:
    """Ranks that wait in another operation, or with another size, under the same number."""
    by_seq: dict[int, dict[int, Wait]] = defaultdict(dict)
    for rank, wait in members.items():
        if wait.op and wait.seq >= 0:
            by_seq[wait.seq][rank] = wait
    for seq, ranks in sorted(by_seq.items()):
        if len(ranks) < 2:
            continue
        ops = {rank: wait.op for rank, wait in ranks.items()}
        if any(op in _MESSAGES for op in ops.values()):
            continue  # messages: each rank's own, under numbers of their own
        if found := minority(ops):
            odd, theirs, others = found
            return _culprit("mismatch", ranks, odd, group, seq, theirs, others)
        if split(ops):
            return _culprit("mismatch", ranks, (), group, seq, "", _each(ops))
        op = next(iter(ops.values()))
        sizes = {r: w.numel_in for r, w in ranks.items() if w.numel_in >= 0}
        if op.upper() in ("REDUCE_SCATTER", "ALLGATHER") or not even(op) or len(sizes) < 2:
            continue
        if found_sizes := minority(sizes):
            odd, his, rest = found_sizes
            return _culprit("size", ranks, odd, group, seq, f"{his} elements", f"{rest} elements")
        if split(sizes):
            return _culprit("size", ranks, (), group, seq, "", _each(sizes, " elements"))
    return None


def _each(values: dict[int, object] | dict[int, str] | dict[int, int], unit: str = "") -> str:
    parts = []
    for value in dict.fromkeys(values.values()):
        ranks = [rank for rank, other in values.items() if other == value]
        parts.append(f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}: {value}{unit}")
    return "; ".join(parts[:6])


def _collectives(members: dict[int, Wait]) -> dict[int, Wait]:
    """Waits whose numbers can be compared; none where any rank waits for a message."""
    if any(wait.op in _MESSAGES for wait in members.values()):
        return {}
    return {rank: wait for rank, wait in members.items() if wait.seq >= 0}


def _behind(members: dict[int, Wait], group: str) -> Culprit | None:
    """Ranks that never enqueued what others wait in, or wait in an earlier operation."""
    waiting = _collectives(members)
    if len(waiting) < 2:
        return None
    seqs = {rank: wait.seq for rank, wait in waiting.items()}
    top = max(seqs.values())
    low = {rank for rank, wait in waiting.items() if 0 <= wait.enqueued < top}
    low = low or {rank for rank, seq in seqs.items() if seq < top and waiting[rank].enqueued < 0}
    rest = {rank: wait for rank, wait in waiting.items() if rank not in low}
    if not low or len(low) >= len(rest) or len({wait.seq for wait in rest.values()}) != 1:
        return None
    return _culprit("behind", waiting, ordered(low), group, top, "", "")


def _ahead(members: dict[int, Wait], group: str) -> Culprit | None:
    """Ranks that finished the operation in which all the others wait: theirs was another one."""
    waiting = _collectives(members)
    low = min((wait.seq for wait in waiting.values()), default=-1)
    ahead = {r for r, wait in waiting.items() if wait.completed >= low and wait.seq > low}
    rest = {rank: wait for rank, wait in waiting.items() if rank not in ahead}
    if not ahead or len(ahead) >= len(rest) or {w.seq for w in rest.values()} != {low}:
        return None
    one = waiting[min(ahead)]
    return _culprit(
        "ahead", waiting, ordered(ahead), group, low, f"{one.op or 'collective'} {one.seq}", "",
        sure=False,
    )  # fmt: skip


def _silent(
    groups: dict[str, dict[int, Wait]], world: int, seen: set[int], victims: set[int]
) -> Culprit:
    """Nobody differs: the ranks that did not report, where those that did are nearly all."""
    name, members = max(groups.items(), key=lambda item: len(item[1]))
    everyone = set().union(*[set(m) for g, m in groups.items() if not g.startswith("(local)")])
    everyone |= victims
    local = name.startswith("(local)")
    size = max(world, *map(_size, members.values()), *(r + 1 for r in (everyone | seen) or {0}))
    missing = set(range(size)) - everyone
    seqs = {wait.seq for wait in members.values()}
    if len(missing) == 1 and len(everyone) >= 2 and not local and len(everyone) == size - 1:
        alike = len(groups) == 1 and len(seqs) == 1
        waiting = members if alike else {rank: Wait(rank, 0) for rank in everyone}
        shown = {r: w for m in groups.values() for r, w in m.items()}
        found = _culprit("silent", waiting, ordered(missing), "", min(seqs), "", "", sure=False)
        if alike:
            return replace(found, group=name)
        longest = max(w.waited_ms for w in shown.values())
        return replace(
            found, seq=-1, where=tuple(w.where for w in list(shown.values())[:5]), waited_ms=longest
        )
    if len(groups) > 1 and not local:
        members = {r: w for m in groups.values() for r, w in m.items()}
        return replace(
            _culprit("undecided", members, (), "", -1, "", "", among=ordered(missing)), op=""
        )
    if local or not everyone:
        return _culprit("undecided", members, (), name, -1, "", "")
    if not missing and size == len(everyone) and world >= len(everyone) and len(seqs) == 1:
        return _culprit("inside", members, (), name, min(seqs), "", "")
    few = len(missing) == 1 or len(missing) * 4 <= size
    if missing and few and len(everyone) >= 2 and len(seqs) == 1 and len(groups) == 1:
        return _culprit("silent", members, ordered(missing), name, min(seqs), "", "", sure=False)
    one = min(seqs) if len(seqs) == 1 else -1
    inside = {r: f"{w.op} {w.seq}" for r, w in members.items() if w.op and w.seq >= 0}
    apart = "" if one >= 0 else f"they do not wait in the same operation ({_each(inside)})"
    found = _culprit("undecided", members, (), name, one, apart, "", among=ordered(missing))
    return found if one >= 0 else replace(found, op="")


def _size(wait: Wait) -> int:
    """Ranks of the group, from the elements of one that gathers or scatters; 0 where none tells."""
    few, many = sorted((wait.numel_in, wait.numel_out))
    shared = wait.op.upper() in _SHARED and few > 0 and many % few == 0
    return many // few if shared and many // few <= 200_000 else 0


def _culprit(
    kind: Kind,
    members: dict[int, Wait],
    ranks: tuple[int, ...],
    group: str,
    seq: int,
    theirs: str,
    others: str,
    sure: bool = True,
    among: tuple[int, ...] = (),
) -> Culprit:
    rest = {rank: wait for rank, wait in members.items() if rank not in ranks}
    shown = [members[r] for r in ranks if r in members] + list(rest.values())
    longest = max((w.waited_ms for w in members.values()), default=-1)
    op = next((w.op for w in rest.values() if w.op), "")
    return Culprit(
        kind, ranks, ordered(rest), op, seq, group.removeprefix("(local) "), theirs, others,
        where=tuple(w.where for w in shown[:5]), sure=sure, source="watchdogs", waited_ms=longest,
        among=among,
    )  # fmt: skip


def beaten(beats: dict[int, Beat], world: int) -> Culprit | None:
    """What heartbeat monitors carry: the rank with the fewest works outstanding stopped first."""
    if not beats:
        return None
    known = {r: b.outstanding for r, b in beats.items() if b.outstanding >= 0 and r >= 0}
    where = tuple(b.where for b in list(beats.values())[:5])
    found = minority(known) if len(known) > 2 else None
    if found and all(known[rank] < found[2] for rank in found[0]):
        ranks = ordered(found[0])
        least = tuple(r for r in ranks if known[r] == min(known.values()))
        return Culprit(
            "behind", least, ordered(set(known) - set(least)), where=where, sure=False,
            theirs=f"{known[least[0]]} works outstanding", others=f"{found[2]}",
            source="heartbeat monitors",
        )  # fmt: skip
    size = max(world, *(r + 1 for r in beats), 0)
    missing = set(range(size)) - set(beats)
    if len(missing) == 1 and len(beats) >= 2:
        return Culprit(
            "silent", ordered(missing), ordered(beats), where=where, sure=False,
            source="heartbeat monitors",
        )  # fmt: skip
    return Culprit(
        "undecided", (), ordered(beats), where=where, source="heartbeat monitors",
        among=ordered(missing), waited_ms=1000 * max(b.seconds for b in beats.values()),
    )  # fmt: skip
