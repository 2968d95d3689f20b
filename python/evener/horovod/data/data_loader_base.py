"""Loaders as classes: a subclass says how batches are made, a mixin makes them ahead of time.

class Loader(AsyncDataLoaderMixin, MyLoader): ...     # MyLoader is a BaseDataLoader
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any


class BaseDataLoader:
    """Iterating gives what `_iterate` yields, through `_process_batch`."""

    def __len__(self) -> int:
        """The number of batches."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """Yield the batches of one epoch."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """A hook: what iterating gives for `batch`."""
        return batch


class AsyncDataLoaderMixin:
    """Put before a BaseDataLoader: a thread calls its `_iterate`, epoch after epoch, ahead of who
    iterates. What `_iterate` raises is raised where the batch would have come.
    """

    def __init__(
        self,
        async_loader_queue_size: int = 64,
        debug_data_loader: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """async_loader_queue_size: batches ahead; 0: no thread. debug_data_loader: accepted."""
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        super().__init__(*args, **kwargs)
        self.started = False
        if async_loader_queue_size > 0:
            self.finished_event = threading.Event()
            self.queue: queue.Queue[Any] = queue.Queue(async_loader_queue_size)
            self.thread = threading.Thread(
                target=self._async_worker, name="evener-data-loader", daemon=True
            )

    def close_async_loader(self) -> None:
        """End the thread. Once."""
        if self.async_loader_queue_size <= 0 or not self.started:
            return
        self.finished_event.set()
        while self.thread.is_alive():
            try:  # it may wait for room
                self.queue.get(timeout=0.05)
            except queue.Empty:  # noqa: S112 - it may be empty by now
                continue

    def _async_worker(self) -> None:
        try:
            while not self.finished_event.is_set():
                for batch in self._iterate():  # type: ignore[attr-defined]
                    if self.finished_event.is_set():
                        return
                    self.queue.put(_Item(batch))
                self.queue.put(_Item(end=True))
        except Exception as error:  # noqa: BLE001 - raised where the batch would have come
            self.queue.put(_Item(error=error))

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]
            return
        if not self.started:
            self.started = True
            self.thread.start()
        while True:
            item = self.queue.get()
            if item.error is not None:
                raise item.error
            if item.end:
                return
            yield self._process_batch(item.batch)  # type: ignore[attr-defined]


class _Item:
    """A batch, the end of an epoch, or what went wrong."""

    def __init__(self, batch: Any = None, end: bool = False, error: Any = None) -> None:
        self.batch, self.end, self.error = batch, end, error
