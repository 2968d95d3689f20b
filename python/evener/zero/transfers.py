"""The two threads beside the training loop.

`Loader` brings chunks to the accelerator in the order in which they were asked for. It waits for a
chunk's optimizer step, so the training loop never does, except where it needs the chunk now.
`Updater` runs the optimizer on the host, chunk by chunk in the order of the next forward pass.
Neither holds the GIL while it waits, copies or computes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Worker(Generic[T]):
    """A thread that calls `begin`, then `act` on what is put, in order. `act` must not raise."""

    def __init__(
        self, name: str, act: Callable[[T], None], begin: Callable[[], None] = lambda: None
    ) -> None:
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._act = act
        self._begin = begin
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Ask for it."""
        self._queue.put(item)

    def close(self) -> None:
        """Finish what was put, then stop."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._begin()
        while (item := self._queue.get()) is not None:
            self._act(item)
