"""What the steps so far took, for people and for tools: the spans of steps, what the SSD moved,
whether the plan holds, and the statistics file."""

from __future__ import annotations

import logging
import time
from typing import Any

from evener.base.records import StatsFile
from evener.zero.device import Device
from evener.zero.learned import Learned
from evener.zero.planner import Plan
from evener.zero.spans import Spans
from evener.zero.store import Store

logger = logging.getLogger("evener.zero")


class Account:
    """`number`: this rank's, among all. `learned`: what the first steps say of the plan."""

    def __init__(
        self, store: Store, device: Device, spans: Spans, plan: Plan | None, number: int
    ) -> None:
        self.learned = Learned(plan.step_seconds if plan else 0.0)
        self._store, self._device, self._spans, self._plan = store, device, spans, plan
        self._file = StatsFile.open("zero", number)
        self._written = (0, time.monotonic())
        self._began = 0.0
        self._moved = store.ssd.moved() if store.ssd else (0, 0)

    def begin(self) -> None:
        """The span of a step begins now."""
        self._began = time.perf_counter()

    def endured(self, first: bool) -> None:
        """Say what the first step has moved to and from the SSD."""
        if self._store.ssd is None:
            return
        now = self._store.ssd.moved()
        moved = now[0] - self._moved[0], now[1] - self._moved[1]
        self._moved = now
        if first:
            logger.info(
                "SSD: %.2f GB read and %.2f GB written per step",
                moved[0] / 1e9,
                moved[1] / 1e9,
            )

    def span(self, step: int) -> None:
        """Step `step` has ended."""
        if self._spans.on:
            now = time.perf_counter()
            self._spans.add("step", "steps", f"step {step}", self._began, now)
            self._began = now

    def searches(self) -> bool:
        """Whether the allocator searches in the first steps: then a little room is wanted."""
        return not self.learned.over and self.learned.step(self._device.searched())

    def write(self, steps: int, skipped: int, updated: dict[str, int]) -> None:
        """The statistics file, where it is time (docs/reference/records.md)."""
        if not self._file or not self._file.due:
            return
        before, then = self._written
        now = time.monotonic()
        self._written = (steps, now)
        total, used, peak = self._store.host.usage()
        self._file.write(
            {
                "steps": steps,
                "skipped": skipped,
                "step_ms": 1e3 * (now - then) / (steps - before),
                "tiers": [
                    {
                        "name": "gpu",
                        "bytes": self._plan.budget.gpu if self._plan else None,
                        "used": None,
                        "peak": self._device.peak_bytes(),
                    },
                    {"name": "host", "bytes": total, "used": used, "peak": peak},
                    *self._ssd_tier(),
                ],
                "updated": updated,
            }
        )

    def _ssd_tier(self) -> list[dict[str, Any]]:
        file = self._store.ssd
        if file is None:
            return []
        read, written = file.moved()
        size = {"bytes": file.size, "used": file.size, "peak": file.size}
        return [{"name": "ssd", **size, "read": read, "written": written}]

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()
