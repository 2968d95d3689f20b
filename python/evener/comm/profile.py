"""What one training step looks like from the collectives' side: when each bucket's gradients are
complete, when the next forward first needs it, and how long its stages take.

`StepProfile` is plain figures (milliseconds), kept in a file by `evener plan --profile`; `Recorder`
takes them from a running step. On a GPU it records events on the streams where things happen and
reads them once, when the step is over; on a CPU it reads the clock.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evener.errors import UsageError

Stage = Callable[[], None]
VERSION = 1
_MOST_CROWDED = 2.0


@dataclass(frozen=True)
class BucketProfile:
    """One bucket. `numel`: entries, of `itemsize` bytes each. `by_rows`: those of one rank, which
    all others get; else all ranks add up as many.

    `ready_ms` counts from the start of backward to the moment when its last gradient is there,
    `need_ms` from the start of forward to the first use of one of its parameters. `stages_ms`: what
    reduce-scatter in the node, exchange and all-gather took, in the exact form; zeros where it was
    not measured.
    """

    name: str
    numel: int
    itemsize: int
    ready_ms: float
    need_ms: float
    stages_ms: tuple[float, float, float] = (0.0, 0.0, 0.0)
    by_rows: bool = False

    @property
    def bytes(self) -> int:
        """Size of its gradients."""
        return self.numel * self.itemsize

    def summed(self, ranks: int) -> int:
        """An all-reduce of this many bytes crosses the network with as many as this bucket does."""
        return -(-self.bytes * ranks // 2) if self.by_rows else self.bytes


@dataclass(frozen=True)
class StepProfile:
    """A step without its communication: forward, backward, and the rest (optimizer, input).

    `drag`: the share of computing that is lost while an exchange is under way, because the
    collective holds multiprocessors (on a CPU: cores); 0 where it was not measured. `crowd`: how
    many times as long an exchange takes beside computing, with which it shares memory and buses.
    """

    forward_ms: float
    backward_ms: float
    rest_ms: float
    buckets: tuple[BucketProfile, ...]
    drag: float = 0.0
    crowd: float = 1.0

    @property
    def compute_ms(self) -> float:
        """The step if the network took no time."""
        return self.forward_ms + self.backward_ms + self.rest_ms

    def scaled(self, compute_ms: float) -> StepProfile:
        """The same step on a machine where it takes `compute_ms`: all times in proportion."""
        k = compute_ms / self.compute_ms
        buckets = tuple(
            dataclasses.replace(b, ready_ms=k * b.ready_ms, need_ms=k * b.need_ms)
            for b in self.buckets
        )
        forward, backward, rest = k * self.forward_ms, k * self.backward_ms, k * self.rest_ms
        return StepProfile(forward, backward, rest, buckets, self.drag, self.crowd)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"version": VERSION, **dataclasses.asdict(self)}

    @staticmethod
    def from_json(raw: dict[str, Any]) -> StepProfile:
        """The inverse of `to_json`. Raises UsageError for what is not a profile."""
        try:
            if raw["version"] != VERSION:
                raise UsageError(
                    f"the profile has version {raw['version']}, this Evener reads {VERSION}",
                    "record it again",
                )
            buckets = tuple(
                BucketProfile(**{**b, "stages_ms": tuple(b["stages_ms"])}) for b in raw["buckets"]
            )
            return StepProfile(
                raw["forward_ms"],
                raw["backward_ms"],
                raw["rest_ms"],
                buckets,
                float(raw.get("drag", 0.0)),
                float(raw.get("crowd", 1.0)),
            )
        except (KeyError, TypeError) as error:
            raise UsageError(
                f"this is not a step's profile: {error!r}",
                "EVENER_PROFILE=FILE writes one while training",
            ) from error

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: Path) -> StepProfile:
        """Read what `save` wrote. Raises UsageError."""
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{path}: {error}", "give a file that EVENER_PROFILE wrote") from None
        return StepProfile.from_json(raw)


def median(weighed: Sequence[tuple[float, float]], none: float) -> float:
    """The median of (value, weight) pairs; `none` where there are none."""
    half = sum(weight for _, weight in weighed) / 2
    found = none
    for value, weight in sorted(weighed):
        found = value
        half -= weight
        if half <= 0:
            break
    return found


class Clock:
    """Marks in time on one device: CUDA events, or the process's clock."""

    def __init__(self, device: torch.device) -> None:
        self.gpu = device.type == "cuda"

    def mark(self) -> Any:
        """Now, on the current stream."""
        if not self.gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: Any, end: Any) -> float:
        """Milliseconds from `start` to `end`. On a GPU both must have happened."""
        if not self.gpu:
            return float(end - start) * 1e3
        return float(start.elapsed_time(end))


