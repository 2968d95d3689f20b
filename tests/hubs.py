"""A hub in a thread of this process, and nodes, for tests of nodes that come and go."""

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

import torch
from torch import nn

from evener.comm.hub.client import Place
from evener.comm.hub.membership import Membership
from evener.comm.hub.rounds import NodeRounds
from evener.comm.hub.server import Hub
from evener.comm.hub.token import Token, of_server
from evener.comm.options import Options
from evener.errors import EvenerError, UsageError

T = TypeVar("T")
LIMIT = 60.0
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}


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


class Node:
    """A model of one rank that is a node, in this process."""

    def __init__(self, hub: LiveHub, name: str, seed: int = 0, width: int = 6, **how: Any) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
        self.place = hub.place(name)
        options = Options(**{"every": 1000, "timeout": 20.0, **OUTER, **how})
        self.rounds = NodeRounds(list(self.net.named_parameters()), self.net, options)

    def begin(self) -> None:
        self.rounds.begin(self.place)

    @torch.no_grad()
    def step(self, by: float = 0.01) -> None:
        for parameter in self.net.parameters():
            parameter.add_(by)
        self.rounds.stepped()

    def bits(self) -> list[float]:
        tensors = [*self.net.parameters(), *self.net.buffers()]
        return torch.cat([tensor.detach().float().flatten() for tensor in tensors]).tolist()

    def die(self) -> None:
        """As a killed process: its connection ends, and nothing follows."""
        link: Any = self.rounds._link
        link.refused = UsageError("dead", "")
        link.again()


def together(*acts: Callable[[], Any]) -> None:
    """Run all at once, as nodes do; raises what one of them raised."""
    errors: list[Exception] = []

    def run(act: Callable[[], Any]) -> None:
        try:
            act()
        except (EvenerError, AssertionError) as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
