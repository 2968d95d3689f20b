"""Clicks that a teacher makes: sparse ids with a long tail, true weights, and drift by day.

Each sample has an id in each of `FIELDS` fields. Ranks follow Zipf's law; every day a share of the
ranks stands for something new, as a shop's items do, so new ids come and old ones are never seen
again. The teacher knows a weight and a small vector of every id; the chance of a click is the
logistic function of the weights and of the vectors' products. So the best AUC that any model can
reach is known (`Clicks.chance`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FIELDS, LATENT = 8, 4


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele et al., 2014): well spread 64-bit numbers."""
    with np.errstate(over="ignore"):
        x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def _normal(keys: np.ndarray, salt: int) -> np.ndarray:
    """A standard normal number of each key, always the same."""
    one, two = (_mixed(keys.view(np.uint64) ^ np.uint64(salt * 2 + i)) for i in (1, 2))
    u = (one >> np.uint64(11)).astype(np.float64) / 2**53
    v = (two >> np.uint64(11)).astype(np.float64) / 2**53
    return np.sqrt(-2 * np.log1p(-u)) * np.cos(2 * np.pi * v)


@dataclass(frozen=True)
class Clicks:
    """keys int64 [n, FIELDS], labels float32 [n], chance float64 [n] of a click."""

    keys: np.ndarray
    labels: np.ndarray
    chance: np.ndarray


def day(
    number: int, samples: int, seed: int = 0, vocabulary: int = 25_000, drift: float = 0.03
) -> Clicks:
    """The clicks of a day. drift: the share of ranks that get a new id every day."""
    draw = np.random.default_rng([seed, number])
    ranks = np.arange(1, vocabulary + 1, dtype=np.float64)
    reach = np.cumsum(ranks**-1.05)
    picked = np.searchsorted(reach / reach[-1], draw.random((samples, FIELDS)))
    picked = np.minimum(picked, vocabulary - 1) + np.arange(FIELDS) * vocabulary
    # Each rank changes its id every 1 / drift days, from a day of its own.
    phase = _mixed(picked + 1).astype(np.float64) / 2**64
    generation = np.floor(number * drift + phase).astype(np.int64)
    keys = _mixed(picked + generation * FIELDS * vocabulary + (seed << 40)).view(np.int64)
    score = 0.45 * _normal(keys, 1).sum(1) - 1.0
    vectors = np.stack([_normal(keys, 2 + i) for i in range(LATENT)], 2) * 0.3
    total = vectors.sum(1)
    score += 0.5 * ((total**2).sum(1) - (vectors**2).sum((1, 2)))
    chance = 1 / (1 + np.exp(-score))
    return Clicks(keys, (draw.random(samples) < chance).astype(np.float32), chance)


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """The area under the ROC curve; equal scores count half."""
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    starts = np.flatnonzero(first)
    ends = np.append(starts[1:], len(scores))
    rank = np.empty(len(scores))
    rank[order] = np.repeat((starts + ends + 1) / 2, ends - starts)
    clicks = labels > 0.5
    n = int(clicks.sum())
    return float((rank[clicks].sum() - n * (n + 1) / 2) / (n * (len(labels) - n)))
