"""What a worker tells the driver while it trains: `log({...})` reaches the executor's callbacks."""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ray.util.queue import Queue

_queue: Any = None
_warned = False
_POLL = 0.1


def configure(queue: Any) -> None:
    """Send what is logged in this process into `queue`."""
    global _queue
    _queue = queue


def log(info_dict: dict[str, Any]) -> None:
    """Send a dictionary to the driver. If no driver listens it is dropped, with a warning."""
    global _warned
    if _queue is not None:
        _queue.put(info_dict)
    elif not _warned:
        _warned = True
        warnings.warn("ray_logger.log: no executor with callbacks listens", stacklevel=2)


@contextlib.contextmanager
def heard(callbacks: Sequence[Callable[[Any], Any]] | None) -> Iterator[Any]:
    """A queue of which everything is given to each of `callbacks`; None where there are none.

    At the end everything that was logged has been given.
    """
    if not callbacks:
        yield None
        return
    queue = Queue(actor_options={"num_cpus": 0})
    ended = threading.Event()

    def give() -> None:
        while True:
            last = ended.is_set()
            while not queue.empty():
                said = queue.get_nowait()
                for callback in callbacks:
                    callback(said)
            if last:
                return
            time.sleep(_POLL)

    thread = threading.Thread(target=give, name="evener-ray-log", daemon=True)
    thread.start()
    try:
        yield queue
    finally:
        ended.set()
        thread.join()
        queue.shutdown(force=True)