class Recorder:
    """Takes marks during one step; `profile` makes figures of them.

    The step: `begin`, `needed` during forward, `forward_ended`, `submitted` (by the reducer) during
    backward, `backward_ended`, `landed` when the results are there, `end` where the next begins.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.clock = Clock(device)
        self.marks: dict[str, Any] = {}
        self.need: dict[int, Any] = {}
        self.ready: dict[int, Any] = {}
        self.stages: dict[tuple[int, int], tuple[Any, Any]] = {}

    def mark(self, name: str) -> None:
        """One of the step's own marks; the last one counts."""
        self.marks[name] = self.clock.mark()

    def needed(self, bucket: int) -> None:
        """The forward uses a parameter of this bucket; the first use counts."""
        if bucket not in self.need:
            self.need[bucket] = self.clock.mark()

    def complete(self, bucket: int) -> None:
        """The last gradient of this bucket has come."""
        self.ready[bucket] = self.clock.mark()

    def submitted(self, bucket: int, stages: Sequence[Stage | None]) -> Any:
        """The same stages, timed."""
        self.ready.setdefault(bucket, self.clock.mark())
        return tuple(
            None if stage is None else self._timed((bucket, place), stage)
            for place, stage in enumerate(stages)
        )

    def _timed(self, key: tuple[int, int], stage: Stage) -> Stage:
        def run() -> None:
            start = self.clock.mark()
            stage()
            self.stages[key] = (start, self.clock.mark())

        return run

    @property
    def whole(self) -> bool:
        """Whether every mark of a step was taken."""
        wanted = {"begin", "forward_ended", "backward_ended", "landed", "end"}
        return wanted <= set(self.marks) and bool(self.ready)

    def drag(self, backward_ms: float) -> float:
        """The share of computing that exchanges beside this step's backward took from it.

        `backward_ms`: how long it takes without them. `profile` was called: the device is done.
        """
        begin = self.marks["forward_ended"]
        took = self.clock.ms(begin, self.marks["backward_ended"])
        beside = done = 0.0
        for start, end in sorted(self._spans(1, begin).values()):  # between nodes
            start, end = max(start, done), min(end, took)
            beside += max(0.0, end - start)
            done = max(done, end)
        return min(max(0.0, took - backward_ms) / beside, 1.0) if beside > 0 else 0.0

    def crowd(self, alone: Recorder) -> float:
        """How many times as long exchanges took beside this step's backward as in `alone`; from 1.

        The median over the exchanges, by the time that they take alone: one that met a hiccup of
        the network says nothing. The first one does not count: its own time holds the wait for
        peers. 1 where none ended before backward did.
        """
        begin = self.marks["forward_ended"]
        took = self.clock.ms(begin, self.marks["backward_ended"])
        spans = sorted(self._spans(1, begin).items(), key=lambda item: item[1][1])[1:]
        inside = [bucket for bucket, (_, end) in spans if end <= took]
        here, there = self.occupied(1), alone.occupied(1)
        times = [(here[bucket], there.get(bucket, 0.0)) for bucket in inside]
        ratio = median([(beside / least, least) for beside, least in times if least > 0], 1.0)
        return min(max(1.0, ratio), _MOST_CROWDED)

    def _spans(self, place: int, since: Any) -> dict[int, tuple[float, float]]:
        """When each bucket was in this stage, in milliseconds since that mark."""
        return {
            bucket: (self.clock.ms(since, start), self.clock.ms(since, end))
            for (bucket, at), (start, end) in self.stages.items()
            if at == place
        }

    def occupied(self, place: int) -> dict[int, float]:
        """For how long each bucket occupied this stage.

        Where several are on their way at once, they pass one after the other: from the end of the
        one before, or from its own start.
        """
        if not self.stages:
            return {}
        # Whatever came before all of them.
        since = self.marks.get("begin", next(iter(self.ready.values())))
        spans = self._spans(place, since)
        times, done = {}, float("-inf")
        for bucket, (start, end) in sorted(spans.items(), key=lambda item: item[1][1]):
            times[bucket] = end - max(start, min(done, end))
            done = end
        return times

    def profile(self, buckets: Sequence[tuple[str, int, int, bool]]) -> StepProfile:
        """The profile of a step whose buckets were held back. Waits for the device.

        `buckets[i]`: name, entries, bytes an entry of bucket i, by rows. In such a step nothing is
        computed while an exchange is under way, so what an exchange takes of a part of the step is
        not computing, whatever the marks around that part waited for. A bucket that forward did not
        use counts as needed at its end, one without a gradient as ready at the end of backward.
        """
        if self.clock.gpu:
            torch.cuda.synchronize(self.device)
        ms, marks = self.clock.ms, self.marks
        forward = self._computing("begin", "forward_ended")
        backward = self._computing("forward_ended", "backward_ended")
        found = []
        occupied = [self.occupied(place) for place in range(3)]
        for index, (name, numel, itemsize, by_rows) in enumerate(buckets):
            need, ready = self.need.get(index), self.ready.get(index)
            times = [occupied[place].get(index, 0.0) for place in range(3)]
            found.append(
                BucketProfile(
                    name,
                    numel,
                    itemsize,
                    backward if ready is None else ms(marks["forward_ended"], ready),
                    forward if need is None else ms(marks["begin"], need),
                    (times[0], times[1], times[2]),
                    by_rows,
                )
            )
        return StepProfile(forward, backward, self._computing("landed", "end"), tuple(found))

    def _computing(self, start: str, end: str) -> float:
        """Milliseconds between two marks but for those in which an exchange was under way."""
        whole = max(0.0, self.clock.ms(self.marks[start], self.marks[end]))
        spans = [
            span for place in range(3) for span in self._spans(place, self.marks[start]).values()
        ]
        left, done = whole, 0.0
        for begun, ended in sorted(spans):
            begun, ended = max(begun, done), min(ended, whole)
            left -= max(0.0, ended - begun)
            done = max(done, ended)
        return left
