"""How often the rows of a table are used, and what follows from it for a batch.

Rows of equal use are one class, so a table of a billion rows is a few thousand numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from evener.errors import UsageError

_LIKELY = 1 - 1e-15  # what is certain is a little less, so that its logarithm is a number
_COUNTED = (1 << 24) - 1  # a store counts no further
_EXACT = 10_000  # ranks of Zipf's law that are classes of their own; others share 2,000 classes


@dataclass(frozen=True, eq=False)
class Use:
    """Classes of `rows` rows each, float64 [n], the most used first. One id names a given row of a
    class with probability `p`, float64 [n]; ids of a batch are drawn one by one."""

    rows: np.ndarray
    p: np.ndarray

    def met(self, draws: float) -> np.ndarray:
        """The probability that a row is among `draws` ids, float64 [n]."""
        return np.asarray(-np.expm1(draws * np.log1p(-self.p)))

    def distinct(self, draws: float) -> float:
        """How many different rows `draws` ids are expected to name."""
        return float(self.rows @ self.met(draws))

    def kept(self, draws: float, room: float) -> float:
        """The share of a step's different rows that are among `room` rows, the last that were used.

        Steps name `draws` ids each. Che, Tung and Wang, Hierarchical Web Caching Systems (2002): a
        row stays for the same number of steps T, in which `room` different rows are met.
        """
        if room >= self.rows.sum():
            return 1.0
        met = np.minimum(self.met(draws), _LIKELY)
        low, high = 1e-9, 1e18
        for _ in range(100):
            steps = (low * high) ** 0.5
            there = -np.expm1(steps * np.log1p(-met))
            low, high = (steps, high) if self.rows @ there < room else (low, steps)
        return float(self.rows @ (met * there) / (self.rows @ met))


def zipf(rows: int, exponent: float) -> Use:
    """The k-th row is drawn in proportion to k^-exponent; 0: all alike."""
    first = min(rows, _EXACT)
    edges = np.geomspace(first + 1, rows + 1, 2000) if rows > first else np.array([first + 1.0])
    edges = np.unique(np.floor(edges + 1e-6))
    # The sum of a class is near the integral: within 1e-9 from rank 10,000 on.
    ends = edges - 0.5
    area = np.log(ends) if exponent == 1 else ends ** (1 - exponent) / (1 - exponent)
    counts = np.concatenate((np.ones(first), np.diff(edges)))
    weights = np.concatenate((np.arange(1.0, first + 1) ** -exponent, np.diff(area)))
    return Use(counts, np.minimum(weights / counts / weights.sum(), _LIKELY))


def measured(
    rows: int, frequencies: np.ndarray, counts: np.ndarray, steps: int, draws: float, what: str
) -> Use:
    """`counts[i]` rows were counted `frequencies[i]` times in `steps` steps of `draws` ids.

    A store counts ids, or where rows are sharded or cached the steps in which a row was met: then
    none is above `steps`. Rows that never came have no use. Raises UsageError where it cannot be.
    """
    order = np.argsort(-frequencies, kind="stable")
    times, counts = frequencies[order].astype(float), counts[order].astype(float)
    seen, total = float(counts.sum()), float(times @ counts)
    if not total or (times < 0).any() or (counts < 0).any():
        raise UsageError(f"{what} has no frequencies", "train for some steps, or give zipf")
    if seen > rows:
        raise UsageError(
            f"{what} has {seen:,.0f} rows, and num_embeddings={rows:,}", "give the larger number"
        )
    if times[0] > steps:
        top = times >= _COUNTED
        p = times / (max(total, steps * draws) if top.any() else total)
    else:
        top = times == steps
        met = np.minimum(times / steps, 1 - 1 / (steps + 1))
        p = -np.expm1(np.log1p(-met) / draws)
    # How often a row came is not known where its count is at the top: these share the rest of 1.
    rest = 1 - float(p @ counts)
    if top.any() and rest > 0:
        p[top] *= 1 + rest / float(p[top] @ counts[top])
    p /= p @ counts
    return Use(np.append(counts, rows - seen), np.append(np.minimum(p, _LIKELY), 0.0))
