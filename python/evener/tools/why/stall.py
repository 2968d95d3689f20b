"""When a job stands still: no rank has made progress for much longer than ever before.

Progress is anything that moves on any rank: a step, a batch, an operation issued. How long a pause
may be follows from the job: ten of its usual steps, and three times the longest pause that it came
out of by itself (an evaluation, a checkpoint), but never below a floor. Before its third step (or,
where no optimizer of torch's steps, the twentieth look that saw progress) a job imports, sets up
and compiles, and may pause for ten floors, and two minutes at least.

Pure: the caller gives the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from statistics import median

STEPS = 10.0
PAUSES = 3.0
_WARM = 3
_MOVES = 20
_LONGEST = 1800.0
_START = 120.0


class Stall:
    """Feed it what is seen of a job; it says when the job stands still, once a stall."""

    def __init__(self, floor: float) -> None:
        """floor: seconds that any pause may last."""
        self._floor = floor
        self._progress: Hashable = None
        self._moved = -1.0
        self._said = False
        self._steps, self._stepped, self._moves = 0, -1.0, 0
        self._times: deque[float] = deque(maxlen=50)
        self._pauses: deque[float] = deque(maxlen=200)

    @property
    def usual(self) -> float:
        """Seconds of a usual step, 0 while none is known."""
        return median(self._times) if self._times else 0.0

    @property
    def limit(self) -> float:
        """Seconds that a pause may last now."""
        if not self._warm:
            return max(self._floor * 10, _START)
        longest = max(self._pauses, default=0.0)
        return min(max(self._floor, STEPS * self.usual, PAUSES * longest), _LONGEST)

    def see(self, now: float, progress: Hashable, step: int) -> bool:
        """What is seen at `now`: anything that changes with progress, and the furthest rank's step.

        True where the job stands still, once until it moves again.
        """
        if step > self._steps:
            if self._stepped >= 0 and not self._said:
                # Several steps between two looks: each took its part.
                self._times.append((now - self._stepped) / (step - self._steps))
            self._steps, self._stepped = step, now
        if progress != self._progress:
            if self._moved >= 0 and not self._said and self._warm:
                self._pauses.append(now - self._moved)
            self._moves += 1
            self._progress, self._moved, self._said = progress, now, False
            return False
        if self._said or now - self._moved < self.limit:
            return False
        self._said = True
        return True

    @property
    def _warm(self) -> bool:
        return self._steps >= _WARM or self._moves >= _MOVES

    def still(self, now: float) -> float:
        """Seconds since the last progress."""
        return now - self._moved if self._moved >= 0 else 0.0
