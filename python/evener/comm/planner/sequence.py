"""The order in which buckets leave: list scheduling, then better ones by trying them out.

List scheduling never idles while something is ready, and so may begin a bucket of 400 MB just
before small ones come that the next forward needs at once. Playing the step tells: the costliest
buckets are moved through the order as long as the step gets shorter.

Ranks keep to the order whatever happens. Where a bucket crosses faster than was thought, the
network idles until the next one in order is complete, although others are; where slower, a bucket
that is needed at once comes late. So an order must do well on a faster and a slower network too.
"""

from __future__ import annotations

from collections.abc import Sequence

from evener.comm.overlap.order import issue_order
from evener.comm.planner.simulate import Stages, play
from evener.comm.profile import StepProfile

_MOVED = 4
_ROUNDS = 3
# Shares of the times given, in all of which the order should do well.
_SURE = (1.0, 0.6, 1.5)
# Places that are tried for one bucket: enough for all of them in most models.
_TRIED = 48


def first_sequence(
    profile: StepProfile, stages: Sequence[Stages], overlap: bool
) -> tuple[int, ...]:
    """List scheduling; without overlap across the step simply as buckets become complete."""
    buckets = profile.buckets
    if not overlap:
        return tuple(sorted(range(len(buckets)), key=lambda b: (buckets[b].ready_ms, b)))
    return issue_order(
        [b.ready_ms for b in buckets], [b.need_ms for b in buckets], [max(s) for s in stages]
    )


def best_sequence(
    profile: StepProfile,
    stages: Sequence[Stages],
    overlap: bool,
    losses: Sequence[float] | None = None,
) -> tuple[int, ...]:
    """The order that makes the step shortest, of those that were tried; `losses`: see `play`."""
    if not overlap or len(stages) < 2:
        return first_sequence(profile, stages, overlap)
    guesses = [[(k * a, k * b, k * c) for a, b, c in stages] for k in _SURE]

    def steps(tried: Sequence[int]) -> float:
        return sum(play(profile, guess, tried, overlap, losses).step_ms for guess in guesses)

    best = first_sequence(profile, stages, overlap)
    least = steps(best)
    by_need = sorted(best, key=lambda b: (profile.buckets[b].need_ms, b))
    large = sorted(best, key=lambda b: -max(stages[b]))
    costly = large[:_MOVED]
    stride = -(-len(best) // _TRIED)
    listed = [first_sequence(profile, guess, overlap) for guess in guesses[1:]]
    # Some large ones fill the time until the small ones that are needed first are complete.
    counts = range(0, len(large), stride)
    ahead = [(*large[:count], *(b for b in by_need if b not in large[:count])) for count in counts]
    for tried in (*listed, *ahead):
        if (step := steps(tried)) < least - 1e-9:
            best, least = tried, step
    for _ in range(_ROUNDS):
        before = least
        for bucket in costly:
            rest = [b for b in best if b != bucket]
            for place in (*range(0, len(rest), stride), len(rest)):
                tried = (*rest[:place], bucket, *rest[place:])
                if (step := steps(tried)) < least - 1e-9:
                    best, least = tried, step
        if least == before:
            break
    return best
