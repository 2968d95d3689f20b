"""Top-k with error feedback against exact: a small CNN on digits, five seeds, paired."""

import statistics

import pytest

from tests import worlds
from tests.comm import digits

SEEDS = [0, 1, 2, 3, 4]
# Student's t for a 95% interval of five differences.
T4 = 2.776


@pytest.mark.slow
def test_topk_reaches_the_accuracy_of_exact() -> None:
    """The bounds are far from what is measured (docs/comm.md), so that no seed can flake them."""
    both = worlds.run([1, 1], digits.both, SEEDS, env={"LIGHT_TOPK_THRESHOLD": "0"}, timeout=170)
    exact, topk = both[0]
    assert both[1] == both[0]  # all ranks end with the same model
    differences = [b - a for a, b in zip(exact, topk, strict=True)]
    mean = statistics.mean(differences)
    half = T4 * statistics.stdev(differences) / len(differences) ** 0.5
    print(f"exact {exact}, top-k 1% {topk}: {mean:+.2f} +- {half:.2f} points")
    assert min(topk) > 93
    assert mean > -2
