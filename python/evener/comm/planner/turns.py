"""What several ways to take a step cost, from steps that were taken in turn.

A host that other programs use is slow for seconds and fast for seconds, by far more than the ways
differ. So they take turns of a few steps, and a turn's time is read as the way's own times that of
the round, in which each way has had its turn: a two-way fit as Tukey's "median polish" (Exploratory
Data Analysis, 1977), with the mean of the middle half instead of the median, which is as deaf to
a step that something delayed and takes about three quarters of the steps. What is left over is
noise, and says how well a difference is known; steps that follow each other are no independent
witnesses, so turns are counted, not steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_PASSES = 12
# A normal distribution's standard deviation over its mean absolute deviation; over its median one;
# and that of `middle` over that of the mean (of three values, the worst case).
_MEAN_AWAY, _MEDIAN_AWAY, _MIDDLE = 1.2533, 1.4826, 1.16


def middle(values: Iterable[float]) -> float:
    """The mean of the middle half of them; at least one is cut from each end of three and more."""
    ordered = sorted(values)
    if len(ordered) < 3:
        return statistics.fmean(ordered)
    cut = max(1.0, len(ordered) / 4)
    whole = int(cut)
    inner = ordered[whole : len(ordered) - whole]
    if len(inner) < 2:
        return inner[0]
    edge = 1 - (cut - whole)
    total = math.fsum(inner[1:-1]) + edge * (inner[0] + inner[-1])
    return total / (len(inner) - 2 + 2 * edge)


@dataclass(frozen=True)
class _Turn:
    round: int
    way: int
    times: tuple[float, ...]

    @property
    def log(self) -> float:
        return math.log(max(middle(self.times), 1e-9))


class Turns:
    """Those of one trial, of `ways` ways.

    The first round tells of a way only where it has no other turn: memory is allocated in it.
    """

    def __init__(self, ways: int) -> None:
        self.ways = ways
        self.turns: list[_Turn] = []
        # What follows from them, until there is another.
        self._fitted: tuple[dict[int, float], float] | None = None
        self._figures: tuple[float, ...] | None = None

    def add(self, round_: int, way: int, times: Sequence[float]) -> None:
        """In that round (from 1) that way's steps took this many milliseconds each.

        What comes right after a turn of the same round and way belongs to it.
        """
        if self.turns and (self.turns[-1].round, self.turns[-1].way) == (round_, way):
            times = (*self.turns.pop().times, *times)
        self.turns.append(_Turn(round_, way, tuple(times)))
        self._fitted = self._figures = None

    def of(self, way: int) -> list[_Turn]:
        """Its turns that count."""
        mine = [turn for turn in self.turns if turn.way == way]
        return [turn for turn in mine if turn.round > 1] or mine

    def figures(self) -> tuple[float, ...]:
        """Milliseconds of each way's step in an ordinary round; infinite where none was taken."""
        if self._figures is not None:
            return self._figures
        fitted, _ = self._fit()
        found = []
        for way in range(self.ways):
            samples = [ms for turn in self.of(way) for ms in turn.times]
            if not samples:
                found.append(math.inf)
            elif way in fitted:
                found.append(min(max(math.exp(fitted[way]), min(samples)), max(samples)))
            else:
                found.append(middle(samples))
        self._figures = tuple(found)
        return self._figures

    def least(self, way: int) -> float:
        """Milliseconds of its steps in the turn in which they were shortest, the first counted."""
        return min(middle(turn.times) for turn in self.turns if turn.way == way)

    def noise(self, one: int, other: int) -> float:
        """The standard error of the difference of two ways' figures, as a share of them."""
        turns = [len(self.of(way)) for way in (one, other)]
        if not all(turns):
            return 0.0
        return _MIDDLE * self._fit()[1] * math.sqrt(sum(1 / count for count in turns))

    def _fit(self) -> tuple[dict[int, float], float]:
        """By way the logarithm of its figure, over the rounds after the first; and the standard
        deviation of a turn."""
        if self._fitted is None:
            self._fitted = self._polished()
        return self._fitted

    def _polished(self) -> tuple[dict[int, float], float]:
        counted = [turn for turn in self.turns if turn.round > 1]
        by_way = {w: [t for t in counted if t.way == w] for w in {t.way for t in counted}}
        by_round = {r: [t for t in counted if t.round == r] for r in {t.round for t in counted}}
        ways = {way: middle(t.log for t in turns) for way, turns in by_way.items()}
        rounds = dict.fromkeys(by_round, 0.0)
        for _ in range(_PASSES):
            for number, turns in by_round.items():
                rounds[number] = middle(t.log - ways[t.way] for t in turns)
            centre = middle(rounds.values()) if rounds else 0.0
            rounds = {number: value - centre for number, value in rounds.items()}
            for way, turns in by_way.items():
                ways[way] = middle(t.log - rounds[t.round] for t in turns)
        left = [abs(t.log - ways[t.way] - rounds[t.round]) for t in counted]
        free = len(left) - len(ways) - len(rounds) + 1
        spread = 0.0
        if free > 0 and left:
            spread = _MEAN_AWAY * statistics.fmean(left) * math.sqrt(len(left) / free)
        return ways, max(spread, self._within())

    def _within(self) -> float:
        """The standard error of a turn's median by the scatter of its own steps."""
        apart, steps = [], 0
        for turn in self.turns:
            if turn.round == 1 and len(self.of(turn.way)) and self.of(turn.way)[0].round > 1:
                continue
            median = statistics.median(turn.times)
            away = sorted(abs(ms / median - 1) for ms in turn.times) if median > 0 else []
            apart += away[1:]  # the median's own is nothing
            steps = max(steps, len(turn.times))
        if not apart:
            return 0.0
        return _MIDDLE * _MEDIAN_AWAY * statistics.median(apart) / math.sqrt(steps)
