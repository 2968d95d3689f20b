"""Threads, as scripts and tests take them from `horovod.runner.util.threads`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call `target(*args)` in a new thread, and give the thread. silent: drop what it raises."""
    if not isinstance(args, tuple):
        raise ValueError(
            f"args must be a tuple, not {type(args)}, for a single argument use (arg,)"
        )

    def quiet(*given: Any) -> None:
        with contextlib.suppress(Exception):
            target(*given)

    thread = threading.Thread(
        target=quiet if silent else target, args=args, name=name, daemon=daemon
    )
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Call `func(*args)` in a thread of its own once `event` is set, unless `stop` came first."""
    if event is None:
        raise ValueError("Event must not be None")
    if not isinstance(args, tuple):
        raise ValueError(
            f"args must be a tuple, not {type(args)}, for a single argument use (arg,)"
        )
    if stop is None and not daemon:
        raise ValueError("Stop event must be given for non-daemon event thread")

    def watch() -> None:
        while not event.wait(check_stop_interval_s):
            if stop is not None and stop.is_set():
                return
        if stop is None or not stop.is_set():
            func(*args)

    return in_thread(watch, daemon=daemon, silent=silent)


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: Sequence[Sequence[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Call `fn(*args)` for each entry of `args_list`, in threads.

    Gives the results by the entries' places; None, at once, where block_until_all_done is False.
    """
    if not args_list:
        return {} if block_until_all_done else None
    workers = min(max_concurrent_executions, len(args_list))
    pool = ThreadPoolExecutor(workers)
    futures = [pool.submit(fn, *args) for args in args_list]
    pool.shutdown(wait=block_until_all_done)
    if not block_until_all_done:
        return None
    return {index: future.result() for index, future in enumerate(futures)}
