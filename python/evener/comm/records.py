"""What the collectives write for others to read. This module owns both formats, which
docs/reference/records.md describes.

With EVENER_STATS_DIR set, each process rewrites its `comm-...json` there at most once per second,
when a step ends; and rank 0 appends the guard's figures to the `guard-...csv` of the same name. A
second reducer of the process has names of its own that end in -2, and so on; who comes after one
was closed takes its names.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Sequence
from typing import Any

from evener.base.records import StatsFile
from evener.comm.exchange import Exchange
from evener.comm.guard import Verdict

GUARD_FIELDS = (
    "time",
    "step",
    "bucket",
    "parameters",
    "form",
    "residual_ratio",
    "cosine",
    "falls_to",
)


class Records:
    """The files of one reducer. `open()` gives None where nobody asked for them."""

    def __init__(self, file: StatsFile) -> None:
        self._file = file
        self._verdicts: dict[int, Verdict] = {}
        self._last = (0, time.monotonic())

    @classmethod
    def open(cls, rank: int) -> Records | None:
        """By EVENER_STATS_DIR."""
        file = StatsFile.open("comm", rank)
        return cls(file) if file else None

    def close(self) -> None:
        """Nothing more is written; the names are free. May be called twice, but not to write on."""
        self._file.close()

    def step(self, steps: int, exchanges: Sequence[Exchange], verdicts: Sequence[Verdict]) -> None:
        """A step has ended, the `steps`-th."""
        self._verdicts.update({verdict.bucket: verdict for verdict in verdicts})
        if verdicts and self._file.rank == 0:
            self._file.safely(lambda: self._append(verdicts))
        if not self._file.due and not verdicts:
            return
        now = time.monotonic()
        before, then = self._last
        step_ms = 1e3 * (now - then) / (steps - before) if steps > before else None
        self._last = (steps, now)
        self._file.write(
            {
                "steps": steps,
                "step_ms": step_ms,
                "buckets": [self._bucket(exchange) for exchange in exchanges],
            }
        )

    def _bucket(self, exchange: Exchange) -> dict[str, Any]:
        crosses = exchange.crosses
        verdict = self._verdicts.get(exchange.bucket.index)
        return {
            "name": exchange.title,
            "bytes": exchange.bytes,
            "algorithm": "2d" if exchange.route.levels.two_level else "flat",
            "compressor": exchange.wire.name,
            "carrier": exchange.route.carrier.name if crosses else None,
            "bytes_sent": exchange.sent_bytes,
            "predicted_ms": exchange.predicted_ms,
            "measured_ms": exchange.timer.ms,
            "residual_ratio": _finite(verdict.residual_ratio) if verdict else None,
            "cosine": _finite(verdict.cosine) if verdict else None,
        }

    def _append(self, verdicts: Sequence[Verdict]) -> None:
        path = self._file.directory / f"guard-{self._file.owner}.csv"
        new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            if new:
                rows.writerow(GUARD_FIELDS)
            for v in verdicts:
                ratio, cosine = f"{v.residual_ratio:.6g}", f"{v.cosine:.6g}"
                row = (f"{time.time():.3f}", v.step, v.bucket, v.title, v.form, ratio, cosine)
                rows.writerow((*row, v.falls_to))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
