"""The accelerator as the engine sees it: streams, events, copies. Two implementations.

`CudaDevice` has a persistent stream for each direction beside the stream that computes.
`SimulatedDevice` is host memory that plays the accelerator: the same engine runs on it without a
GPU. Its copies are done when they return; the engine's own threads keep the asynchrony that its
logic must stand.

Streams by name: "compute" (the one that is current where the model runs), "h2d", "d2h".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import torch


class Event(Protocol):
    """A place in a stream."""

    def synchronize(self) -> None:
        """Wait on the host until the stream has passed it."""

    def query(self) -> bool:
        """Whether the stream has passed it."""


class Device(Protocol):
    """An accelerator."""

    device: torch.device

    def on(self, stream: str) -> contextlib.AbstractContextManager[None]:
        """Work that is issued inside goes to `stream`."""

    def record(self, stream: str) -> Event:
        """Where `stream` is now."""

    def wait(self, stream: str, event: Event) -> None:
        """`stream` goes on when `event` has passed; the host does not wait."""

    def peak_bytes(self) -> int:
        """The most that was allocated."""


class _Done:
    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True


class SimulatedDevice:
    """Host memory as an accelerator."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        yield

    def record(self, stream: str) -> Event:
        return _Done()

    def wait(self, stream: str, event: Event) -> None:
        return

    def peak_bytes(self) -> int:
        return 0


class CudaDevice:
    """A CUDA GPU."""

    def __init__(self, index: int | None = None) -> None:
        number = torch.cuda.current_device() if index is None else index
        self.device = torch.device("cuda", number)
        self._streams = {name: torch.cuda.Stream(self.device) for name in ("h2d", "d2h")}

    def _stream(self, name: str) -> torch.cuda.Stream:
        return self._streams.get(name) or torch.cuda.current_stream(self.device)

    @contextlib.contextmanager
    def on(self, stream: str) -> Iterator[None]:
        with torch.cuda.stream(self._stream(stream)):
            yield

    def record(self, stream: str) -> Event:
        event = torch.cuda.Event()
        event.record(self._stream(stream))
        return event

    def wait(self, stream: str, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._stream(stream).wait_event(event)

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device))


def pick(name: str = "auto") -> Device:
    """`auto`: CUDA where there is a GPU, else the simulated device; `cpu` or `cuda` by name."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return SimulatedDevice()
    return CudaDevice()
