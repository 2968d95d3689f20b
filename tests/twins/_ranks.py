"""Processes of a small world that stay between programs, for twins whose programs need ranks."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tests.worlds import _context


class Switch:
    """The fault that a twin's ranks put in before they run a program; "" for none."""

    fault = ""

    @contextlib.contextmanager
    def put(self, name: str) -> Iterator[None]:
        self.fault = name
        try:
            yield
        finally:
            self.fault = ""


class Ranks:
    """`size` processes with a Gloo group. One that fails or hangs ends the world: a new one starts.

    `run(name, ...)` calls `name`, as "package.module:function", with (rank, size, ...) on each.
    """

    def __init__(self, size: int, timeout: float = 120) -> None:
        self.size, self.timeout = size, timeout
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._store: Any = None
        atexit.register(self.stop)

    def run(self, name: str, *args: Any) -> list[Any]:
        """What the ranks returned.

        Raises AssertionError with the first traceback of a rank, ChildProcessError where a rank
        died, TimeoutError.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((name, args))
        found: dict[int, Any] = {}
        deadline = time.monotonic() + self.timeout
        while len(found) < self.size:
            waiting = [p for i, p in enumerate(self._pipes) if i not in found]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                try:
                    good, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError as error:
                    self.stop()
                    raise ChildProcessError("a rank died") from error
                if not good:
                    self.stop()
                    raise AssertionError(value)
                found[self._pipes.index(pipe)] = value  # type: ignore[arg-type]
            if not ready:
                self.stop()
                raise TimeoutError(f"not finished after {self.timeout} s")
        return [found[rank] for rank in range(self.size)]

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.size):
            here, there = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(there, self._store.port, rank, self.size), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []


def _serve(pipe: Connection, port: int, rank: int, size: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            os._exit(0)
        module, _, function = name.partition(":")
        try:
            value = getattr(importlib.import_module(module), function)(rank, size, *args)
            pipe.send((True, value))
        except BaseException:  # noqa: BLE001 - the parent raises it
            pipe.send((False, f"rank {rank}: {traceback.format_exc()}"))
