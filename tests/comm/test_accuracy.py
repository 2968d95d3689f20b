"""Does compression cost accuracy? The small CNN of benchmarks/accuracy_digits.py, fewer seeds.

The figures of all forms, both optimizers and five seeds are in docs/benchmarks/accuracy.md.
"""

import statistics

import pytest
from benchmarks import accuracy_digits as digits

from tests import worlds

SEEDS = [0]
# Each form as it is, without the guard.
ENVIRONMENT = {**digits.ENVIRONMENT, "EVENER_GUARD_STEPS": "0"}


def trained(rank: int, size: int, modes: list[str]) -> dict[str, list[float]]:
    by_name = {(v.optimizer, v.name): v for v in digits.VARIANTS}
    return {
        mode: [
            digits.train(rank, size, by_name["adamw", mode], seed, epochs=8)["accuracy"]
            for seed in SEEDS
        ]
        for mode in modes
    }


@pytest.mark.slow
def test_compressed_training_reaches_the_accuracy_of_exact() -> None:
    """The bounds are far from what is measured, so that no seed can flake them."""
    modes = ["exact", "int8", "topk", "topk-chunk"]
    both = worlds.run([1, 1], trained, modes, env=ENVIRONMENT, timeout=170)
    assert both[1] == both[0]  # all ranks end with the same model
    mean = {mode: statistics.mean(values) for mode, values in both[0].items()}
    print(mean)
    assert mean["exact"] > 93
    assert mean["int8"] > mean["exact"] - 1.5
    assert mean["topk"] > mean["exact"] - 10
    assert mean["topk-chunk"] > mean["exact"] - 10


def test_the_interval_is_that_of_paired_differences() -> None:
    found = digits.summary([97.0, 98.0, 99.0], [98.0, 98.0, 98.0])
    assert found["difference"] == 0.0
    assert found["interval"] == pytest.approx(4.303 / 3**0.5)
