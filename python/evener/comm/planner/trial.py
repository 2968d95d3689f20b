"""Ways to take a step, tried in the running job: what was faster is kept, not what seemed so.

A model of a network and of a step is wrong somewhere: a host that cannot launch as fast as a device
computes, a script that looks at gradients before its step, a collective library that is better than
the carrier. So after the planner has chosen, its choice is run for a few steps, beside DDP's own
way and what else may be faster, in turn, and the fastest stays.

This is the state machine: no clock, no collective. Whoever drives it runs `window`, says how long
each of its steps `took`, and reads `result` when there is no window left. All ranks drive it with
equal times, so all come to the same result.

    round 1    every way, a turn each. Memory is allocated in it, and connections wake up: it only
               tells who goes on
    2 and 3    those near the best, in turn forward and backward, so that a drift falls on all
    later      those between which the noise of so few steps does not decide, until it does, or for
               `_MOST_ROUNDS`: what is kept must not be slower than what was given up, and a lossy
               form must win by more than noise

A slow way costs the job seconds in each of its steps. So its turn begins with one step that counts.
Where that step and the one before it are both far behind the best, the turn ends there, and the way
with it. And of long steps fewer settle: what disturbs the first ones (memory, launches) takes
milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evener.comm.planner.choose import Decision
from evener.comm.planner.turns import Turns

# Steps at the start of a window that count for nobody: what the way before left is still landing.
# Where a step takes `_LONG_MS` or more, one less.
SETTLE, _LONG_MS = 2, 50.0
# DDP's own reducer is made anew: its first step has one bucket, the second makes the others.
_REBUILDS = 2
# A way that was predicted to take this many times as long as the best prediction gets one step.
FAR = 2.0
# Ways within this of the best measured one go on to the next round. After the first round more do:
# it has allocations and connections in it, most of all those of DDP's own reducer, which is new.
NEAR, NEAR_FIRST = 1.25, 1.6
# Ways this close to the fastest are equal, and then the mildest of them is taken: at least, and at
# most, where the samples scatter by more.
EQUAL, MOST_EQUAL = 0.01, 0.05
# A difference of two ways that is known to this is known well enough.
_KNOWN = 0.02
_MOST_ROUNDS = 9


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
    """The next steps: `settle` of way number `way`, then `steps` that count.

    `more`: the number that follow, unless the way is seen to be far behind.
    """

    way: int
    settle: int
    steps: int
    more: int = 0


@dataclass(frozen=True)
class Result:
    """Milliseconds of each way's step, see `turns`; `kept`: the number of the one that stays."""

    kept: int
    ms: tuple[float, ...]


class Trial:
    """See the module. The first way is the planner's choice."""

    def __init__(self, ways: Sequence[Way], steps: int, rounds: int = 3) -> None:
        """`steps`: timed in each window, at least 1."""
        if not ways or steps < 1 or rounds < 1:
            raise ValueError(f"{len(ways)} ways, {steps} steps, {rounds} rounds: each must be 1")
        self.ways = tuple(ways)
        self.turns = Turns(len(ways))
        self._steps, self._rounds = steps, rounds
        self._round = 0
        self._queue: list[Window] = []
        self._last = -1
        self._begin(range(len(ways)), steps)

    @property
    def window(self) -> Window | None:
        """What to run next; None when it is decided."""
        return self._queue[0] if self._queue else None

    def took(self, times: Sequence[float]) -> None:
        """The steps of `window` took this many milliseconds each. Equal on all ranks."""
        window = self._queue.pop(0)
        if len(times) != window.settle + window.steps:
            raise ValueError(f"{len(times)} times for {window.settle} + {window.steps} steps")
        least = NEAR if self._round else NEAR_FIRST
        seen = min(times[max(0, window.settle - 1) :])
        behind = seen > least * min(self.figures())
        self.turns.add(self._round + 1, window.way, times[window.settle :])
        if window.more and not behind:
            self._queue.insert(0, Window(window.way, 0, window.more))
        if self._queue:
            return
        self._round += 1
        figures = self.figures()
        best = min(range(len(figures)), key=lambda n: figures[n])
        near = [
            n
            for n in range(len(figures))
            if self._at_least(n) <= max(least, 1 + self._margin(best, n)) * figures[best]
        ]
        steps = self._steps
        if self._round >= self._rounds:
            near = self._undecided(figures) if self._round < _MOST_ROUNDS else []
            steps *= 2  # the steps in which a way settles are the same
        if len(near) > 1:
            self._last = window.way
            self._begin(near if self._round % 2 == 0 else near[::-1], steps)

    def _begin(self, order: Sequence[int], steps: int) -> None:
        """A round, in which each of these ways has a turn of `steps` steps."""
        first = self._round == 0
        figures = [way.decision.step_ms for way in self.ways] if first else self.figures()
        least = min(figures)
        for place, number in enumerate(order):
            ms = figures[number]
            long = ms >= _LONG_MS
            settle = SETTLE - long
            if number == self._last:
                settle -= 1
            elif self.ways[number].decision.library:
                settle += _REBUILDS - long
            if first and ms > FAR * least:
                self._queue.append(Window(number, settle, 1))
            # The first turn of all has no other yet that it could be behind.
            elif (place if first else ms > NEAR * least) and steps > 1:
                self._queue.append(Window(number, settle, 1, steps - 1))
            else:
                self._queue.append(Window(number, settle, steps))

    def figures(self) -> tuple[float, ...]:
        """A step of each way so far, in milliseconds; infinite where none was taken."""
        return self.turns.figures()

    def _undecided(self, figures: Sequence[float]) -> list[int]:
        """Ways that may be as fast as the fastest, where it is not known well whether they are.

        What would be kept now may be slower than another of them by `_KNOWN`, by chance.
        """
        best = min(range(len(figures)), key=lambda n: figures[n])
        margins = [self._margin(best, n) for n in range(len(figures))]
        within = [
            n for n, more in enumerate(margins) if self._at_least(n) <= (1 + more) * figures[best]
        ]
        kept = self._kept(figures)
        ahead = {n: max(0.0, figures[n] / figures[kept] - 1) for n in within if n != kept}
        risky = any(self._margin(kept, n) > _KNOWN + gain / 2 for n, gain in ahead.items())
        return within if risky else []

    def _at_least(self, way: int) -> float:
        """What a step of it takes, in milliseconds; where one turn may be wrong, by the other."""
        turns = self.turns.of(way)
        ms = self.figures()[way]
        return ms if len(turns) > 2 else min(ms, self.turns.least(way))

    def _margin(self, one: int, other: int) -> float:
        """By how much the figures of two ways may differ by chance, as a share of them."""
        return max(EQUAL, 2 * self.turns.noise(one, other))

    @property
    def result(self) -> Result:
        """Which way stays: of those as fast as the fastest the mildest, of these the fastest."""
        figures = self.figures()
        return Result(self._kept(figures), figures)

    def _kept(self, figures: Sequence[float]) -> int:
        best = min(range(len(figures)), key=lambda n: figures[n])
        chosen = best
        for number, ms in enumerate(figures):
            margin = min(MOST_EQUAL, self._margin(best, number))
            if ms <= (1 + margin) * figures[best]:
                ahead = (self.ways[number].harsh, ms) < (self.ways[chosen].harsh, figures[chosen])
                chosen = number if ahead else chosen
        return chosen


class Watch:
    """Says when a way that was kept has become slower than it was: then all are tried again.

    `look(ms)` now and then. After each new trial twice as many looks pass before the next, so a job
    whose steps change by themselves spends less and less time on it.
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
