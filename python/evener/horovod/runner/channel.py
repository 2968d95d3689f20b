"""Connections between `horovod.run` and its ranks: who may connect, from where, for how long.

What travels is pickled, and unpickling runs code. So both sides prove with the handshake of
multiprocessing.connection (HMAC of a random challenge) that they know the job's key, before either
reads more. A stranger who connects and says nothing costs a thread for ten seconds; of those there
are a limited number. The key goes to the ranks in EVENER_RUN, which no command line shows.

The channel proves who speaks. It does not encrypt: docs/reference/security.md.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

_HANDSHAKE = 10.0
# Who has connected and has not proved anything yet; all ranks of a large job may come at once.
_MOST_STRANGERS = 256


class Listener:
    """Listens at `addresses` and gives proven connections to `serve`, each in its own thread."""

    def __init__(
        self, addresses: Sequence[str], key: bytes, serve: Callable[[Connection], None]
    ) -> None:
        """Raises OSError where it cannot listen at one of the addresses."""
        self._key, self._serve = key, serve
        self._strangers = threading.BoundedSemaphore(_MOST_STRANGERS)
        self._listeners: list[socket.socket] = []
        try:
            for address in addresses:
                self._listeners.append(_listen(address))
        except OSError:
            self.close()
            raise
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._accept, name="evener-run", daemon=True)
        self._thread.start()

    @property
    def places(self) -> list[tuple[str, int]]:
        """Addresses and ports at which it listens."""
        return [listener.getsockname()[:2] for listener in self._listeners]

    def close(self) -> None:
        """Takes nobody in any more."""
        if hasattr(self, "_wake"):
            self._wake.close()
            self._thread.join(5.0)
            self._woken.close()
        for listener in self._listeners:
            listener.close()

    def _accept(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for listener in self._listeners:
                selector.register(listener, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        return
                    with contextlib.suppress(OSError):
                        self._take(key.fileobj.accept()[0])  # type: ignore[union-attr]

    def _take(self, stranger: socket.socket) -> None:
        if not self._strangers.acquire(blocking=False):
            stranger.close()
            return
        threading.Thread(target=self._greet, args=(stranger,), daemon=True).start()

    def _greet(self, stranger: socket.socket) -> None:
        try:
            connection = prove(stranger, self._key, first=True)
        except (OSError, EOFError, AuthenticationError):
            return
        finally:
            self._strangers.release()
        with contextlib.suppress(EOFError, OSError), connection:
            self._serve(connection)


def reach(address: str, port: int, key: bytes, seconds: float) -> Connection:
    """A proven connection to a `Listener`. Raises OSError, EOFError or AuthenticationError."""
    return prove(socket.create_connection((address, port), seconds), key, first=False)


def prove(stream: socket.socket, key: bytes, *, first: bool) -> Connection:
    """Both prove that they know `key`; the connection that comes of it owns the socket.

    first: this side asks before it answers. Raises OSError, EOFError or AuthenticationError; the
    socket is closed then, as it is where the other side takes longer than ten seconds.
    """
    stream.setblocking(True)
    # The kernel's limit is for each read; the timer's for all of them.
    limit = struct.pack("ll", int(_HANDSHAKE), 0)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        stream.setsockopt(socket.SOL_SOCKET, option, limit)
    other = stream.dup()
    timer = threading.Timer(_HANDSHAKE, _shut, (other,))
    timer.daemon = True
    timer.start()
    connection = Connection(stream.detach())
    try:
        if first:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
        else:
            answer_challenge(connection, key)
            deliver_challenge(connection, key)
        timer.cancel()
        _without_limit(connection)
    except AssertionError as error:  # what Python 3.11 says to words that it does not understand
        connection.close()
        raise AuthenticationError(f"not this protocol: {error}") from None
    except BaseException:
        connection.close()
        raise
    finally:
        timer.cancel()
        other.close()
    return connection


def _listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=_MOST_STRANGERS)


def _without_limit(connection: Connection) -> None:
    with socket.socket(fileno=connection.fileno()) as stream:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            stream.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 0))
        stream.detach()


def _shut(stream: socket.socket) -> None:
    with contextlib.suppress(OSError):
        stream.shutdown(socket.SHUT_RDWR)
