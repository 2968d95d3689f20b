"""What the collectives write for others to read. This module owns both formats, which
docs/reference/records.md describes.

With EVENER_STATS_DIR set, each process rewrites `comm-<pid>.json` there, by rename, at most once a
second, when a step ends; and rank 0 appends the guard's figures to `guard-<pid>.csv`. A second
reducer of the process writes `comm-<pid>-2.json` and `guard-<pid>-2.csv`, and so on; who comes
after one was closed takes its names.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evener import settings
from evener.comm.exchange import Exchange
from evener.comm.guard import Verdict

VERSION = 1
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
_EVERY = 1.0  # seconds
# Numbers of the reducers of this process that write.
_TAKEN: set[int] = set()


class Records:
    """The files of one reducer. `open()` gives None where nobody asked for them."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory, self.rank = directory, rank
        directory.mkdir(parents=True, exist_ok=True)
        self._number = next(i for i in itertools.count(1) if i not in _TAKEN)
        _TAKEN.add(self._number)
        self._owner = f"{os.getpid()}-{self._number}" if self._number > 1 else f"{os.getpid()}"
        self._verdicts: dict[int, Verdict] = {}
        self._written = -math.inf
        self._last = (0, time.monotonic())

    @classmethod
    def open(cls, rank: int) -> Records | None:
        """By EVENER_STATS_DIR."""
        text = settings.EVENER_STATS_DIR.get()
        return cls(Path(text), rank) if text else None

    def close(self) -> None:
        """Nothing more is written; the names are free. May be called twice, but not to write on."""
        if self._number:
            _TAKEN.discard(self._number)
            self._number = 0

    def step(self, steps: int, exchanges: Sequence[Exchange], verdicts: Sequence[Verdict]) -> None:
        """A step has ended, the `steps`-th."""
        self._verdicts.update({verdict.bucket: verdict for verdict in verdicts})
        if verdicts and self.rank == 0:
            self._append(verdicts)
        now = time.monotonic()
        if now - self._written < _EVERY and not verdicts:
            return
        self._written = now
        before, then = self._last
        step_ms = 1e3 * (now - then) / (steps - before) if steps > before else None
        self._last = (steps, now)
        record = {
            "version": VERSION,
            "pid": os.getpid(),
            "rank": self.rank,
            "host": socket.gethostname(),
            "time": time.time(),
            "comm": {
                "steps": steps,
                "step_ms": step_ms,
                "buckets": [self._bucket(exchange) for exchange in exchanges],
            },
        }
        part = self.directory / f".comm-{self._owner}.json"
        part.write_text(json.dumps(record), encoding="utf-8")
        part.replace(self.directory / f"comm-{self._owner}.json")

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
        path = self.directory / f"guard-{self._owner}.csv"
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
