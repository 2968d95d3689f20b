"""A job seen from outside while it hung or crawled: states of processes, stacks, who is late.

What the kernel says of a process (stopped, gone, in a call that cannot be interrupted) comes first:
it needs no reasoning. Then the rank that the others wait for, with the line where it is. Nothing
here is said of a job that moved while it was looked at, but who is slow.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import median

from evener.tools.analyze.evidence.recorder import own_frame
from evener.tools.analyze.evidence.records import Evidence, Seen
from evener.tools.analyze.findings.base import (
    KILLED,
    NAMED,
    RAISED,
    UNDECIDED,
    Finding,
    check,
)
from evener.tools.analyze.findings.who import ranks, world_size
from evener.tools.analyze.picture import Picture
from evener.tools.analyze.stuck import Culprit, decide
from evener.tools.analyze.stuck.culprit import minority, ordered
from evener.tools.analyze.words import count

_MISSING = ("missing", "behind", "silent")
_STATES = (
    ("XZ", "cause.dead-rank"),
    ("Tt", "cause.suspended"),
    ("D", "cause.blocked"),
)
# What the frames of a rank that is missing say it does, innermost match first.
_DOING = (
    (re.compile(r"/torch/utils/data/|data_loader"), "data loader"),
    (re.compile(r"/torch/serialization\.py|/safetensors/|/checkpoint/"), "checkpoint"),
    (re.compile(r"/torch/_(?:dynamo|inductor)/|/triton/"), "compilation"),
    (re.compile(r"<frozen importlib"), "import"),
)
_SLOW_SHARE = 0.2
_MOSTLY = 0.7
_LOOKS = 15
_FULL = 0.9
_JUDGED = 15
_HICCUPS = 3
_EXCHANGE = re.compile(r"/torch/distributed/|/horovod/|/evener/(?:comm|horovod|net)/")
_DEEP = 6
_CLOCK = 2.0
_AGAIN = 2


@check(
    {
        "cause.suspended": "a rank's process is stopped (SIGSTOP, a debugger) and the others wait",
        "cause.blocked": "a rank is in a call of the kernel that does not return (disk, NFS)",
        "cause.link": "what a rank sends over TCP is not acknowledged, and is sent again and again",
        "cause.unseen": "a rank of which nothing is seen while the others wait",
        "cause.data-loader": "a rank waits for its data loader and the others for it",
        "cause.memory-limit": "a rank is at the limit of its memory cgroup",
        "cause.elsewhere": "no rank waits in a collective and none makes progress",
    }
)
def seen(picture: Picture) -> Iterator[Finding]:
    """Why a job that was seen from outside stands still."""
    evidence = picture.run.evidence
    if not evidence.seen or evidence.moving:
        return
    size = world_size(picture)
    by_rank = {one.rank: one for one in evidence.seen}
    if evidence.exits or evidence.raised:
        yield from _refused(evidence)
        return
    odd = list(_odd(evidence, size))
    yield from odd
    if odd:
        return
    culprit = _culprit(evidence, size)
    if culprit is not None and culprit.kind in _MISSING and culprit.ranks:
        yield _missing(culprit, by_rank)
    elif culprit is not None and culprit.source != "flight recorders":
        yield mismatch(culprit, size)
    elif culprit is None:
        yield from _together(evidence.seen)


def _culprit(evidence: Evidence, size: int) -> Culprit | None:
    """Recorders where they are sure of a name; then names that Horovod waits for; then stacks."""
    by_rank = {one.rank: one for one in evidence.seen}
    recorded = decide(evidence, size)
    if recorded and recorded.ranks and recorded.kind not in _MISSING:
        return recorded
    if (named := _submitted(evidence.seen)) is not None:
        return named
    if recorded and recorded.kind in _MISSING and by_rank.keys() >= set(recorded.ranks):
        return _crossed(recorded, by_rank) or recorded
    pending = set(recorded.waiting) if recorded else set()
    return _free(evidence.seen, pending) or recorded


def _crossed(found: Culprit, by_rank: dict[int, Seen]) -> Culprit | None:
    """Ranks that seem missing but wait for messages, which Gloo does not record: two orders."""
    if not all(_exchanges(by_rank[rank]) for rank in found.ranks):
        return None
    here, there = f"{found.op} {found.seq}", "a send or receive"
    few, many = (found.waiting, found.ranks), (here, there)
    if len(found.waiting) > len(found.ranks):
        few, many = (found.ranks, found.waiting), (there, here)
    return Culprit(
        "mismatch", ordered(few[0]), ordered(few[1]), found.op, found.seq, found.group, many[0],
        many[1], source="stacks and recorders",
        own_frame=_line(by_rank[few[0][0]].frames), frame=_line(by_rank[few[1][0]].frames)
        if few[1] and few[1][0] in by_rank else "",
    )  # fmt: skip


def _free(known: list[Seen], pending: set[int]) -> Culprit | None:
    """The ranks that wait for nobody while most others are in an exchange, by their stacks."""
    waiting = {one.rank for one in known if one.rank in pending or _exchanges(one)}
    free = {one.rank for one in known} - waiting
    if not free or not waiting or any(not one.frames for one in known if one.rank in free):
        return None
    if len(free) > len(waiting):
        return None
    return Culprit("missing", ordered(free), ordered(waiting), "an exchange", source="stacks")


def _exchanges(one: Seen) -> bool:
    return any(_EXCHANGE.search(frame) for frame in one.frames[:_DEEP])


def _refused(evidence: Evidence) -> Iterator[Finding]:
    """Horovod refused an operation because ranks brought different shapes: who is the odd one."""
    told = [one for one in evidence.raised if "Mismatched" in one.text]
    if not told:
        return
    names_ = {name for one in evidence.seen for name in one.submitted}
    for name in sorted(names_):
        sizes = {one.rank: one.submitted[name] for one in evidence.seen if name in one.submitted}
        if (found := minority(sizes)) is not None:
            odd, theirs, others = found
            rest = ordered(set(sizes) - set(odd))
            yield mismatch(
                Culprit(
                    "size", odd, rest, name, theirs=f"{theirs} elements",
                    others=f"{others} elements", where=tuple(one.where for one in told[:3]),
                    own_frame=told[0].line, source="what each rank submitted",
                ),
                len(evidence.seen),
            )  # fmt: skip
            return


def mismatch(culprit: Culprit, size: int) -> Finding:
    """A mismatch in the words of the other checks, before what follows from it."""
    from evener.tools.analyze.findings.mismatch import mismatch as speak

    return replace(speak(culprit, size), root=RAISED + 5)


def names(evidence: Evidence, culprit: Culprit | None) -> bool:
    """Whether a culprit was seen too, so that it can be said what it does."""
    known = {one.rank for one in evidence.seen}
    return bool(
        culprit and culprit.kind in _MISSING and culprit.ranks and known.issuperset(culprit.ranks)
    )


def explains(evidence: Evidence, culprit: Culprit, size: int) -> bool:
    """Whether this file says why the ranks of `culprit` wait, and better than their records."""
    if evidence.moving:
        return True
    if not evidence.seen or evidence.exits or evidence.raised:
        return False
    if culprit.kind in (*_MISSING, "inside", "undecided") and any(_odd(evidence, size)):
        return True
    found = _culprit(evidence, size)
    return (found is not None and found != culprit) or names(evidence, culprit)


def _odd(evidence: Evidence, size: int) -> Iterator[Finding]:
    """What needs no reasoning: processes that are gone, stopped or blocked, ranks not seen."""
    known = evidence.seen
    for letters, kind in _STATES:
        found = [one for one in known if one.state and one.state in letters]
        if kind == "cause.blocked":
            found = [one for one in found if not one.source]
        if kind == "cause.dead-rank" and (evidence.exits or len(found) == len(known)):
            continue
        if found:
            yield _state(kind, found, known)
            return
    if (lossy := _lossy(known)) is not None:
        yield lossy
        return
    world = max([size, *(one.world for one in known)])
    absent = ordered(set(range(world)) - {one.rank for one in known})
    watched = all(one.step >= 0 for one in known)  # of given processes nobody sees the others
    if absent and len(absent) < world and watched and not evidence.exits:
        yield Finding(
            "cause.unseen",
            "problem",
            f"nothing is seen of {ranks(absent)}, and the other {count(len(known), 'rank')} wait",
            "The other ranks have rings; these have none: their program did not start Python, is "
            "still before its first line, or their host does not answer.",
            "inferred",
            tuple(one.where for one in known[:3]),
            f"See whether the processes of {ranks(absent)} exist and their host answers.",
            "evener why HOST",
            "A ring of every rank.",
            root=NAMED,
        )


def _lossy(known: list[Seen]) -> Finding | None:
    """Connections between ranks whose bytes are sent again and again: a link or a host is gone."""
    ends = {end[0]: one.rank for one in known for end in one.connections}
    edges: dict[tuple[int, int], tuple[int, int]] = {}
    for one in known:
        for _, remote, unacked, again in one.connections:
            other = ends.get(remote, -1)
            if again >= _AGAIN and unacked > 0 and other not in (-1, one.rank):
                before = edges.get((one.rank, other), (0, 0))
                edges[one.rank, other] = (before[0] + unacked, max(before[1], again))
    if not edges:
        return None
    down = [one for one in known if one.down and any(one.rank in edge for edge in edges)]
    pairs = {frozenset(edge) for edge in edges}
    common = frozenset.intersection(*pairs)
    if down:
        who = ordered(one.rank for one in down)
    elif len(pairs) > 1 and len(common) == 1:
        who = ordered(common)
    else:
        who = ordered(rank for pair in pairs for rank in pair)
    by_rank = {one.rank: one for one in known}
    others = ordered({rank for edge in edges for rank in edge} - set(who))
    told = "; ".join(
        f"rank {a} to rank {b}: {unacked} bytes, sent again {again} times"
        for (a, b), (unacked, again) in sorted(edges.items())[:6]
    )
    host = by_rank[who[0]].host
    title = (
        f"the network of {ranks(who)} on {host} is cut: what is sent between it and "
        f"{ranks(others)} is not acknowledged"
        if others
        else f"the connection between {ranks(who)} is cut: what they send is not acknowledged"
    )
    if down:
        title = f"the network card {down[0].down[0]} of {ranks(who)} on {host} has no carrier"
    one = by_rank[who[0]]
    return Finding(
        "cause.link",
        "problem",
        title,
        f"The kernel's tables of connections say so: {told}. The processes run, and the order of "
        "collectives is not the cause.",
        "measured",
        tuple(by_rank[rank].where for rank in who[:5]),
        "Look at the card, its cable and its switch port, and at what filters packets between "
        "these hosts.",
        f"ip -s link; ss -tino; dmesg -T | grep -i link    # on {one.host}",
        "Connections whose retransmissions do not grow.",
        root=KILLED,
    )


def _state(kind: str, found: list[Seen], known: list[Seen]) -> Finding:
    who = ranks(one.rank for one in found)
    first = found[0]
    be = "is" if len(found) == 1 else "are"
    where = f"process {first.pid} on {first.host}" + (" and others" if len(found) > 1 else "")
    step = f", after step {first.step}" if first.step > 0 else ""
    others = ordered({one.rank for one in known} - {one.rank for one in found})
    wait = f", and {ranks(others)} wait for {'it' if len(found) == 1 else 'them'}" if others else ""
    if kind == "cause.suspended":
        by = f" by process {first.tracer}, which traces it" if first.tracer > 0 else ""
        title = f"{who} {be} stopped{by} ({where}){wait}"
        detail = (
            f"The kernel says so: state {first.state}{step}. A user or program sent SIGSTOP or "
            "SIGTSTP, a debugger holds it, or a batch system suspended the job."
        )
        do, command = "Let it go on.", f"kill -CONT {first.pid}    # on {first.host}"
    elif kind == "cause.dead-rank":
        title = f"{who} {be} gone ({where}){wait}"
        detail = f"The process ended{step}, and the others were not told."
        do = "Look at the end of its output, and whether the kernel killed it (out of memory)."
        command = f"dmesg -T | grep -iE 'killed process|{first.pid}'    # on {first.host}"
    else:
        title = f"{who} {be} blocked in the kernel ({where}){wait}"
        detail = (
            f"State D{step}{f', in {first.wchan}' if first.wchan else ''}: a disk, a file system "
            "of the network or a driver does not answer. No signal reaches it."
        )
        do = "See which file system or device it waits for."
        command = f"cat /proc/{first.pid}/stack; dmesg -T | tail -50    # on {first.host}"
    return Finding(
        kind, "problem", title, detail, "measured", tuple(one.where for one in found[:5]), do,
        command, "Every process runs or sleeps.", root=KILLED,
    )  # fmt: skip


def _full(one: Seen) -> Finding | None:
    """A rank whose memory cgroup is full: it looks for pages, and is killed soon."""
    used, limit = one.memory
    if limit <= 0 or used < _FULL * limit:
        return None
    return Finding(
        "cause.memory-limit",
        "problem",
        f"rank {one.rank} on {one.host} is at its memory limit: {used >> 20} of {limit >> 20} MiB "
        "(cgroup), and the others wait for it",
        f"Process {one.pid} looks for pages that it may use; it is slow, and the kernel ends it "
        f"when there are none. It is at {_line(one.frames) or 'a line that is not known'}.",
        "measured",
        (one.where,),
        "Give the job or container more memory, or let that rank use less: workers of its data "
        "loader, caches, checkpoints in memory.",
        f"cat /proc/{one.pid}/cgroup; dmesg -T | grep -i oom    # on {one.host}",
        "Memory in use stays below the limit.",
        root=KILLED,
    )


def _missing(culprit: Culprit, by_rank: dict[int, Seen]) -> Finding:
    """A rank that the others wait for, with what it does instead."""
    one = by_rank[culprit.ranks[0]]
    if (full := _full(one)) is not None:
        return full
    who, where = ranks(culprit.ranks), f"on {one.host}" if one.host else ""
    op = f"{culprit.op or 'a collective'}{f' {culprit.seq}' if culprit.seq >= 0 else ''}"
    doing, line = _doing(one), _line(one.frames)
    waiting = ranks(culprit.waiting) if culprit.waiting else "the others"
    at = f", at {line}" if line else ""
    where_else = [_line(by_rank[rank].frames) for rank in culprit.ranks[1:4] if rank in by_rank]
    detail = f"Process {one.pid}" + (f", step {one.step}" if one.step > 0 else "") + ": "
    if one.frames:
        detail += f"it is in {' < '.join(_short(f) for f in one.frames[:3])} ({one.source})."
    elif one.wchan:
        detail += f"no stack could be had; it sleeps in {one.wchan}."
    else:
        detail += "no stack could be had (install py-spy for the next time)."
    if culprit.frame:
        detail += f" {waiting.capitalize()} wait at {culprit.frame}."
    if any(where_else):
        detail += f" Other ranks that are missing: {', '.join(filter(None, where_else))}."
    if doing == "data loader":
        return Finding(
            "cause.data-loader",
            "problem",
            f"{who} {where} waits for its data loader{at}; {waiting} wait for it in {op}".replace(
                "  ", " "
            ),
            f"{detail} It has waited for a batch for {one.place_s:.0f} s."
            if one.place_s > 0 and one.place == "data loader"
            else detail,
            "measured",
            (one.where,),
            "Look at the workers of its data loader and at the storage that they read: a worker "
            "that died or blocks, a file that does not come, a lock. A time limit makes it an "
            "error: DataLoader(timeout=...).",
            f"ps --ppid {one.pid} -o pid,stat,wchan:30,cmd; py-spy dump --pid WORKER",
            "A batch in time, on every rank.",
            root=NAMED + 5,
        )
    what = f" ({doing})" if doing else ""
    return Finding(
        "cause.missing-rank",
        "problem",
        f"{who} {where} never joined {op}, in which {waiting} wait: elsewhere{at}{what}".replace(
            "  ", " "
        ),
        detail,
        "measured" if culprit.sure else "inferred",
        (one.where, *culprit.where[:4]),
        "See why that rank is there and the others are not: code that only some ranks run, a lock, "
        "a file, a service that does not answer. If it only takes long, let the others wait "
        "longer: init_process_group(timeout=...).",
        f"py-spy dump --pid {one.pid}    # on {one.host}",
        "All ranks call the same collectives in the same order.",
        root=NAMED + 5,
    )


def _submitted(known: Iterable[Seen]) -> Culprit | None:
    """Horovod: ranks that have not submitted a name that others wait for."""
    by_name: dict[str, set[int]] = defaultdict(set)
    by_rank = {one.rank: one for one in known}
    for one in by_rank.values():
        for name in one.pending:
            by_name[name].add(one.rank)
    open_ = {name: have for name, have in by_name.items() if len(have) < len(by_rank)}
    if not open_:
        return None
    name, have = max(open_.items(), key=lambda item: len(item[1]))
    late = ordered(set(by_rank) - have)
    theirs = sorted(n for n, who in open_.items() if who <= set(late))
    if theirs or all(_exchanges(by_rank[rank]) for rank in late):
        # The others are in an exchange too, so nobody is missing: the orders differ.
        there = theirs[0] if theirs else "another exchange"
        odd, rest, mine, other = late, ordered(have), there, name
        if len(late) > len(have):
            odd, rest, mine, other = ordered(have), late, name, there
        return Culprit(
            "mismatch", odd, rest, other, -1, theirs=mine, others=other,
            source="what Horovod waits for", own_frame=_line(by_rank[odd[0]].frames),
            frame=_line(by_rank[rest[0]].frames),
        )  # fmt: skip
    return Culprit("missing", late, ordered(have), name, source="what Horovod waits for")


def _together(known: list[Seen]) -> Iterator[Finding]:
    """No rank waits in a collective: all are somewhere else."""
    lines = {one.rank: _line(one.frames) for one in known}
    if not any(lines.values()):
        return
    loading = [one for one in known if _doing(one) == "data loader"]
    places = Counter(line for line in lines.values() if line)
    told = "; ".join(
        f"{ranks(r for r, line in lines.items() if line == place)}: {place}"
        for place, _ in places.most_common(4)
    )
    if loading:
        who = ranks(one.rank for one in loading)
        wait = "waits" if len(loading) == 1 else "wait"
        their = "its data loader" if len(loading) == 1 else "their data loaders"
        title = f"{who} {wait} for {their}, and no rank is in a collective"
    else:
        title = f"no rank is in a collective, and none makes progress: {told}"
    yield Finding(
        "cause.data-loader" if loading else "cause.elsewhere",
        "problem",
        title,
        f"Main threads: {told}.",
        "measured",
        tuple(one.where for one in known[:5]),
        "Look at what these lines wait for.",
        f"py-spy dump --pid {known[0].pid}    # on {known[0].host}",
        "Ranks that go on.",
        root=NAMED,
    )


@check({"cause.clock": "a rank's clock differs from its host's or from the others'"})
def clocks(picture: Picture) -> Iterator[Finding]:
    """Clocks that are off: nothing stops for it, but times of logs cannot be compared."""
    off = [one for one in picture.run.evidence.seen if abs(one.clock_off_s) > _CLOCK]
    if off:
        one = off[0]
        verb = "is" if len(off) == 1 else "are"
        yield Finding(
            "cause.clock",
            "warning",
            f"the clock of {ranks(o.rank for o in off)} {verb} {abs(one.clock_off_s):.0f} s "
            f"{'ahead' if one.clock_off_s > 0 else 'behind'} (process {one.pid} on {one.host})",
            "No collective depends on it. Time limits that compare clocks, tokens and the order of "
            "lines in logs do.",
            "measured",
            tuple(o.where for o in off[:5]),
            "Let all hosts take their time from one source.",
            "chronyc tracking    # or: timedatectl",
            "Clocks that agree within a second.",
            root=UNDECIDED - 1,
        )


@check({"cause.slow-rank": "a rank that issues collectives later than the others"})
def slow(picture: Picture) -> Iterator[Finding]:
    """The rank for which the others wait in most operations, by the recorders' times."""
    evidence = picture.run.evidence
    if not evidence.seen or not evidence.moving:
        return
    found = lateness(evidence)
    idle = busy(evidence.seen) if found is None else None
    if found is not None:
        rank, share, of_all = found
        how = f"{of_all:.0%} of all such waiting is for it (flight recorders)"
    elif idle is not None:
        rank, alone, share = idle
        how = f"it waits for nobody {alone:.0%} of the time (looks at its main thread)"
    else:
        return
    by_rank = {one.rank: one for one in evidence.seen}
    one = by_rank[rank]
    loads = {r: s.loader_s / s.up_s for r, s in by_rank.items() if s.up_s > 0 and s.loader_s >= 0}
    others = median([load for r, load in loads.items() if r != rank] or [0.0])
    line = _line(one.frames)
    host = f" on {one.host}" if one.host else ""
    loader = loads.get(rank, 0.0) > others + 0.5 * share and loads[rank] > 2 * others
    title = f"rank {rank}{host} is slow: the others wait for it {share:.0%} of the time"
    if loader:
        title += ", and it spends that in its data loader"
    detail = (
        f"{how.capitalize()}. "
        f"{f'Now it is at {line}. ' if line else ''}"
        f"In its data loader: {loads.get(rank, 0.0):.0%} of the time, the others {others:.0%}."
    )
    if one.swap > 1 << 20:
        detail += f" {one.swap >> 20} MiB of it are swapped out."
    yield Finding(
        "cause.slow-rank",
        "problem",
        title,
        detail,
        "measured",
        (one.where,),
        "See what that rank does more than the others: its input, its CPU (throttled, shared), its "
        "memory (swap), its GPU's clocks.",
        f"py-spy top --pid {one.pid}; nvidia-smi -q -d PERFORMANCE,CLOCK    # on {one.host}",
        "No rank is last in most collectives.",
        root=NAMED,
    )


