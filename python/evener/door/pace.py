"""How long steps take: marks at the start of each differentiated forward, read when asked for.

On a GPU a mark is an event on the current stream, so that nothing waits; an interval between two
marks is a forward, its backward and what follows, the wait for input included. A step may be
several forwards (accumulation, a discriminator that judges twice).
"""

from __future__ import annotations

import collections
import itertools
import statistics
import time
from typing import Any

import torch

_KEPT = 128


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

    def step_ms(self, forwards: int) -> tuple[float, int]:
        """The median time of a step of `forwards` forwards, and the number of steps; 0 for none."""
        marks = list(self._marks)
        if self._gpu:
            marks = [mark for mark in marks if mark.query()]
        at = marks[:: max(forwards, 1)]
        laps = [
            a.elapsed_time(b) if self._gpu else 1e3 * (b - a) for a, b in itertools.pairwise(at)
        ]
        return (statistics.median(laps), len(laps)) if laps else (0.0, 0)
