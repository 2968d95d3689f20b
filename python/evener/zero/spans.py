"""What a step did when: spans of the training loop, of the lanes, of copies and of collectives.

Off until `start`: then each `host` span takes two clock readings and each `device` span two timing
events. On a GPU spans are placed by events relative to one event whose host time is known; on the
simulated device work is done when a call returns, and the clock serves for both.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from evener.zero.device import Device


@dataclass(frozen=True)
class Span:
    """Seconds since `start`. kind: compute, copy, optimizer, communication, wait, step.
    track: where it ran."""

    kind: str
    track: str
    name: str
    begin: float
    end: float


class Spans:
    """A recorder; any thread may use it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._zero = 0.0
        self._origin: Any = None
        self._host: list[Span] = []
        self._events: list[tuple[str, str, str, Any, Any]] = []
        self.on = False

    def start(self) -> None:
        """Forget what was recorded, and record from now on."""
        self._device.synchronize()
        with self._lock:
            self._host, self._events = [], []
            self._origin = self._device.stamp("compute")
            self._device.synchronize()
            self._zero = time.perf_counter()
            self.on = True

    def stop(self) -> list[Span]:
        """All spans since `start`, by when they began."""
        self.on = False
        self._device.synchronize()
        with self._lock:
            spans = list(self._host)
            for kind, track, name, begin, end in self._events:
                first = self._device.between(self._origin, begin)
                spans.append(
                    Span(kind, track, name, first, first + self._device.between(begin, end))
                )
        return sorted(spans, key=lambda span: span.begin)

    @contextlib.contextmanager
    def host(self, kind: str, track: str, name: str) -> Iterator[None]:
        """What the host does inside."""
        if not self.on:
            yield
            return
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.add(kind, track, name, begin, time.perf_counter())

    def add(self, kind: str, track: str, name: str, begin: float, end: float) -> None:
        """A span of the host, between two readings of `time.perf_counter`."""
        with self._lock:
            self._host.append(Span(kind, track, name, begin - self._zero, end - self._zero))

    @contextlib.contextmanager
    def device(self, kind: str, stream: str, name: str) -> Iterator[None]:
        """What is issued to `stream` inside, when the accelerator does it."""
        begin = self.mark(stream)
        try:
            yield
        finally:
            self.since(begin, kind, stream, name)

    def mark(self, stream: str) -> Any:
        """A place in a stream; None where nothing is recorded."""
        return self._device.stamp(stream) if self.on else None

    def since(self, begin: Any, kind: str, stream: str, name: str) -> None:
        """A span from a mark to where the stream is now."""
        if begin is not None and self.on:
            end = self._device.stamp(stream)
            with self._lock:
                self._events.append((kind, stream, name, begin, end))


def covered(spans: list[Span], by: list[Span]) -> tuple[float, float]:
    """(seconds in which any of `spans` ran, those of them in which one of `by` ran too)."""
    mine, theirs = merged(spans), merged(by)
    total = sum(end - begin for begin, end in mine)
    both, place = 0.0, 0
    for begin, end in mine:
        while place < len(theirs) and theirs[place][1] <= begin:
            place += 1
        at = place
        while at < len(theirs) and theirs[at][0] < end:
            both += min(end, theirs[at][1]) - max(begin, theirs[at][0])
            at += 1
    return total, both


def merged(spans: list[Span]) -> list[tuple[float, float]]:
    """The times in which at least one of them ran."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted((span.begin, span.end) for span in spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def summary(spans: list[Span]) -> dict[str, Any]:
    """Where the time of the recorded steps went, in seconds a step; shares in [0, 1].

    transfers hidden: the part of the copies' time in which the accelerator computed or the
    optimizer ran. communication: gathers, with waiting for other ranks in them. exposed optimizer:
    the optimizer's time in which the accelerator did not compute.
    """
    steps = [span for span in spans if span.kind == "step"]
    # The first one was begun before the recording, by the optimizer of the step before it.
    steps = steps[1:] or steps
    count = max(1, len(steps))
    begin = min((s.begin for s in steps), default=0.0)
    end = max((s.end for s in steps), default=0.0)
    inside = [s for s in spans if s.end > begin and s.begin < end]

    def pick(*kinds: str) -> list[Span]:
        return [s for s in inside if s.kind in kinds]

    compute, copies, optimizer = pick("compute"), pick("copy"), pick("optimizer")
    waits: dict[str, float] = {}
    for span in pick("wait"):
        waits[span.track] = waits.get(span.track, 0.0) + (span.end - span.begin) / count
    tracks: dict[str, float] = {}
    for track in sorted({s.track for s in inside if s.kind not in ("wait", "step")}):
        tracks[track], _ = covered([s for s in inside if s.track == track], [])
    moving, hidden = covered(copies, compute + optimizer)
    talking, under = covered(pick("communication"), compute + optimizer)
    updating, beside = covered(optimizer, compute)
    found: dict[str, Any] = {
        "steps": len(steps),
        "step": sum(s.end - s.begin for s in steps) / count,
        "busy": {track: seconds / count for track, seconds in tracks.items()},
        "waits": waits,
        "computing": covered(compute, [])[0] / count,
        "transfers": moving / count,
        "transfers hidden": hidden / moving if moving else 1.0,
        "communication": talking / count,
        "communication hidden": under / talking if talking else 1.0,
        "optimizer": updating / count,
        "exposed optimizer": (updating - beside) / count,
    }
    for phase in ("forward", "backward"):
        part = [s for s in compute if s.name.startswith(phase)]
        found[phase] = covered(part, [])[0] / count
    return found