def lateness(evidence: Evidence) -> tuple[int, float, float] | None:
    """(rank, share of the time for which the others wait for it, share of operations in which it is
    last), None where nobody stands out."""
    off = {one.rank: one.clock_off_s for one in evidence.seen}
    issued: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for dump in evidence.dumps:
        for operation in dump.operations:
            if not operation.p2p and operation.seq >= 0 and operation.created > 0:
                at = operation.created / 1e9 - off.get(dump.rank, 0.0)
                issued[operation.group, operation.seq].setdefault(dump.rank, at)
    size = len(off)
    whole = [times for times in issued.values() if len(times) == size > 1]
    if len(whole) < _JUDGED:
        return None
    waits: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for times in whole:
        before, last = sorted(times.values())[-2:]
        waits[max(times, key=times.__getitem__)].append((before, last))
    # Without each rank's longest: starting, a checkpoint and a hiccup make no slow rank.
    usual = {
        rank: sorted(spans, key=lambda span: span[1] - span[0])[:-_HICCUPS]
        for rank, spans in waits.items()
    }
    costs = {rank: _union(spans) for rank, spans in usual.items()}
    rank = max(costs, key=costs.__getitem__)
    begin = min(min(times.values()) for times in whole)
    end = max(max(times.values()) for times in whole)
    share = costs[rank] / max(end - begin, 1e-9)
    of_all = costs[rank] / max(sum(costs.values()), 1e-9)
    if len(waits[rank]) < _JUDGED or share < _SLOW_SHARE or of_all < _MOSTLY:
        return None
    return rank, share, of_all


