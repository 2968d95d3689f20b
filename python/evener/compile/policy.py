"""When to compile, and when to stop using it: the state of one function's buckets. No framework.

    plan        after `plan_after` calls, again when twice as many were made, and when `hits` calls
                were larger than every edge
    waiting     a bucket that was hit fewer than `hits` times: calls run as they are
    compiling   in the background, or in the call
    ready       calls are padded and run compiled
    off         the compiled form was not faster, or was wrong, or could not be made; with a reason

A bucket is switched off where its median time, over the last calls that were timed, is not below
the median of plain calls of its sizes. All methods may be called from several threads.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from evener.base.given import fields
from evener.compile.buckets import choose, rounded
from evener.errors import UsageError

_KEPT = 16  # timed calls that are remembered
_EVERY = 50  # after that, one call in 50 is timed
_MARGIN = 0.6  # of the limit of padding, in a plan: sizes that were not seen pad more


@fields
@dataclass(frozen=True)
class Options:
    """The numbers of the rules.

    most: buckets at most, of one function. padding: padded over real rows, which plans aim to stay
    below. hits: calls in a bucket before it is compiled. plan_after: calls before the first plan.
    judge: timed calls before a bucket is judged. background: compile while calls go on, in
    TensorFlow and where that cannot change anything. compile_seconds: taken for one compilation
    until one was measured.
    """

    most: int = 6
    padding: float = 0.25
    hits: int = 2
    plan_after: int = 8
    judge: int = 5
    background: bool = True
    compile_seconds: float = 2.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "background" and not value > 0:
                raise UsageError(f"{name}={value}", f"give a {name} above 0")


@dataclass
class Bucket:
    """The calls of sizes up to `edge`, and above the next smaller edge."""

    edge: int
    status: str = "waiting"
    reason: str = ""
    hits: int = 0
    calls: int = 0  # that ran compiled
    rows: int = 0  # real ones, of these calls
    compile_seconds: float = 0.0
    times: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    gain: float = math.nan  # seconds per call, as last judged
    check: dict[str, Any] | None = None  # that it gives what the plain form does: `driver`'s


@dataclass(frozen=True)
class Turn:
    """What to do with one call. bucket: None for a plain one. compile: this call is to make it."""

    size: int
    bucket: Bucket | None
    compile: bool = False
    timed: bool = False


class Buckets:
    """The buckets of one function, for inputs that are alike but for one size."""

    def __init__(self, options: Options, saved: dict[str, Any] | None = None) -> None:
        """saved: what `saved()` gave in an earlier process."""
        self.options = options
        self.off = ""  # why nothing is compiled for these inputs
        self.buckets: list[Bucket] = []
        self.counts: Counter[int] = Counter()
        self._plain: dict[int, deque[float]] = {}
        self._plain_calls = 0
        self._planned = self._above = 0
        self._lock = threading.Lock()
        if saved:
            self.off = saved["off"]
            self.counts.update({int(size): count for size, count in saved["sizes"].items()})
            for size, times in saved["plain"].items():
                self._plain[int(size)] = deque(times, maxlen=_KEPT)
            for row in saved["buckets"]:
                # Compiled code is not in the record: it is made again, from the compiler's cache.
                status = "off" if row["status"] == "off" else "waiting"
                self.buckets.append(
                    Bucket(
                        row["edge"],
                        status,
                        row["reason"],
                        hits=options.hits,
                        compile_seconds=row["compile_seconds"],
                        check=row.get("check"),
                    )
                )
            self._planned = self.counts.total() if self.buckets else 0

    def take(self, size: int) -> Turn:
        """Record a call, and say what to do with it."""
        with self._lock:
            self.counts[size] += 1
            if self.off:
                return Turn(size, None)
            bucket = self._of(size)
            self._above += bucket is None and self._planned > 0
            if self._due():
                self._plan()
                bucket = self._of(size)
            if bucket is not None:
                bucket.hits += 1
                if bucket.status == "waiting" and bucket.hits >= self.options.hits:
                    bucket.status = "compiling"
                    return Turn(size, bucket, compile=True)
                if bucket.status == "ready":
                    bucket.calls += 1
                    bucket.rows += size
                    timed = bucket.calls <= _KEPT or bucket.calls % _EVERY == 0
                    return Turn(size, bucket, timed=timed)
            self._plain_calls += 1
            timed = (
                len(self._plain.get(rounded(size), ())) < _KEPT or self._plain_calls % _EVERY == 0
            )
            return Turn(size, None, timed=timed)

    def _of(self, size: int) -> Bucket | None:
        return next((bucket for bucket in self.buckets if bucket.edge >= size), None)

    def _due(self) -> bool:
        calls = self.counts.total()
        if not self._planned:
            return calls >= self.options.plan_after
        return calls >= 2 * self._planned or self._above >= self.options.hits

    def _plan(self) -> None:
        first = not self._planned
        self._planned, self._above = self.counts.total(), 0
        made = [bucket for bucket in self.buckets if bucket.status != "waiting"]
        times = [bucket.compile_seconds for bucket in made if bucket.compile_seconds]
        seconds = statistics.mean(times) if times else self.options.compile_seconds
        rates = [statistics.median(times) / size for size, times in self._plain.items() if times]
        cost = seconds / statistics.median(rates) if rates else 0.0
        most = self.options.most
        # Sizes to come are larger than those of the first calls, as a rule: half is kept for them.
        plan = choose(
            self.counts,
            cost,
            have=[bucket.edge for bucket in made],
            most=max(1, most // 2) if first else most,
            padding=_MARGIN * self.options.padding,
        )
        known = {bucket.edge: bucket for bucket in made}
        self.buckets = [known.get(edge) or Bucket(edge) for edge in plan.edges]
        below = 0
        for bucket in self.buckets:
            hits = sum(count for size, count in self.counts.items() if below < size <= bucket.edge)
            bucket.hits, below = max(bucket.hits, hits), bucket.edge

    def made(self, bucket: Bucket, seconds: float, wrong: str = "") -> None:
        """A bucket was compiled, in `seconds`, or could not be."""
        with self._lock:
            bucket.compile_seconds = seconds
            bucket.status, bucket.reason = ("off", wrong) if wrong else ("ready", "")

    def stop(self, why: str) -> None:
        """Nothing is compiled from now on."""
        with self._lock:
            self.off = why

    def ran(self, turn: Turn, seconds: float) -> str:
        """A timed call has ended; why its bucket was switched off by that, or nothing."""
        with self._lock:
            bucket = turn.bucket
            if bucket is None:
                times = self._plain.setdefault(rounded(turn.size), deque(maxlen=_KEPT))
                times.append(seconds)
                return ""
            bucket.times.append(seconds)
            plain = self._plain_median(bucket)
            if len(bucket.times) < self.options.judge or plain is None:
                return ""
            bucket.gain = plain - statistics.median(bucket.times)
            if bucket.gain > 0:
                return ""
            took = statistics.median(bucket.times)
            bucket.status = "off"
            bucket.reason = f"not faster: {1e3 * took:.3g} ms compiled, {1e3 * plain:.3g} ms not"
            return bucket.reason

    def _plain_median(self, bucket: Bucket) -> float | None:
        below = max((b.edge for b in self.buckets if b.edge < bucket.edge), default=0)
        times = [
            seconds
            for size, taken in self._plain.items()
            if below < size <= bucket.edge
            for seconds in taken
        ]
        return statistics.median(times) if len(times) >= 2 else None

    def saved(self) -> dict[str, Any]:
        """The record, for `evener compile report` and for the next process."""
        with self._lock:
            return {
                "off": self.off,
                "calls": self.counts.total(),
                "sizes": {str(size): self.counts[size] for size in sorted(self.counts)},
                "plain": {str(size): list(times) for size, times in sorted(self._plain.items())},
                "buckets": [
                    {
                        "edge": bucket.edge,
                        "status": bucket.status,
                        "reason": bucket.reason,
                        "calls": bucket.calls,
                        "rows": bucket.rows,
                        "compile_seconds": bucket.compile_seconds,
                        "gain": None if math.isnan(bucket.gain) else bucket.gain,
                        "check": bucket.check,
                    }
                    for bucket in self.buckets
                ],
            }
