"""Work beside the computation: a stream of its own on a GPU, a thread of its own on a CPU.

What is submitted runs in order. All of a process's collectives between experts go through one lane,
so they have one order on every rank; NCCL's and Gloo's both need that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")
_LOOK = 0.25  # seconds between two looks for an error, while a thread's work is waited for


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in tuples, lists and dataclasses of tensors."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors(each)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors(getattr(value, name))


class Ticket(Generic[Result]):
    """A ticket for submitted work. `wait` once, where its result is used."""

    def __init__(
        self, value: Result | Future[Result], event: torch.cuda.Event | None,
        failed: Callable[[], Exception | None] = lambda: None,
    ) -> None:  # fmt: skip
        self._value, self._event, self._failed = value, event, failed

    def wait(self) -> Result:
        """The result. On a GPU the current stream waits, not the host."""
        if isinstance(self._value, Future):
            return self._done(self._value)
        if self._event is not None:
            stream = torch.cuda.current_stream()
            stream.wait_event(self._event)
            for tensor in tensors(self._value):
                if tensor.is_cuda:
                    tensor.record_stream(stream)
        return self._value

    def hold(self) -> None:
        """Wait on the host: until the work is done."""
        if isinstance(self._value, Future):
            self._done(self._value)
        elif self._event is not None:
            self._event.synchronize()

    def _done(self, future: Future[Result]) -> Result:
        while True:
            try:
                return future.result(_LOOK)
            except TimeoutError:
                # Gloo's abort() does not end a wait: only a peer that exits does.
                if not future.done() and (error := self._failed()) is not None:
                    raise error from None


class Lane:
    """See the module. One per process and device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # First in line for multiprocessors: products take all of them at once.
            self._stream = torch.cuda.Stream(device, priority=-1)
        # Whether the host is ahead of the computation: what was called has not run yet.
        self.ahead = self._stream is not None
        # Gives the error of another rank, once one is known; a wait ends with it.
        self.failed: Callable[[], Exception | None] = lambda: None
        self._thread = None if self._stream else ThreadPoolExecutor(1, "evener-moe")

    def mark(self) -> torch.cuda.Event | None:
        """What has been enqueued up to here: what a later `submit` has to wait for."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def submit(
        self, work: Callable[..., Result], *given: Any, after: torch.cuda.Event | None = None
    ) -> Ticket[Result]:
        """Run work(*given) on the lane, without autograd. `given` must name the tensors it reads.

        after: a mark; default: all that has been enqueued.
        """
        if self._stream is None:
            assert self._thread is not None
            return Ticket(self._thread.submit(_quietly, work, given), None, self.failed)
        mark = after or self.mark()
        assert mark is not None
        self._stream.wait_event(mark)
        for tensor in tensors(given):
            if tensor.is_cuda:
                tensor.record_stream(self._stream)
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream), torch.no_grad():
            value = work(*given)
            done.record()
        return Ticket(value, done)


def _quietly(work: Callable[..., Result], given: tuple[Any, ...]) -> Result:
    with torch.no_grad():
        return work(*given)