def busy(known: list[Seen]) -> tuple[int, float, float] | None:
    """(rank, share of the time in which it waits for nobody, the least that the others wait), by
    looks at its main thread: for pipelines, whose messages no recorder of Gloo keeps."""
    shares = {one.rank: one.waiting / one.looks for one in known if one.looks >= _LOOKS}
    if len(shares) < max(len(known), 2):
        return None
    rank, *others = sorted(shares, key=shares.__getitem__)
    if shares[rank] > 0.35 or shares[others[0]] < 0.6:
        return None
    return rank, 1 - shares[rank], shares[others[0]]


def _union(spans: list[tuple[float, float]]) -> float:
    """Seconds that are in any of the spans: operations that wait together are counted once."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        if end > until:
            total += end - max(begin, until)
            until = end
    return total


def _doing(one: Seen) -> str:
    if one.place == "data loader":
        return one.place
    for frame in one.frames:
        for pattern, what in _DOING:
            if pattern.search(frame):
                return what
    return ""


def _line(frames: tuple[str, ...]) -> str:
    """`train.py:41 (step)` of the innermost frame outside of libraries."""
    own = own_frame(frames)
    place, _, name = own.partition(" ")
    return f"{_short(place)} ({name})" if name and name != "<module>" else _short(place)


def _short(frame: str) -> str:
    """A frame with the last two parts of its path."""
    place, space, name = frame.partition(" ")
    return "/".join(place.rsplit("/", 2)[-2:]) + space + name
