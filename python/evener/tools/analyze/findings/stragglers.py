"""Ranks that are late, and ranks that stand apart: NCCL Inspector's times, RAS's counts."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from statistics import median

from evener.tools.analyze.evidence.records import Counts, Timing
from evener.tools.analyze.findings.base import KILLED, NAMED, UNDECIDED, Finding, check
from evener.tools.analyze.findings.who import ranks
from evener.tools.analyze.picture import Picture
from evener.tools.analyze.words import count

_SHARE = 0.5
_MARGIN = 0.05
_FEW = 5


@check({"cause.straggler": "a rank that arrives last in most collectives"})
def late(picture: Picture) -> Iterator[Finding]:
    """The rank that spends the least time inside collectives: the others wait for it there."""
    groups: dict[tuple[str, int, str], dict[int, Timing]] = defaultdict(dict)
    for timing in picture.run.evidence.timings:
        groups[timing.communicator, timing.seq, timing.op].setdefault(timing.rank, timing)
    last: Counter[int] = Counter()
    lags: dict[int, list[float]] = defaultdict(list)
    judged = 0
    places: dict[int, Timing] = {}
    for members in groups.values():
        size = max(t.ranks for t in members.values())
        if len(members) < 3 or len(members) < size * 0.75:
            continue
        judged += 1
        middle = median(t.micros for t in members.values())
        rank, timing = min(members.items(), key=lambda item: item[1].micros)
        lag = middle - timing.micros
        spread = median(abs(t.micros - middle) for t in members.values())
        if lag > _MARGIN * middle and lag > 3 * spread:
            last[rank] += 1
            lags[rank].append(lag)
            places.setdefault(rank, timing)
    if judged < _FEW or not last:
        return
    rank, times = last.most_common(1)[0]
    if times < _SHARE * judged:
        return
    timing = places[rank]
    host = f" on {timing.host}" if timing.host else ""
    yield Finding(
        "cause.straggler",
        "warning",
        f"rank {rank}{host} arrives last in {times / judged:.0%} of {judged} collectives: the "
        f"others "
        "wait for it",
        f"It spends the least time inside them, {median(lags[rank]) / 1000:.3g} ms less than the "
        "median rank: who comes last does not wait. The time that the others spend there is its "
        "delay, not the network's.",
        "measured",
        (timing.where,),
        f"See what rank {rank} does between collectives: its data loader, its CPU and memory "
        "(throttling, swap), clocks and temperature of its GPU, more work than the others "
        "(experts, "
        "sequence lengths).",
        "nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE; py-spy dump --pid PID",
        "Equal times on all ranks.",
        root=UNDECIDED,
    )


@check(
    {
        "cause.counts": "ranks whose count of collectives stands apart (NCCL RAS)",
        "cause.unresponsive": "a process that NCCL's RAS network does not reach",
    }
)
def apart(picture: Picture) -> Iterator[Finding]:
    """RAS: absent processes, then counts."""
    evidence = picture.run.evidence
    if evidence.absent:
        numbers = sorted({r for a in evidence.absent for r in a.ranks})
        dead = any(a.dead for a in evidence.absent)
        texts = list(dict.fromkeys(a.text for a in evidence.absent))
        state = "is dead: RAS cannot reach it" if dead else "does not answer RAS"
        who = ranks(numbers) if numbers else "a process"
        state = (
            state.replace("is dead", "are dead").replace("does", "do")
            if len(numbers) > 1
            else state
        )
        yield Finding(
            "cause.unresponsive",
            "problem",
            f"{who} {state}",
            "; ".join(texts[:5]) + ". The process ended, is stopped or swapped out, or its host is "
            "gone.",
            "measured",
            tuple(a.where for a in evidence.absent[:5]),
            "Look at that process and its host first.",
            "ps -o pid,stat,wchan,cmd -p PID; dmesg -T | tail -50    # on that node",
            "Every process answers.",
            root=KILLED,
        )
    counts = [c for c in evidence.counts if len(c.counts) > 1]
    if not counts:
        return
    newest = max(c.snapshot for c in counts)
    now = [c for c in counts if c.snapshot == newest]
    one = max(now, key=lambda c: max(c.counts) - min(c.counts))
    before = [
        c for c in counts
        if c.snapshot < newest and (c.communicator, c.op) == (one.communicator, one.op)
    ]  # fmt: skip
    yield _counts(one, before, max(evidence.snapshots, newest))


def _counts(one: Counts, before: list[Counts], snapshots: int) -> Finding:
    low, high = min(one.counts), max(one.counts)
    few_ahead = one.counts[high] <= one.counts[low]
    stands = any(set(b.counts) == set(one.counts) for b in before)
    moves = bool(before) and not stands
    named = one.named.get(high if few_ahead else low, ())
    op = one.op
    if few_ahead:
        who = ranks(named) if named else count(one.counts[high], "rank")
        verb = "is" if one.counts[high] == 1 else "are"
        title = (
            f"{who} {verb} {high - low} {op} ahead (operation {high}) of the "
            f"{one.counts[low]} others at {low}"
        )
        detail = (
            f"{count(one.counts[low], 'rank')} launched up to operation {low} of {op}, "
            f"{one.counts[high]} up to {high}. The ones that are further along wait for the "
            f"others. "
        )
    else:
        who = ranks(named) if named else count(one.counts[low], "rank")
        verb = "is" if one.counts[low] == 1 else "are"
        title = (
            f"{who} {verb} {high - low} {op} behind (operation {low}): "
            f"{one.counts[high]} others launched up to {high}"
        )
        detail = f"{count(one.counts[high], 'rank')} launched up to operation {high} of {op}. "
    if stands:
        title += (
            ", and it does not move: the late ones hold the job up"
            if few_ahead
            else ", and stands still"
        )
        detail += f"{snapshots} queries show the same counts: that is a hang. "
    elif moves:
        detail += "The counts grew between the queries: the job goes on. "
    else:
        detail += (
            "One snapshot is no proof of a hang: a job that runs has such differences for moments. "
        )
    return Finding(
        "cause.counts",
        "problem" if stands else "note" if moves else "warning",
        title,
        detail.strip(),
        "measured",
        (one.where,),
        "Look at the stack of a rank with the lowest count."
        if stands
        else "Ask again some seconds later: counts that stand still are a hang, and the ranks "
        "with the "
        "lowest count are then late.",
        "ncclras -v; sleep 10; ncclras -v    # the same counts twice: hung; then py-spy dump "
        "--pid PID",
        "Equal counts, or counts that grow.",
        root=NAMED if stands else UNDECIDED,
    )
