"""A hub in a thread of this process, for tests and the twin of nodes that come and go."""

from __future__ import annotations

import asyncio
import atexit
import functools
import shutil
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from evener.comm.hub.client import Place
from evener.comm.hub.membership import Membership
from evener.comm.hub.server import Hub
from evener.comm.hub.token import Token, of_server

T = TypeVar("T")
LIMIT = 60.0


@functools.cache
def _made(name: str) -> tuple[Token, ssl.SSLContext]:
    """Without a file: processes of `tests.worlds` end without cleaning up."""
    with tempfile.TemporaryDirectory(prefix="evener-hub-") as folder:
        return of_server(Path(folder) / name)


@functools.cache
def token_file(name: str = "one") -> Path:
    """One of this process's tokens."""
    folder = tempfile.mkdtemp(prefix="evener-hub-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / name
    path.write_text(_made(name)[0].text + "\n", encoding="utf-8")
    return path


def until(over: Callable[[], bool], what: str) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + LIMIT
    while not over():
        assert time.monotonic() < end, f"{what}: not within {LIMIT:g} s"
        time.sleep(0.002)


class LiveHub:
    """A hub that listens on loopback. `said`: its lines. `port` 0: a free one."""

    def __init__(
        self, least: int = 1, slots: int = 4, port: int = 0, silence: float = 30, late: float = 60
    ) -> None:
        token, tls = _made("one")
        self.said: list[str] = []
        self.membership = Membership(least, slots, silence, late)
        self.loop = asyncio.new_event_loop()
        self.hub: Any = None

        async def serve() -> None:
            hub = Hub(token, tls, self.membership, self.said.append)
            self._task = asyncio.ensure_future(hub.serve("127.0.0.1", port))
            self.hub = hub
            await asyncio.gather(self._task, return_exceptions=True)
            await asyncio.sleep(0.05)

        self._thread = threading.Thread(target=lambda: self.loop.run_until_complete(serve()))
        self._thread.start()
        until(lambda: self.hub and (self.hub.port or self._task.done()), "the hub starts")
        self.port = self.hub.port

    def place(self, name: str, slot: int | None = None) -> Place:
        """Where a node of that name finds it."""
        return Place("127.0.0.1", self.port, _made("one")[0], name, slot)

    def call(self, function: Callable[[], T]) -> T:
        """`function`, in the hub's thread."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(LIMIT)

    def stop(self) -> None:
        """As if it was killed: connections end."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._task.cancel)
            self._thread.join(LIMIT)
        self.loop.close()
