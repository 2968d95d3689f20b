"""How long steps take: marks at the start of each differentiated forward, read when asked for.

On a GPU a mark is an event on the current stream, so that nothing waits; an interval between two
marks is a forward, its backward and what follows, the wait for input included. A step may be
several forwards (accumulation, a discriminator that judges twice).
"""

from __future__ import annotations

import collections
import itertools
import math
import statistics
import time
from typing import Any

import torch

_KEPT = 128
_LEAST = 5  # steps of each kind
_NOISE = 1.5  # a range whose ends are further apart says nothing


class Pace:
    """Marks of one model. `skip`: the number of forwards at the start that are not counted."""

    def __init__(self, device: torch.device, skip: int) -> None:
        self._gpu = device.type == "cuda"
        self._left = skip
        self._marks: collections.deque[Any] = collections.deque(maxlen=_KEPT)

    def mark(self) -> None:
        """A differentiated forward begins."""
        if self._left > 0:
            self._left -= 1
        elif self._gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def laps_ms(self, forwards: int) -> list[float]:
        """The time of each step of `forwards` forwards."""
        marks = list(self._marks)
        if self._gpu:
            marks = [mark for mark in marks if mark.query()]
        at = marks[:: max(forwards, 1)]
        return [
            a.elapsed_time(b) if self._gpu else 1e3 * (b - a) for a, b in itertools.pairwise(at)
        ]


def compared(own: list[float], ours: list[float]) -> str:
    """What two samples of step times say of each other: a range of ratios, or why there is none.

    The range is that of the medians, each between the two steps that hold it with 95% (order
    statistics, so no shape of the times is assumed). A range that includes 1 is no difference; one
    whose ends are a factor of 1.5 apart is noise.
    """
    if len(own) < _LEAST or len(ours) < _LEAST:
        return f"{len(own)} and {len(ours)} steps are too few to compare"
    said = (
        f"DDP's own step took {statistics.median(own):.1f} ms (median of {len(own)}), Evener's "
        f"{statistics.median(ours):.1f} ms (median of {len(ours)})"
    )
    (a, b), (c, d) = _median_range(own), _median_range(ours)
    least, most = a / d, b / c
    if most > _NOISE * least:
        return f"{said}: too uneven to compare"
    if least <= 1 <= most:
        return f"{said}: no difference that these steps show"
    return f"{said}: {least:.2f} to {most:.2f} times as fast"


def _median_range(laps: list[float]) -> tuple[float, float]:
    """Between which steps the true median lies with at least 95%, or the widest there is."""
    ordered, n = sorted(laps), len(laps)
    below, tail = 0, 0.5**n  # steps left out at each end; the chance that the median is there
    while tail + math.comb(n, below + 1) * 0.5**n <= 0.025:
        below += 1
        tail += math.comb(n, below) * 0.5**n
    return ordered[below], ordered[n - 1 - below]
