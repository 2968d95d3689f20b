"""What the first steps say of the plan.

A probe measures a machine with nothing else to do, in two seconds; a model's own kernels, its
launches beside busy cores and its neighbours are seen in training alone. So the first steps are
timed, without waiting for the accelerator: each step waits once for its gradients' norm. When they
have settled, one line says what a step takes, and where that is far from the plan, that it is.

An allocator that has to search its pools for memory makes the accelerator wait each time. Where
that goes on after the first steps, a little room is made (see `Engine`).
"""

from __future__ import annotations

import logging
import statistics
import time

logger = logging.getLogger("evener.zero")

SETTLED = 2
"""Steps before the ones that count: kernels are loaded, room is made."""
COUNTED = 3
SEARCHING = 8
"""Steps in which room is made for an allocator that searches."""
FAR = 0.1
"""Share by which a step may differ from the plan and nothing is said of it."""


class Learned:
    """`planned`: seconds of a step, 0 where nothing was planned."""

    def __init__(self, planned: float) -> None:
        self.planned = planned
        self.seconds = planned
        self.over = False
        self._times: list[float] = []
        self._last = 0.0
        self._searched = 0
        self._steps = 0

    def step(self, searched: int) -> bool:
        """A step has ended, the allocator having searched so often until now. Whether it searched
        in this step though the model had settled: then room is wanted, and time counts anew."""
        now = time.perf_counter()
        took, self._last = now - self._last, now
        before, self._searched = self._searched, searched
        self._steps += 1
        if self._steps <= SETTLED:
            return False
        if searched > before and self._steps <= SEARCHING:
            self._times.clear()
            return True
        self._times.append(took)
        if len(self._times) >= COUNTED:
            self._conclude()
        return False

    def _conclude(self) -> None:
        self.over = True
        self.seconds = statistics.median(self._times)
        if not self.planned:
            return
        if abs(self.seconds / self.planned - 1) > FAR:
            logger.info(
                "a step takes %.3f s, %.3f s were planned: expect %.2f x the plan's speed",
                self.seconds,
                self.planned,
                self.planned / self.seconds,
            )
