"""Training steps in virtual time: forward and backward on one line, three lanes beside it.

The rules are those of `lanes` and `overlap`: buckets are issued in one fixed sequence, each when it
is complete and those before it were issued; every lane takes them in that order, one at a time.
Without overlap across the step, the next forward begins when all have landed; with it, forward
stops where it needs a bucket that has not landed, and backward begins when all have.
Steps are played until two follow each other at the same distance.

While an exchange is under way, computing is slower: a collective's kernel holds multiprocessors
that the model's kernels were cut for, and encoding and decoding take turns with them. So a bucket
has a `loss` besides its times: the share of computing that is lost during its exchange.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from evener.comm.profile import StepProfile

Stages = tuple[float, float, float]

_MOST_STEPS = 30
_EXCHANGE = 1
# Some progress is always made, or a step would never end.
_MOST_LOST = 0.95


@dataclass(frozen=True)
class Played:
    """What came out. `landed_ms[b]`: from the start of the last step's backward."""

    step_ms: float
    exposed_ms: float
    landed_ms: tuple[float, ...]


def play(
    profile: StepProfile,
    stages: Sequence[Stages],
    sequence: Sequence[int],
    overlap: bool,
    losses: Sequence[float] | None = None,
) -> Played:
    """The steady step; `stages[b]` are the times of bucket b, all in milliseconds.

    `losses[b]`: the share of computing lost during its exchange; None: the profile's, for all.
    """
    buckets = profile.buckets
    by_need = sorted(range(len(buckets)), key=lambda b: buckets[b].need_ms)
    landed = [0.0] * len(buckets)
    free = [0.0, 0.0, 0.0]
    compute = _Compute()
    length = backward = 0.0
    for _ in range(_MOST_STEPS):
        begin, done = compute.now, 0.0
        if overlap:
            for b in by_need:
                compute.work(buckets[b].need_ms - done)
                compute.wait(landed[b])
                done = buckets[b].need_ms
        compute.work(profile.forward_ms - done)
        backward, done = compute.now, 0.0
        for b in sequence:
            if buckets[b].ready_ms > done:
                compute.work(buckets[b].ready_ms - done)
                done = buckets[b].ready_ms
            at = compute.now  # those before it in the sequence were issued earlier
            for lane, took in enumerate(stages[b]):
                if took:
                    start = max(at, free[lane])
                    free[lane] = at = start + took
                    if lane == _EXCHANGE:
                        compute.slower(start, at, profile.drag if losses is None else losses[b])
            landed[b] = at
        compute.work(max(0.0, profile.backward_ms - done))
        if not overlap:
            compute.wait(max(landed, default=0.0))
        compute.work(profile.rest_ms)
        same = abs(compute.now - begin - length) < 1e-6 * (1 + length)
        length = compute.now - begin
        if same:
            break
    return Played(length, length - profile.compute_ms, tuple(end - backward for end in landed))


class _Compute:
    """The line on which forward and backward run: `now`, and when it is slower from here on."""

    def __init__(self) -> None:
        self.now = 0.0
        self._slower: deque[tuple[float, float, float]] = deque()

    def slower(self, start: float, end: float, lost: float) -> None:
        """From `start` to `end` the share `lost` of computing is lost. In ascending order."""
        if lost > 0:
            self._slower.append((start, end, 1.0 - min(lost, _MOST_LOST)))

    def wait(self, until: float) -> None:
        """Stand still."""
        self.now = max(self.now, until)

    def work(self, ms: float) -> None:
        """Compute what takes `ms` where nothing slows it down."""
        while self._slower:
            start, end, speed = self._slower[0]
            if end > self.now:
                if start > self.now:
                    before = min(ms, start - self.now)
                    self.now += before
                    ms -= before
                    if ms <= 0:
                        return
                whole = (end - self.now) * speed
                if ms <= whole:
                    self.now += ms / speed
                    return
                ms -= whole
                self.now = end
            self._slower.popleft()
        self.now += ms
