"""Ways to take a step, tried in the running job: what was faster is kept, not what seemed so.

A model of a network and of a step is wrong somewhere: a host that cannot launch as fast as a device
computes, a script that looks at gradients before its step, a collective library that is better than
the carrier. So after the planner has chosen, its choice is run for a few steps, beside DDP's own
way and what else may be faster, in turn, and the fastest stays.

This is the state machine: no clock, no collective. Whoever drives it runs `window`, says how long
each of its steps `took`, and reads `result` when there is no window left. All ranks drive it with
equal times, so all come to the same result.

    round 1    every way, a window each; one that cannot win by what was predicted gets one step
    later      those near the best, in turn forward and backward, so that a drift falls on all
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from evener.comm.planner.choose import Decision

# Steps at the start of a window that count for nobody: what the way before left is still landing.
SETTLE = 1
# A way that was predicted to take so many times as long as the best prediction gets one step.
FAR = 2.0
# Ways within this of the best measured one go on to the next round.
NEAR = 1.15
# Ways this close to the fastest are equal, and then the mildest of them is taken: at least, and at
# most, where the samples scatter by more.
EQUAL, MOST_EQUAL = 0.01, 0.05


@dataclass(frozen=True)
class Way:
    """One way to take a step. `harsh`: 0 where it is lossless; more, the more its forms leave out.

    `own`: the way of DDP itself.
    """

    name: str
    decision: Decision
    harsh: int = 0
    own: bool = False


@dataclass(frozen=True)
class Window:
    """The next steps: so many of way number `way` are to be timed, after `SETTLE`."""

    way: int
    steps: int


@dataclass(frozen=True)
class Result:
    """Milliseconds of each way's step; `kept`: the number of the one that stays."""

    kept: int
    ms: tuple[float, ...]


class Trial:
    """See the module. The first way is the planner's choice."""

    def __init__(self, ways: Sequence[Way], steps: int, rounds: int = 2) -> None:
        """`steps`: timed in each window, at least 1."""
        if not ways or steps < 1 or rounds < 1:
            raise ValueError(f"{len(ways)} ways, {steps} steps, {rounds} rounds: each must be 1")
        self.ways = tuple(ways)
        self.samples: list[list[float]] = [[] for _ in ways]
        self._steps, self._rounds = steps, rounds
        self._round = 0
        least = min(way.decision.step_ms for way in ways)
        self._queue = [
            Window(number, steps if way.decision.step_ms <= FAR * least else 1)
            for number, way in enumerate(ways)
        ]
        if len(ways) == 1:
            self._queue, self._round = [Window(0, steps)], rounds

    @property
    def window(self) -> Window | None:
        """What to run next; None when it is decided."""
        return self._queue[0] if self._queue else None

    def took(self, times: Sequence[float]) -> None:
        """The timed steps of `window` took so many milliseconds each. Equal on all ranks."""
        window = self._queue.pop(0)
        if len(times) != window.steps:
            raise ValueError(f"{len(times)} times for {window.steps} steps")
        self.samples[window.way] += times
        if self._queue:
            return
        self._round += 1
        figures = self.figures()
        near = [n for n, ms in enumerate(figures) if ms <= NEAR * min(figures)]
        if self._round < self._rounds and len(near) > 1:
            order = near if self._round % 2 == 0 else near[::-1]
            self._queue = [Window(number, self._steps) for number in order]

    def figures(self) -> tuple[float, ...]:
        """The median step of each way so far, in milliseconds; infinite where none was taken."""
        return tuple(statistics.median(s) if s else float("inf") for s in self.samples)

    @property
    def result(self) -> Result:
        """Which way stays: of those as fast as the fastest the mildest, and of these the first."""
        figures = self.figures()
        best = min(range(len(figures)), key=lambda n: figures[n])
        chosen = best
        for number, ms in enumerate(figures):
            within = max(_scatter(self.samples[best]), _scatter(self.samples[number]))
            equal = 1 + min(MOST_EQUAL, max(EQUAL, within))
            if ms <= equal * figures[best]:
                ahead = (self.ways[number].harsh, number) < (self.ways[chosen].harsh, chosen)
                chosen = number if ahead else chosen
        return Result(chosen, figures)


def _scatter(samples: Sequence[float]) -> float:
    """How far the median of these may be off, as a share of it: from the middle half of them."""
    if len(samples) < 3:
        return 0.0
    middle = statistics.median(samples)
    apart = statistics.median(abs(sample - middle) for sample in samples)
    # 1.4826 MAD is a standard deviation; a median's own is 1.25 of it over the root of n.
    return 1.25 * 1.4826 * apart / (len(samples) ** 0.5 * middle) if middle > 0 else 0.0


class Watch:
    """Says when a way that was kept has become slower than it was: then all are tried again.

    `look(ms)` now and then. After each new trial twice as many looks pass before the next, so a job
    whose steps change by themselves pays less and less for it.
    """

    STRIKES = 2
    SLOWER = 1.15
    _MOST = 64

    def __init__(self, ms: float) -> None:
        self._ms = ms
        self._strikes = 0
        self._wait = self._left = 0

    def look(self, ms: float) -> bool:
        """Whether to try again: `ms` is the second in a row that is longer by a good deal."""
        if self._left > 0:
            self._left -= 1
            return False
        self._strikes = self._strikes + 1 if ms > self.SLOWER * self._ms else 0
        return self._strikes >= self.STRIKES

    def tried(self, ms: float) -> None:
        """All were tried again; the one that stays takes `ms`."""
        self._ms, self._strikes = ms, 0
        self._wait = min(self._MOST, max(1, 2 * self._wait))
        self._left = self._wait
