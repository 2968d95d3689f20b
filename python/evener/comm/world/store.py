"""A key-value store over TCP without torch: torch's TCPStore, as far as ranks need it to meet.

Launchers (torchrun, `evener launch`) hold a TCPStore of torch's for their ranks. A TensorFlow
process must not import torch, so here is the other end of that protocol, and a small server of it
for rank 0 where no launcher holds one (torch/csrc/distributed/c10d/TCPStore.cpp has the protocol:
a byte that says what is asked, numbers little-endian, texts behind their length of 8 bytes). A rank
that uses torch and one that does not so meet in the same store, and find out there that they do not
fit together.

Waiting is asking again: a wait of the protocol can only be ended by closing the connection.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta

_VALIDATE, _SET, _COMPARE_SET, _GET, _ADD, _CHECK, _WAIT = range(7)
_MULTI_GET, _MULTI_SET, _PING = 10, 11, 13
_MAGIC = 0x3C85F7CE
_READY, _NOT_READY = 0, 1
# torch's client puts this before every key.
_PREFIX = "/"
_LONGEST = 64 << 20
# Seconds between two questions whether a key is there.
_PAUSE = 0.02


class StoreError(RuntimeError):
    """The store did not answer, or not in time; a RuntimeError as torch's."""


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


class _Pipe:
    """Numbers and texts over a connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def exactly(self, count: int) -> bytes:
        parts = []
        while count:
            part = self.sock.recv(min(count, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def number(self, form: str) -> int:
        return int(struct.unpack("<" + form, self.exactly(struct.calcsize(form)))[0])

    def text(self) -> bytes:
        length = self.number("Q")
        if length > _LONGEST:
            raise StoreError(f"the store's peer sends {length} bytes at once")
        return self.exactly(length)


class Client:
    """A connection to a store. The methods are torch's; a value is bytes."""

    def __init__(self, host: str, port: int, timeout: timedelta) -> None:
        """Tries again until the time is over. Raises StoreError."""
        self.host, self.port = host, port
        self._timeout = timeout.total_seconds()
        self._lock = threading.Lock()
        deadline = time.monotonic() + self._timeout
        while True:
            left = deadline - time.monotonic()
            try:
                sock = socket.create_connection((host, port), max(min(left, 5.0), 0.1))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.settimeout(max(left, 1.0))
                self._pipe = _Pipe(sock)
                sock.sendall(struct.pack("<BI", _VALIDATE, _MAGIC))
                sock.sendall(struct.pack("<BI", _PING, 77))
                if self._pipe.number("I") != 77:
                    raise StoreError(f"what listens at {host} port {port} is no TCPStore")
                sock.settimeout(self._timeout)
                return
            except (OSError, EOFError) as error:
                if time.monotonic() >= deadline:
                    raise StoreError(f"{host} port {port}: {error or 'it hangs up'}") from error
                time.sleep(0.1)

    def _ask(self, kind: int, *parts: bytes) -> None:
        self._pipe.sock.sendall(bytes([kind]) + b"".join(parts))

    @contextlib.contextmanager
    def _talk(self):  # type: ignore[no-untyped-def]
        with self._lock:
            try:
                yield self._pipe
            except (OSError, EOFError) as error:
                raise StoreError(f"the connection to the store is lost: {error}") from error

    def set(self, key: str, value: str | bytes) -> None:
        """Write."""
        data = value.encode() if isinstance(value, str) else value
        with self._talk():
            self._ask(_SET, _text(_key(key)), _text(data))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 where there is none; gives the sum."""
        with self._talk() as pipe:
            self._ask(_ADD, _text(_key(key)), struct.pack("<q", amount))
            return int(pipe.number("q"))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        with self._talk() as pipe:
            self._ask(_CHECK, struct.pack("<Q", len(keys)), *[_text(_key(key)) for key in keys])
            return bool(pipe.number("B") == _READY)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all are there. Raises StoreError where they are not in time."""
        seconds = self._timeout if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + seconds
        while not self.check(keys):
            if time.monotonic() >= deadline:
                raise StoreError(f"no {', '.join(keys[:4])} after {seconds:g} s")
            time.sleep(_PAUSE)

    def get(self, key: str) -> bytes:
        """The value, waited for."""
        self.wait([key])
        with self._talk() as pipe:
            self._ask(_GET, _text(_key(key)))
            return bytes(pipe.text())

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of all."""
        return [self.get(key) for key in keys]


def _key(key: str) -> bytes:
    return (_PREFIX + key).encode()


class Prefixed:
    """A part of a store: its keys begin with `prefix` there."""

    def __init__(self, prefix: str, store: Client | Prefixed) -> None:
        self._prefix, self.underlying_store = prefix, store

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def set(self, key: str, value: str | bytes) -> None:
        """As of `Client`; so are the others."""
        self.underlying_store.set(self._key(key), value)

    def add(self, key: str, amount: int) -> int:
        """See `Client`."""
        return self.underlying_store.add(self._key(key), amount)

    def check(self, keys: Sequence[str]) -> bool:
        """See `Client`."""
        return self.underlying_store.check([self._key(key) for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See `Client`."""
        self.underlying_store.wait([self._key(key) for key in keys], timeout)

    def get(self, key: str) -> bytes:
        """See `Client`."""
        return self.underlying_store.get(self._key(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """See `Client`."""
        return self.underlying_store.multi_get([self._key(key) for key in keys])


# --- the server ----------------------------------------------------------------------------------


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily) -> None:
        self.address_family = family
        self.values: dict[bytes, bytes] = {}
        self.changed = threading.Condition()
        super().__init__(address, _Talk)


class _Talk(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pipe = _Pipe(self.request)
        with contextlib.suppress(EOFError, OSError, StoreError):
            while True:
                self._answer(pipe)

    def _answer(self, pipe: _Pipe) -> None:
        kind = pipe.number("B")
        changed, values = self.server.changed, self.server.values
        if kind == _VALIDATE:
            if pipe.number("I") != _MAGIC:
                raise StoreError("a stranger")
        elif kind == _PING:
            self.request.sendall(pipe.exactly(4))
        elif kind == _SET:
            key, value = pipe.text(), pipe.text()
            with changed:
                values[key] = value
                changed.notify_all()
        elif kind == _GET:
            key = pipe.text()
            with changed:
                value = values.get(key, b"")
            self.request.sendall(_text(value))
        elif kind == _ADD:
            key, amount = pipe.text(), pipe.number("q")
            with changed:
                total = int(values.get(key, b"0")) + amount
                values[key] = str(total).encode()
                changed.notify_all()
            self.request.sendall(struct.pack("<q", total))
        elif kind in (_CHECK, _WAIT):
            keys = [pipe.text() for _ in range(min(pipe.number("Q"), _LONGEST))]
            with changed:
                there = all(key in values for key in keys)
                while kind == _WAIT and not there:
                    # Whoever gives up closes the connection, or says so in a byte.
                    changed.wait(0.1)
                    there = all(key in values for key in keys)
                    if not there and self._speaks():
                        break
            if kind == _CHECK:
                self.request.sendall(bytes([_READY if there else _NOT_READY]))
            elif there:
                self.request.sendall(b"\0")
            else:
                pipe.exactly(1)  # CANCEL_WAIT
                self.request.sendall(b"\1")
        elif kind == _MULTI_GET:
            keys = [pipe.text() for _ in range(min(pipe.number("Q"), _LONGEST))]
            with changed:
                found = [values.get(key, b"") for key in keys]
            self.request.sendall(b"".join(_text(value) for value in found))
        else:
            raise StoreError(f"nobody here asks number {kind}")

    def _speaks(self) -> bool:
        """Whether the client says something, or hangs up, while it waits."""
        self.request.setblocking(False)
        try:
            self.request.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        finally:
            self.request.setblocking(True)
        return True


class Host(Client):
    """A store in this process, which ends with it, and a connection to it."""

    def __init__(self, host: str, port: int, timeout: timedelta) -> None:
        """port: 0 for any free one. Raises OSError where it cannot listen."""
        del host  # torch's server listens everywhere too
        try:
            server = _Server(("::", port), socket.AF_INET6)
        except OSError:
            server = _Server(("", port), socket.AF_INET)
        thread = threading.Thread(target=server.serve_forever, name="evener-store", daemon=True)
        thread.start()
        self._server = server
        super().__init__("localhost", server.server_address[1], timeout)


class Alone(Client):
    """A store for a single process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str | bytes) -> None:
        """See `Client`."""
        self._values[key] = value.encode() if isinstance(value, str) else value

    def add(self, key: str, amount: int) -> int:
        """See `Client`."""
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def check(self, keys: Sequence[str]) -> bool:
        """See `Client`."""
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        """See `Client`. Nobody else can write, so it is there or never."""
        if key not in self._values:
            raise StoreError(f"no {key}")
        return self._values[key]
