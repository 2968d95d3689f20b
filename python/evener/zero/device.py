"""The accelerator as the engine sees it: streams, events, copies. Two implementations.

`CudaDevice` has a persistent stream for each direction beside the stream that computes.
`SimulatedDevice` is host memory that plays the accelerator: the same engine runs on it without a
GPU. Its copies are done when they return; the engine's own threads keep the asynchrony that its
logic must stand. It can count what the training thread makes, and refuse what is over a limit with
torch's own error, so that want of memory can be tried without a GPU.

Streams by name: "compute" (the one that is current where the model runs), "h2d" (weights and
activations in), "d2h" (gradients and activations out), "reduce" (gradients between ranks), "back"
(beside it: sums so far, and residuals between nodes, in), and the three of the optimizer's
streaming lane: "states in", "optimizer", "states out".
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import _disable_current_modes

from evener.errors import UsageError
from evener.zero.meter import Ledger, Meter

GROWTH = 20 << 20
"""Bytes by which a segment of CUDA's allocator grows."""


class Event(Protocol):
    """A place in a stream."""

    def synchronize(self) -> None:
        """Wait on the host until the stream has passed it."""

    def query(self) -> bool:
        """Whether the stream has passed it."""


class Device(Protocol):
    """An accelerator."""

    device: torch.device

    def attach(self) -> None:
        """First thing in every thread: its calls are for this accelerator. CUDA's current device is
        of the thread, and a new one's is GPU 0, where even waiting for an event would make a
        context of some 500 MB beside the rank whose GPU that is."""

    def on(self, stream: str) -> contextlib.AbstractContextManager[None]:
        """Work that is issued inside goes to `stream`."""

    def record(self, stream: str) -> Event:
        """Where `stream` is now."""

    def wait(self, stream: str, event: Event) -> None:
        """`stream` goes on when `event` has passed; the host does not wait."""

    def reading(self, stream: str, pool: str) -> None:
        """What `stream` has been told so far still reads memory that was made in the stream `pool`
        and is free since: the allocator must not take it from the GPU before that is done."""

    def peak_bytes(self) -> int:
        """The most that the allocator held (CUDA: reserved from the driver)."""

    def allocated(self) -> int:
        """Bytes of tensors that the process has there now (CUDA only; else 0)."""

    def used(self) -> tuple[int, int]:
        """Bytes of tensors of this process there now, and bytes of all that is not this process's
        allocator: its context, other processes."""

    def limit(self, size: int) -> None:
        """The allocator gets no more than `size` bytes from the driver, until `unlimit`."""

    def unlimit(self) -> None:
        """As it was before `limit`."""

    def begin(self, held: int) -> None:
        """Training begins, with `held` bytes in states and weights that stay."""

    def book(self, size: int) -> None:
        """A chunk's weights take `size` bytes, below 0 give them back: no operation shows it."""

    def release(self, size: int) -> None:
        """This part of the bytes that were held when training began are given back."""

    def elsewhere(self) -> contextlib.AbstractContextManager[None]:
        """What is made inside is in host memory."""

    def reset_peak(self) -> None:
        """`peak_bytes` begins anew."""

    def trim(self) -> None:
        """Memory that the allocator keeps for later goes back."""

    def searched(self) -> int:
        """How often the allocator had to give memory back to find some, until now."""

    def synchronize(self) -> None:
        """The host waits for all streams."""

    def stamp(self, stream: str) -> Any:
        """A place in a stream that has a time."""

    def between(self, begin: Any, end: Any) -> float:
        """Seconds between two stamps that have passed."""


class _Done:
    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True


class SimulatedDevice:
    """Host memory as an accelerator. `counted`: with a limit, as a real one has."""

    def __init__(self, counted: bool = False) -> None:
        self.device = torch.device("cpu")
        self.ledger = Ledger() if counted else None
        self._moving = self._most = 0
        self._meter: Meter | None = None

    def attach(self) -> None:
        return

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        yield

    def record(self, stream: str) -> Event:
        return _Done()

    def wait(self, stream: str, event: Event) -> None:
        return

    def reading(self, stream: str, pool: str) -> None:
        return

    def peak_bytes(self) -> int:
        """Weights on the move have a part of their own, as with CUDA's allocator, whose memory goes
        round in the stream that asked for it."""
        return self.ledger.peak + self._most if self.ledger else 0

    def allocated(self) -> int:
        return 0

    def used(self) -> tuple[int, int]:
        return (self.ledger.used if self.ledger else 0), 0

    def limit(self, size: int) -> None:
        if self.ledger is not None:
            self.ledger.limit = size

    def unlimit(self) -> None:
        if self._meter is not None:
            self._meter.__exit__(None, None, None)
            self._meter = None

    def begin(self, held: int) -> None:
        if self.ledger is not None:
            self.ledger.take(held)
            self._meter = Meter(self.ledger)
            self._meter.__enter__()

    def book(self, size: int) -> None:
        if self._meter is not None and self.ledger is not None:
            self.ledger.book(size)
            self._moving += size
            self._most = max(self._most, self._moving)

    def release(self, size: int) -> None:
        if self._meter is not None and self.ledger is not None:
            self.ledger.take(-size)

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        with _disable_current_modes() if self._meter is not None else contextlib.nullcontext():
            yield

    def reset_peak(self) -> None:
        if self.ledger is not None:
            self.ledger.mark()
            self._most = self._moving

    def trim(self) -> None:
        return

    def searched(self) -> int:
        return 0

    def synchronize(self) -> None:
        return

    def stamp(self, stream: str) -> Any:
        return time.perf_counter()

    def between(self, begin: Any, end: Any) -> float:
        return float(end - begin)


