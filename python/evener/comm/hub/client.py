"""A node's connection to the hub, in a thread of its own: it beats while the program computes.

The thread connects, says who the node is and what it has, and connects again whenever the
connection ends. What the hub answers comes to the program as events, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evener import __version__
from evener.base import settings
from evener.base.log import logger
from evener.comm.errors import CommError
from evener.comm.hub import frames
from evener.comm.hub.frames import Fields
from evener.comm.hub.token import Token
from evener.errors import UsageError

_CONNECT = 10.0
_AGAIN = (0.2, 0.5, 1.0, 2.0)
_BEAT = 1.0
_ENDS = (OSError, EOFError, frames.FrameError, asyncio.TimeoutError)


@dataclass(frozen=True)
class Event:
    """What happened: "take", "keep", "entered", "result", "out" or "lost". `session`: of the
    connection over which it came.
    """

    what: str
    session: int
    fields: Fields
    payload: bytearray


@dataclass(frozen=True)
class Place:
    """Where the hub is, and which node this is. `slot`: None where the hub chooses."""

    host: str
    port: int
    token: Token
    name: str
    slot: int | None

    @classmethod
    def of_variables(cls) -> Place:
        """By EVENER_HUB and the variables beside it. Raises UsageError for what cannot be."""
        host, port = address(settings.EVENER_HUB.get(), settings.EVENER_HUB.name)
        name = settings.EVENER_HUB_TOKEN.name
        token = Token.of(settings.EVENER_HUB_TOKEN.get(), f"{name}")
        own = shard()
        node = settings.EVENER_HUB_NODE.get() or own_name()
        return cls(host, port, token, node, None if own is None else own[0])

    def hello(self, what: str, uid: str) -> Fields:
        """The first message."""
        return {
            "is": what,
            "protocol": frames.PROTOCOL,
            "version": __version__,
            "secret": self.token.secret,
            "name": self.name,
            "uid": uid,
            "slot": self.slot,
        }


def own_name() -> str:
    """A name for this node, of which no other one has the same."""
    return f"{socket.gethostname()}-{os.getpid()}"[:100]


def shard() -> tuple[int, int] | None:
    """This node's share of the data, and the number of shares: EVENER_HUB_SLOT."""
    setting = settings.EVENER_HUB_SLOT
    if not (text := setting.get()):
        return None
    slot, _, slots = text.partition("/")
    if not (slot.isdecimal() and slots.isdecimal() and int(slot) < int(slots)):
        raise settings.SettingError(setting.name, text, setting.allowed)
    return int(slot), int(slots)


