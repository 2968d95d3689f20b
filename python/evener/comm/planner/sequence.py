"""The order in which buckets leave: list scheduling, then better ones by trying them out.

List scheduling never idles while something is ready, and so may begin a bucket of 400 MB just
before small ones come that the next forward needs at once. Playing the step tells: the costliest
buckets are moved through the order as long as the step gets shorter.
"""

from __future__ import annotations

from collections.abc import Sequence

from evener.comm.overlap.order import issue_order
from evener.comm.planner.simulate import Stages, play
from evener.comm.profile import StepProfile

_MOVED = 4
_ROUNDS = 3
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
    """The shortest step's order that was found; `losses`: see `play`."""
    best = first_sequence(profile, stages, overlap)
    if not overlap or len(best) < 2:
        return best
    least = play(profile, stages, best, overlap, losses).step_ms
    by_need = sorted(best, key=lambda b: (profile.buckets[b].need_ms, b))
    large = sorted(best, key=lambda b: -max(stages[b]))
    costly = large[:_MOVED]
    stride = -(-len(best) // _TRIED)
    for count in range(0, len(large), stride):
        # Some large ones fill the time until the small ones that are needed first are complete.
        ahead = large[:count]
        tried = (*ahead, *(b for b in by_need if b not in ahead))
        if (step := play(profile, stages, tried, overlap, losses).step_ms) < least - 1e-9:
            best, least = tried, step
    for _ in range(_ROUNDS):
        before = least
        for bucket in costly:
            rest = [b for b in best if b != bucket]
            for place in (*range(0, len(rest), stride), len(rest)):
                tried = (*rest[:place], bucket, *rest[place:])
                step = play(profile, stages, tried, overlap, losses).step_ms
                if step < least - 1e-9:
                    best, least = tried, step
        if least == before:
            break
    return best
