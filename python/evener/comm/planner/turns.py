"""What several ways to take a step cost, from steps that were taken in turn.

A host that other programs use is slow for seconds and fast for seconds, by far more than the ways
differ. So they take turns of a few steps, and a turn's time is read as the way's own times that of
the round, in which each way has had its turn (a two-way fit by medians: Tukey, Exploratory Data
Analysis, 1977, "median polish"). What is left over is noise, and says how well a difference is
known; steps that follow each other are no independent witnesses, so turns are counted, not steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_PASSES = 12
# A normal distribution's standard deviation over its mean absolute deviation; over its median one;
# and that of a median over that of a mean.
_MEAN_AWAY, _MEDIAN_AWAY, _MEDIAN = 1.2533, 1.4826, 1.2533


@dataclass(frozen=True)
class _Turn:
    round: int
    way: int
    times: tuple[float, ...]

    @property
    def log(self) -> float:
        return math.log(max(statistics.median(self.times), 1e-9))


class Turns:
    """Those of one trial, of `ways` ways.

    The first round tells of a way only where it has no other turn: memory is allocated in it.
    """

    def __init__(self, ways: int) -> None:
        self.ways = ways
        self.turns: list[_Turn] = []
        self._fitted: tuple[dict[int, float], float] | None = None

    def add(self, round_: int, way: int, times: Sequence[float]) -> None:
        """In that round (from 1) that way's steps took this many milliseconds each."""
        self.turns.append(_Turn(round_, way, tuple(times)))
        self._fitted = None

    def of(self, way: int) -> list[_Turn]:
        """Its turns that count."""
        mine = [turn for turn in self.turns if turn.way == way]
        return [turn for turn in mine if turn.round > 1] or mine

    def figures(self) -> tuple[float, ...]:
        """Milliseconds of each way's step in an ordinary round; infinite where none was taken."""
        fitted, _ = self._fit()
        found = []
        for way in range(self.ways):
            samples = [ms for turn in self.of(way) for ms in turn.times]
            if not samples:
                found.append(math.inf)
            elif way in fitted:
                found.append(min(max(math.exp(fitted[way]), min(samples)), max(samples)))
            else:
                found.append(statistics.median(samples))
        return tuple(found)

    def noise(self, one: int, other: int) -> float:
        """The standard error of the difference of two ways' figures, as a share of them."""
        turns = [len(self.of(way)) for way in (one, other)]
        if not all(turns):
            return 0.0
        return _MEDIAN * self._fit()[1] * math.sqrt(sum(1 / count for count in turns))

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
        ways = {way: statistics.median(t.log for t in turns) for way, turns in by_way.items()}
        rounds = dict.fromkeys(by_round, 0.0)
        for _ in range(_PASSES):
            for number, turns in by_round.items():
                rounds[number] = statistics.median(t.log - ways[t.way] for t in turns)
            middle = statistics.median(rounds.values()) if rounds else 0.0
            rounds = {number: value - middle for number, value in rounds.items()}
            for way, turns in by_way.items():
                ways[way] = statistics.median(t.log - rounds[t.round] for t in turns)
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
            middle = statistics.median(turn.times)
            away = sorted(abs(ms / middle - 1) for ms in turn.times) if middle > 0 else []
            apart += away[1:]  # the median's own is nothing
            steps = max(steps, len(turn.times))
        if not apart:
            return 0.0
        return _MEDIAN * _MEDIAN_AWAY * statistics.median(apart) / math.sqrt(steps)