def address(text: str, where: str) -> tuple[str, int]:
    """HOST:PORT, or [ADDRESS]:PORT. Raises UsageError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 <= int(port) < 1 << 16:
        raise UsageError(f"{where} {text!r} is no HOST:PORT", "write the hub's host and port")
    return host.strip("[]"), int(port)


def promise(place: Place, seconds: float) -> tuple[int, int]:
    """Ask the hub for a slot, for a node that is about to start; the slot, and how many there are.

    Raises UsageError where the hub refuses, CommError where it does not answer in `seconds`.
    """

    async def ask() -> Fields:
        until = time.monotonic() + seconds
        while True:
            try:
                reader, writer = await _open(place)
                try:
                    await frames.write(writer, place.hello("promise", secrets.token_hex(8)))
                    fields, _ = await asyncio.wait_for(
                        frames.read(reader, lambda _: 0, frames.FIRST), _CONNECT
                    )
                    return fields
                finally:
                    writer.transport.abort()
            except _ENDS as error:
                if why := _another_token(error, place):
                    raise why from None
                if time.monotonic() > until:
                    raise CommError(
                        f"the hub at {place.host}:{place.port} does not answer: {_words(error)}",
                        "start it first, and check address and firewall",
                    ) from None
                await asyncio.sleep(_AGAIN[1])

    fields = asyncio.run(ask())
    if fields["is"] == "refused":
        raise _refusal(fields, place)
    return frames.count(fields, "slot"), frames.count(fields, "slots")


async def _open(place: Place) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    opened = asyncio.open_connection(
        place.host, place.port, ssl=place.token.of_client(), server_hostname="evener-hub"
    )
    return await asyncio.wait_for(opened, _CONNECT)


def _another_token(error: BaseException, place: Place) -> UsageError | None:
    if not isinstance(error, ssl.SSLCertVerificationError):
        return None
    return UsageError(
        f"the hub at {place.host}:{place.port} has another token than this node",
        "copy the hub's token file to the node",
    )


def _refusal(fields: Fields, place: Place) -> UsageError:
    why, fix = str(fields.get("why"))[:500], str(fields.get("fix"))[:500]
    return UsageError(f"the hub at {place.host}:{place.port} refuses this node: {why}", fix)


def _words(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return "no answer" if isinstance(error, asyncio.TimeoutError) else " ".join(text.split())[:200]


class Link:
    """See the module. `joins` gives what the node says of itself, and `state` the shared weights
    with the fields that describe them; both are called in the link's thread.
    """

    def __init__(
        self,
        place: Place,
        joins: Callable[[], Fields],
        state: Callable[[], tuple[Fields, frames.Payload]],
        most: Callable[[Fields], int],
    ) -> None:
        self.place = place
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.slot = 0  # as the hub says
        self.session = 0  # of the connection that there is, or was last
        self.called = -1  # the round whose changes the hub has asked for
        self.waits = False  # the hub waits for more nodes
        self.lost_at: float | None = time.monotonic()  # None while connected
        self.why = "not connected yet"
        self.refused: UsageError | None = None
        self.sent = self.received = 0
        self._joins, self._state, self._most = joins, state, most
        self._uid = secrets.token_hex(16)
        self._silence = 20.0
        self._heard = 0.0
        self._ending = False
        self._loop = asyncio.new_event_loop()
        self._outbox: asyncio.Queue[tuple[Fields, frames.Payload, int]] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._thread = threading.Thread(target=self._run, name="evener-hub", daemon=True)
        self._thread.start()

    def send(self, fields: Fields, session: int, payload: frames.Payload = b"") -> None:
        """Send, if the connection of that session lives."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._put, (fields, payload, session))

    def again(self) -> None:
        """End this connection and ask the hub anew."""
        self._loop.call_soon_threadsafe(self._abort)

    def close(self, leave: bool) -> None:
        """End the thread. `leave`: tell the hub that this node came to its end."""
        if leave and self.lost_at is None:
            self.send({"is": "leave"}, self.session)
        self._ending = True
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._wake)
        self._thread.join(5.0)

    # --- in the thread ---

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._live())
        finally:
            self._loop.close()

    def _put(self, item: tuple[Fields, frames.Payload, int]) -> None:
        if self._outbox is not None:
            self._outbox.put_nowait(item)

    def _abort(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()

    def _wake(self) -> None:
        self._put(({"is": "end"}, b"", self.session))

    async def _live(self) -> None:
        tries = 0
        while not self._ending and self.refused is None:
            why = ""
            try:
                await self._connection()
            except _ENDS as error:
                self.refused = self.refused or _another_token(error, self.place)
                why = _words(error)
            if self.lost_at is None:
                tries = 0
                self.lost_at = time.monotonic()
                self.events.put(Event("lost", self.session, {"why": why}, bytearray()))
            self.why = why
            if not self._ending and self.refused is None:
                await asyncio.sleep(_AGAIN[min(tries, len(_AGAIN) - 1)])
                tries += 1

    async def _connection(self) -> None:
        reader, writer = await _open(self.place)
        self._writer, self._outbox = writer, asyncio.Queue()
        try:
            await frames.write(writer, self.place.hello("hello", self._uid))
            first = frames.read(reader, lambda _: 0, frames.FIRST)
            fields, _ = await asyncio.wait_for(first, _CONNECT)
            if fields["is"] == "refused":
                self.refused = _refusal(fields, self.place)
                return
            self.slot = frames.count(fields, "slot")
            silence = fields.get("silence")
            self._silence = float(silence) if isinstance(silence, int | float) else self._silence
            self._heard = time.monotonic()
            self.session += 1
            self.lost_at, self.waits = None, False
            self.called = -1
            self._outbox.put_nowait((await asyncio.to_thread(self._joins), b"", self.session))
            await self._both(reader, writer)
        finally:
            self._outbox = self._writer = None
            writer.transport.abort()

    async def _both(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read and write until one of them ends."""
        tasks = [
            asyncio.ensure_future(one)
            for one in (self._read(reader), self._write(writer), self._beat())
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        def heard() -> None:
            self._heard = time.monotonic()

        while True:
            fields, payload = await frames.read(reader, self._most, heard=heard)
            heard()
            self.received += len(payload)
            what = fields["is"]
            if what == "beat":
                self.waits = bool(fields.get("waits"))
            elif what == "call":
                self.called = frames.count(fields, "round")
            elif what == "news":
                logger.info("hub: %s", frames.words(fields, "text", 1000))
            elif what == "give":
                said, state = await asyncio.to_thread(self._state)
                assert self._outbox is not None
                self._outbox.put_nowait(({"is": "state", **said}, state, self.session))
            elif what == "refused":
                self.refused = _refusal(fields, self.place)
                return
            else:
                self.events.put(Event(what, self.session, fields, payload))

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        assert self._outbox is not None
        while True:
            fields, payload, session = await self._outbox.get()
            if fields["is"] == "end":
                return
            if session == self.session:  # else it was meant for a connection that is gone
                await frames.write(writer, fields, payload)
                self.sent += len(payload)

    async def _beat(self) -> None:
        assert self._outbox is not None
        while True:
            await asyncio.sleep(_BEAT)
            if self._outbox.empty():
                self._outbox.put_nowait(({"is": "beat"}, b"", self.session))
            if time.monotonic() - self._heard > self._silence:
                raise OSError(f"nothing was heard of the hub for {self._silence:g} s")


def said_by(fields: Fields) -> dict[str, Any]:
    """Round, digest and steps of a message. Raises FrameError for what is none."""
    return {name: frames.count(fields, name) for name in ("round", "digest", "steps")}