class CudaDevice:
    """A CUDA GPU. `sleeps`: a thread that waits for an event sleeps, and does not ask again and
    again: later by some 50 us, and the core is free meanwhile."""

    def __init__(self, index: int | None = None, sleeps: bool = False) -> None:
        self._sleeps = sleeps
        number = torch.cuda.current_device() if index is None else index
        self.device = torch.device("cuda", number)
        self._before: float | None = None
        names = ("h2d", "d2h", "back", "reduce", "states in", "optimizer", "states out")
        self._streams = {name: torch.cuda.Stream(self.device) for name in names}
        self._kept: list[torch.Tensor] = []

    def attach(self) -> None:
        torch.cuda.set_device(self.device)

    def _stream(self, name: str) -> torch.cuda.Stream:
        return self._streams.get(name) or torch.cuda.current_stream(self.device)

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        with torch.cuda.stream(self._stream(stream)):
            yield

    def record(self, stream: str) -> Event:
        event = torch.cuda.Event(blocking=self._sleeps)
        event.record(self._stream(stream))
        return event

    def wait(self, stream: str, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._stream(stream).wait_event(event)

    def reading(self, stream: str, pool: str) -> None:
        # Memory that is free in its own stream's order may still be read in another stream, which
        # the next use of it waits for. An allocator that finds nothing takes such memory from the
        # GPU, and waits for the stream that it was made in, and no other
        # (ExpandableSegment::unmapHandles of torch's CUDACachingAllocator.cpp): what reads it then
        # can meet an illegal address. Before that it waits for tensors that were freed while
        # another stream used them. This is one.
        with self.on(pool):
            witness = torch.empty(1, dtype=torch.uint8, device=self.device)
        witness.record_stream(self._stream(stream))

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_reserved(self.device))

    def allocated(self) -> int:
        with contextlib.suppress(AttributeError):  # the plan counts them, and they come again
            torch._C._cuda_clearCublasWorkspaces()
        return int(torch.cuda.memory_allocated(self.device))

    def used(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.device)
        outside = total - free - torch.cuda.memory_reserved(self.device)
        return int(torch.cuda.memory_allocated(self.device)), int(outside)

    def limit(self, size: int) -> None:
        """Limit what torch allocates on this GPU in this process. What was cached is given
        back first; from now on segments grow in place, so that what one size left is of use to the
        next."""
        torch.cuda.empty_cache()
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        for pool in ("compute", "h2d", "back"):  # there is always room for `reading` there
            with self.on(pool):
                self._kept.append(torch.empty(1, dtype=torch.uint8, device=self.device))
        total = torch.cuda.get_device_properties(self.device).total_memory
        self._before = torch.cuda.get_per_process_memory_fraction(self.device)
        # A segment grows by whole parts, and the last one is checked before it is rounded up.
        share = max(0, size - GROWTH) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), self.device)

    def unlimit(self) -> None:
        if self._before is not None:
            torch.cuda.set_per_process_memory_fraction(self._before, self.device)
            self._before = None
            self._kept.clear()

    def begin(self, held: int) -> None:
        return

    def book(self, size: int) -> None:
        return

    def release(self, size: int) -> None:
        return

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        yield

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def searched(self) -> int:
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))

    def trim(self) -> None:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def stamp(self, stream: str) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream(stream))
        return event

    def between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1000


def pick(name: str = "auto") -> Device:
    """`auto`: CUDA where there is a GPU, else the simulated device; `cpu` or `cuda` by name;
    `simulated`: host memory whose use is counted and limited by the budget. Raises UsageError."""
    if name not in ("auto", "cuda", "cpu", "simulated"):
        raise UsageError(
            f"evener.device = {name!r}",
            "give auto, cuda, cpu or simulated; torch.cuda.set_device says which GPU",
        )
    if name == "simulated":
        return SimulatedDevice(counted=True)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return SimulatedDevice()
    return CudaDevice()
