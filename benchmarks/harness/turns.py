"""Ways that take turns, and what their times say."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# Student's t for a 95% interval, by the number of values.
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306,
           10: 2.262}  # fmt: skip


def turns(
    ways: Mapping[str, Callable[[], Any]],
    repeats: int,
    *,
    warmup: int = 0,
    calls: int = 1,
    lead: int = 0,
    settle: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    alternate: bool = False,
) -> dict[str, list[float]]:
    """Seconds of a call, a number per turn and way; the first `warmup` turns do not count.

    A turn is `calls` calls of each way, between two moments at which `settle` has returned; before
    the first of them come `lead` calls that do not count.
    `alternate`: every other turn goes through the ways backwards.
    """
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(warmup + repeats):
        for name in list(ways)[:: -1 if alternate and turn % 2 else 1]:
            for _ in range(lead):
                ways[name]()
            settle()
            began = clock()
            for _ in range(calls):
                ways[name]()
            settle()
            if turn >= warmup:
                found[name].append((clock() - began) / calls)
    return found


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """The median of a value over that of `base` in the same turn."""
    return statistics.median(a / b for a, b in zip(values, base, strict=True))


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """The median with the quartiles: `low`, `median`, `high`. Of one value all three are it."""
    if len(values) == 1:
        return dict.fromkeys(("low", "median", "high"), values[0])
    low, middle, high = statistics.quantiles(values, n=4)
    return {"low": low, "median": middle, "high": high}


def paired(values: Mapping[Any, float], base: Mapping[Any, float]) -> dict[str, float]:
    """What values by seed say beside those of `base`: means, and the paired difference.

    Those of `mean`, `spread`, `difference` and `interval` (half of the 95% interval of the
    difference's mean) that there are enough seeds for.
    """
    found = {}
    pairs = [value - base[seed] for seed, value in values.items() if seed in base]
    if values:
        found["mean"] = statistics.mean(values.values())
    if len(values) > 1:
        found["spread"] = statistics.stdev(values.values())
    if pairs:
        found["difference"] = statistics.mean(pairs)
    if len(pairs) > 1:
        found["interval"] = interval(pairs)
    return found


def interval(values: Sequence[float]) -> float:
    """Half of the 95% interval of the mean (Student's t); NaN for fewer than two values."""
    if len(values) < 2:
        return math.nan
    return STUDENT.get(len(values), 2.0) * statistics.stdev(values) / math.sqrt(len(values))
