"""Medians with their spread, and efficiencies from runs that were made side by side."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Spread:
    """A median and the range of what it was taken from."""

    median: float
    low: float
    high: float
    count: int

    def times(self, factor: float) -> Spread:
        """The spread of the samples times `factor`, which is not negative."""
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.count)

    def to_json(self) -> dict[str, float | int]:
        """Plain numbers."""
        return asdict(self)


def spread(samples: Sequence[float]) -> Spread | None:
    """The median, least and greatest of `samples`; None of nothing."""
    if not samples:
        return None
    return Spread(statistics.median(samples), min(samples), max(samples), len(samples))


def efficiency(rates: Mapping[int, float], reference: Mapping[int, float]) -> Spread | None:
    """Rate a rank over the rate of one rank alone; both by repeat.

    Repeats are interleaved, so a run is divided by the reference of its own repeat where that one
    was measured (the machine was in the same mood), else by the median reference.
    """
    if not reference:
        return None
    middle = statistics.median(reference.values())
    return spread([rate / reference.get(repeat, middle) for repeat, rate in rates.items()])
