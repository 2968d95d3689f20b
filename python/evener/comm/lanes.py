"""Lanes for the stages: while one bucket crosses the network, the next is reduced in the node.

Every bucket passes all lanes in the order in which it was issued, also where a stage has nothing to
do for it. So each communicator sees the buckets in the same order on every rank, whatever the
timing: that is what keeps collectives from waiting for each other in a circle.

- On a GPU a lane is a stream, and issuing is only enqueuing: events chain the stages, no thread
  waits, and whoever completes a bucket (autograd's thread, or the caller of flush) enqueues it.
  Where a transport of Evener's own carries the exchange between nodes, buckets take several outer
  streams in turn: while one waits for its peers' bytes the next is encoded and put on its way, and
  the transport keeps the order. A bucket has the same stream in every step, but where the order
  changes. With NCCL there is one: its kernels would only stand in each other's way.
- On a CPU collectives block, so a lane is a thread with a queue.

A stage that raises fails its ticket; on a CPU the lanes then refuse all that comes after it,
because the communicator's state is unknown.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

Stage = Callable[[], None]
# This many exchanges between nodes are under way at once: one that is encoded, one that crosses the
# network, one that is decoded.
OUTER_STREAMS = 3
_OUTER = tuple(f"outer {place}" for place in range(OUTER_STREAMS))
STAGES = ("reduce-scatter in the node", "exchange between nodes", "all-gather in the node")


# As the class has it that `torch.cuda.Event` is made from; see `overlap.interpose`.
_wait: Callable[[torch.cuda.Event, torch.cuda.Stream], None] = torch._C._CudaEventBase.wait


class Ticket(ABC):
    """The promise that a bucket's stages will have run."""

    @abstractmethod
    def wait(self) -> None:
        """CPU: block until done, raise what a stage raised. GPU: make the current stream wait."""


class Lanes(ABC):
    """Somewhere to run a bucket's stages."""

    @abstractmethod
    def issue(self, name: str, stages: Sequence[Stage | None], outer: int = 0) -> Ticket:
        """Run `stages`, one a lane, each after the one before it. `name` appears in errors.

        `outer`: which of the outer lanes to take, any number; those are used round and round.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish what was issued and give the resources back. May be called twice."""


class StreamLanes(Lanes):
    """Lanes of CUDA streams, at high priority: a collective must not queue behind the backward."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Made when first used: the device has few queues, and streams that share one wait for each
        # other.
        self.streams: dict[str, torch.cuda.Stream] = {}

    def issue(self, name: str, stages: Sequence[Stage | None], outer: int = 0) -> Ticket:
        del name  # a kernel that fails is reported by CUDA, not here
        # Every call here is time of the thread that computes gradients: few, and torch's cheapest.
        current = torch.cuda.current_stream(self.device)
        done = torch.cuda.Event()
        done.record(current)
        lanes = ("scatter", _OUTER[outer % OUTER_STREAMS], "gather")
        try:
            for lane, stage in zip(lanes, stages, strict=True):
                if stage is None:
                    continue
                if (stream := self.streams.get(lane)) is None:
                    stream = self.streams[lane] = torch.cuda.Stream(self.device, priority=-1)
                torch.cuda.set_stream(stream)
                # Not `stream.wait_event`: that one waits for updates too, which are nothing here.
                _wait(done, stream)
                stage()
                done = torch.cuda.Event()
                done.record(stream)
        finally:
            torch.cuda.set_stream(current)
        return _EventTicket(self.device, done)

    def close(self) -> None:
        for stream in self.streams.values():
            stream.synchronize()


class _EventTicket(Ticket):
    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self.device, self.event = device, event

    def wait(self) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.event)


class ThreadLanes(Lanes):
    """Lanes of threads, for collectives that block."""

    def __init__(self) -> None:
        self._queues: list[queue.SimpleQueue[_Job | None]] = [queue.SimpleQueue() for _ in STAGES]
        self._broken: BaseException | None = None
        self._closed = False
        # Daemons: a peer that died must not keep this process from ending.
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name=f"evener-{name}", daemon=True)
            for lane, name in enumerate(("inner-scatter", "outer", "inner-gather"))
        ]
        for thread in self._threads:
            thread.start()

    def issue(self, name: str, stages: Sequence[Stage | None], outer: int = 0) -> Ticket:
        del outer  # there is one thread for it: a second would change the order
        job = _Job(name, stages)
        if self._closed:
            raise RuntimeError(f"{name} was issued after close")
        self._queues[0].put(job)
        return job

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._queues[0].put(None)
        for thread in self._threads:
            thread.join(timeout=5)

    def _work(self, lane: int) -> None:
        following = self._queues[lane + 1] if lane + 1 < len(STAGES) else None
        while (job := self._queues[lane].get()) is not None:
            if job.error is None:
                job.error = self._broken
            stage = job.stages[lane]
            if stage is not None and job.error is None:
                try:
                    stage()
                except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                    error.args = (f"{job.name}, {STAGES[lane]}: {error}",)
                    self._broken = job.error = error
            stage = None  # a queue that waits must hold no memory of a bucket
            if following is not None:
                following.put(job)
            else:
                job.stages = ()
                job.done.set()
        if following is not None:
            following.put(None)


class _Job(Ticket):
    def __init__(self, name: str, stages: Sequence[Stage | None]) -> None:
        self.name, self.stages = name, stages
        self.done = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        # Bounded by the collectives' own timeouts: every stage ends or raises.
        self.done.wait()
        if self.error is not None:
            raise self.error
