"""Training steps in virtual time: forward and backward on one line, three lanes beside it.

The rules are those of `lanes` and `overlap`: buckets are issued in one fixed sequence, each when it
is complete and those before it were issued; every lane takes them in that order, one at a time.
Without overlap across the step, the next forward begins when all have landed; with it, forward
stops where it needs a bucket that has not landed, and backward begins when all have.
Steps are played until two follow each other at the same distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evener.comm.profile import StepProfile

Stages = tuple[float, float, float]

_MOST_STEPS = 30


@dataclass(frozen=True)
class Played:
    """What came out. `landed_ms[b]`: from the start of the last step's backward."""

    step_ms: float
    exposed_ms: float
    landed_ms: tuple[float, ...]


def play(
    profile: StepProfile, stages: Sequence[Stages], sequence: Sequence[int], overlap: bool
) -> Played:
    """The steady step; `stages[b]` are the times of bucket b, all in milliseconds."""
    buckets = profile.buckets
    by_need = sorted(range(len(buckets)), key=lambda b: buckets[b].need_ms)
    landed = [0.0] * len(buckets)
    free = [0.0, 0.0, 0.0]
    begin, length = 0.0, 0.0
    backward = 0.0
    for _ in range(_MOST_STEPS):
        now, done = begin, 0.0
        if overlap:
            for b in by_need:
                now = max(now + buckets[b].need_ms - done, landed[b])
                done = buckets[b].need_ms
        backward = now + profile.forward_ms - done
        issued = backward
        for b in sequence:
            issued = max(issued, backward + buckets[b].ready_ms)
            at = issued
            for lane, took in enumerate(stages[b]):
                if took:
                    free[lane] = at = max(at, free[lane]) + took
            landed[b] = at
        following = backward + profile.backward_ms
        if not overlap:
            following = max([following, *landed])
        following += profile.rest_ms
        same = abs(following - begin - length) < 1e-6 * (1 + length)
        begin, length = following, following - begin
        if same:
            break
    return Played(length, length - profile.compute_ms, tuple(end - backward for end in landed))
