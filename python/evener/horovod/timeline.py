"""The timeline of Horovod's operations, in Chrome's trace format (chrome://tracing, Perfetto).

Rank 0 writes it. As upstream's, each tensor is a process of the trace: NEGOTIATE_<OP> from the
first rank's announcement to the last's, with a mark for each rank, then <OP> with what was done
inside: QUEUE, MEMCPY_IN_FUSION_BUFFER, NCCL_ or GLOO_ALLREDUCE, MEMCPY_OUT_FUSION_BUFFER. The end
of <OP> carries dtype, shape, bytes, the bucket (the operations that went together) and the
algorithm. Cycles are CYCLE_START. An operation of a frozen schedule has no negotiation, and neither
has a gradient bucket of DistributedOptimizer, which is a process of its own (`bucket`).

The file is a JSON array; it is complete after `stop`, and what is there before can be opened too.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from evener.base.log import logger
from evener.horovod import kinds

if TYPE_CHECKING:
    from evener._native import Answer

_START, _READY, _END, _CYCLE = range(4)


class Timeline:
    """One file at a time. `active`: whether anything is written."""

    def __init__(self, now: Callable[[], float]) -> None:
        """now(): seconds on the negotiator's clock."""
        self.now = now
        self._lock = threading.RLock()
        self._file: IO[str] | None = None
        self._pids: dict[str, int] = {}
        self._doing: dict[str, str] = {}
        self._depth: dict[int, int] = {}  # events that are open, of each pid
        self._mark_cycles = False
        self._buckets = 0
        self.active = False

    def start(self, path: str, mark_cycles: bool) -> None:
        """Write into `path` from now on; what was written elsewhere is completed."""
        with self._lock:
            self.stop()
            self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - open until `stop`
            self._file.write("[\n")
            self._pids, self._doing, self._mark_cycles = {}, {}, mark_cycles
            self._depth.clear()
            epoch = int((time.time() - self.now()) * 1e6)
            self._write(
                name="process_name",
                ph="M",
                pid=0,
                args={"name": "horovod", "start_time_since_epoch_in_micros": epoch},
            )
            self.active = True

    def stop(self) -> None:
        """Complete the file."""
        with self._lock:
            self.active = False
            if self._file is not None:
                # Another rank may have announced what is not launched yet.
                for pid, depth in list(self._depth.items()):
                    for _ in range(depth):
                        self._write(ph="E", pid=pid)
                self._put("{}]\n")
            if self._file is not None:
                try:
                    self._file.close()
                except OSError as error:
                    self._give_up(error)
                self._file = None

    def negotiated(self, events: Sequence[tuple[float, str, int, int, int]]) -> None:
        """Events of the negotiator: (seconds, name, kind, moment, rank)."""
        with self._lock:
            for at, name, kind, moment, rank in events:
                if moment == _CYCLE:
                    if self._mark_cycles:
                        self._write(name="CYCLE_START", ph="i", s="g", pid=0, ts=at * 1e6)
                    continue
                pid = self._pid(name)
                if moment == _START:
                    what = f"NEGOTIATE_{kinds.KINDS[kind].upper()}"
                    self._write(name=what, ph="B", pid=pid, ts=at * 1e6)
                elif moment == _READY:
                    self._write(name=str(rank), ph="X", dur=0, pid=pid, ts=at * 1e6)
                else:
                    self._write(ph="E", pid=pid, ts=at * 1e6)
            self._flush()

    def begin(self, answers: Sequence[Answer]) -> None:
        """These are launched together."""
        with self._lock:
            self._buckets += 1
            for answer in answers:
                what = kinds.KINDS[answer.kind].upper()
                self._write(name=what, ph="B", pid=self._pid(answer.name))
        self.activity(answers, "QUEUE")

    def activity(self, answers: Sequence[Answer], what: str) -> None:
        """What is done with them from now on."""
        with self._lock:
            for answer in answers:
                self._close(answer.name)
                self._doing[answer.name] = what
                self._write(name=what, ph="B", pid=self._pid(answer.name))

    def _close(self, name: str) -> None:
        if self._doing.pop(name, None) is not None:
            self._write(ph="E", pid=self._pid(name))

    def end(self, answers: Sequence[Answer]) -> None:
        """They are done."""
        from evener.horovod import dtypes  # imports torch, which horovod.tensorflow does without

        with self._lock:
            for answer in answers:
                algorithm = self._doing.get(answer.name, "")
                self._close(answer.name)
                tensors = [(dtypes.DTYPES[number], shape) for number, shape, _ in answer.tensors]
                size = sum(_elements(shape) * dtype.itemsize for dtype, shape in tensors)
                args = {
                    "dtype": str(tensors[0][0]) if tensors else "",
                    "shape": [shape for _, shape in tensors],
                    "bytes": size,
                    "bucket": self._buckets,
                    "algorithm": "flat" if algorithm.endswith("BUFFER") else algorithm.lower(),
                }
                self._write(ph="E", pid=self._pid(answer.name), args=args)
            self._flush()

    def bucket(
        self, name: str, ready: float, parts: Sequence[tuple[str, float, float]], args: Any
    ) -> None:
        """A gradient bucket that has landed: `parts` are (what, begin, end), one after the other.

        Seconds on the clock that `now` reads. `ready`: when its last gradient was there.
        """
        with self._lock:
            pid, last = self._pid(name), ready
            self._write(name="ALLREDUCE", ph="B", pid=pid, ts=ready * 1e6)
            for what, begin, end in parts:
                if begin > last:
                    self._write(name="QUEUE", ph="B", pid=pid, ts=last * 1e6)
                    self._write(ph="E", pid=pid, ts=begin * 1e6)
                self._write(name=what, ph="B", pid=pid, ts=begin * 1e6)
                self._write(ph="E", pid=pid, ts=end * 1e6)
                last = end
            self._write(ph="E", pid=pid, ts=last * 1e6, args=args)
            self._flush()

    def _pid(self, name: str) -> int:
        pid = self._pids.get(name)
        if pid is None:
            pid = self._pids[name] = len(self._pids) + 1
            self._write(name="process_name", ph="M", pid=pid, args={"name": name})
            self._write(name="process_sort_index", ph="M", pid=pid, args={"sort_index": pid})
        return pid

    def _write(self, **fields: Any) -> None:
        if self._file is not None:
            if change := {"B": 1, "E": -1}.get(fields["ph"], 0):
                depth = self._depth.get(fields["pid"], 0) + change
                if depth < 0:  # it began before this file
                    return
                self._depth[fields["pid"]] = depth
            fields.setdefault("ts", self.now() * 1e6)
            self._put(json.dumps(fields) + ",\n")

    def _put(self, text: str) -> None:
        if self._file is not None:
            try:
                self._file.write(text)
            except OSError as error:
                self._give_up(error)

    def _flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """A job does not end because its timeline cannot be written."""
        file, self._file, self.active = self._file, None, False
        if file is not None:
            logger.warning("the timeline %s ends here: %s", file.name, error.strerror)
            with contextlib.suppress(OSError):
                file.close()


def _elements(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
