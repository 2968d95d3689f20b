"""`evener embedding serve`: lookups over HTTP, while the trainer's deltas arrive.

One process, the standard library's HTTP server (HTTP/1.1, connections stay open), a thread per
connection. At most `queue` requests are in work or wait for it; one more is answered 503 at once,
so that a client can ask elsewhere, and nothing piles up. `Follower` is a thread that takes new
snapshots and deltas of a folder in. The store reads each row under its shard's lock, so a row in an
answer is the old one or the new one, never parts of both.

    POST /lookup    body: int64 keys, little-endian; answer: float32 [n, dim], little-endian
                    or JSON {"keys": [...]}; answer: {"values": [[...]], "found": [...], "step": n}
    GET  /stats     JSON
    GET  /metrics   Prometheus' text
    GET  /health    200 once there are rows to serve
"""

from __future__ import annotations

import hmac
import json
import logging
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from evener.embedding import files
from evener.embedding.options import Options
from evener.embedding.store import Store
from evener.errors import UsageError

logger = logging.getLogger("evener.embedding")
MOST_KEYS = 1_000_000
_IDLE_S = 60.0


@dataclass
class Served:
    """What a server did since it began."""

    requests: int = 0
    keys: int = 0
    found: int = 0
    refused: int = 0
    deltas: int = 0
    snapshots: int = 0
    problem: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **more: int) -> None:
        """Count."""
        with self.lock:
            for name, n in more.items():
                setattr(self, name, getattr(self, name) + n)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `hit_rate` is the share of keys that had a row."""
        rate = self.found / self.keys if self.keys else 0.0
        names = ("requests", "keys", "found", "refused", "deltas", "snapshots", "problem")
        return {**{name: getattr(self, name) for name in names}, "hit_rate": rate}


class Follower:
    """Keeps a store at the last file of a folder.

    A delta that follows what is there is taken in place; a newer full snapshot, or a gap, makes the
    store anew from the folder. A file that is not whole is waited for: the rows before it stay.
    """

    def __init__(self, store: Store, folder: Path, served: Served, every: float) -> None:
        self.store, self.folder, self.served, self.every = store, folder, served, every
        self._last = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evener-follow", daemon=True)

    def start(self) -> None:
        """Look again every `every` seconds, until `stop`."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join()

    def once(self) -> None:
        """Take in what is new. Raises what the store raises, with its rows as they were."""
        there = files.numbered(self.folder)
        if not there or there[-1][0] == self._last:
            return None
        new = [entry for entry in there if entry[0] > self._last]
        begun = self._last and all(kind == "delta" for _, kind, _ in new)
        if not begun:
            return self._anew(there[-1][0])
        for number, _, path in new:
            try:
                self.store.apply_delta(str(path))
            except ValueError:  # it follows a file that is not here any more
                return self._anew(there[-1][0])
            self._last = number
            self.served.add(deltas=1)
        return None

    def _anew(self, last: int) -> None:
        self.store.restore(str(self.folder))
        self._last = last
        self.served.add(snapshots=1)

    def _run(self) -> None:
        while not self._end.wait(self.every):
            try:
                self.once()
                self.served.problem = ""
            except (OSError, RuntimeError, ValueError, KeyError) as error:
                if str(error) != self.served.problem:
                    logger.warning("%s: rows stay as they are: %s", self.folder, error)
                self.served.problem = str(error)


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    server: Server
    # Head and body leave together, and without waiting for an acknowledgement.
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        """A lookup."""
        length = self._length()
        if length is None:
            return
        body = self.rfile.read(length)
        if self._allowed():
            if self.path.partition("?")[0] != "/lookup":
                self._fail(404, "there is POST /lookup")
            elif not self.server.places.acquire(blocking=False):
                self.server.served.add(refused=1)
                self._fail(
                    503, f"{self.server.queue} requests are in work: ask again, or elsewhere"
                )
            else:
                try:
                    self._lookup(body)
                finally:
                    self.server.places.release()

    def do_GET(self) -> None:
        """Figures."""
        if self.path == "/health":
            ready = self.server.store.step > 0 or len(self.server.store) > 0
            self._send(200 if ready else 503, b"ok\n" if ready else b"no rows yet\n", "text/plain")
        elif self._allowed():
            if self.path == "/stats":
                self._send(200, json.dumps(self.server.stats()).encode(), "application/json")
            elif self.path == "/metrics":
                from evener.embedding import report

                text = report.prometheus([self.server.stats()])
                self._send(200, text.encode(), "text/plain; version=0.0.4")
            else:
                self._fail(404, "there are GET /stats, /metrics, /health")

    def _length(self) -> int | None:
        most = 8 * MOST_KEYS
        try:
            length = int(self.headers.get("Content-Length", ""))
        except ValueError:
            length = -1
        if 0 <= length <= most:
            return length
        self.close_connection = True
        self._fail(413 if length > most else 411, f"a body of 0 to {most} bytes is needed")
        return None

    def _allowed(self) -> bool:
        token = self.server.token
        given = self.headers.get("Authorization", "")
        if not token or hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            return True
        self._fail(401, "the header Authorization: Bearer TOKEN is needed")
        return False

    def _lookup(self, body: bytes) -> None:
        store = self.server.store
        as_json = self.headers.get("Content-Type", "").startswith("application/json")
        try:
            keys = _keys(body, as_json)
        except ValueError as error:
            self._fail(400, str(error))
            return
        found = np.empty(keys.shape, np.uint8)
        values = store.lookup_infer(keys, found=found)
        self.server.served.add(requests=1, keys=keys.size, found=int(found.sum()))
        if as_json:
            answer = {
                "values": values.tolist(),
                "found": found.astype(bool).tolist(),
                "step": store.step,
            }
            self._send(200, json.dumps(answer).encode(), "application/json")
        else:
            self._send(200, values.tobytes(), "application/octet-stream")

    def _fail(self, status: int, words: str) -> None:
        self._send(status, json.dumps({"error": words}).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Not a line per request."""
        logger.debug(format, *args)


def _keys(body: bytes, as_json: bool) -> np.ndarray:
    if not as_json:
        if len(body) % 8:
            raise ValueError(f"{len(body)} bytes are no int64 keys: 8 bytes each")
        return np.frombuffer(body, "<i8")
    try:
        given = json.loads(body)["keys"]
    except (ValueError, KeyError, TypeError):
        raise ValueError('JSON {"keys": [1, 2]} is needed') from None
    whole = isinstance(given, list) and all(type(key) is int for key in given)
    if not whole or not all(-(2**63) <= key < 2**63 for key in given):
        raise ValueError("keys must be a flat list of 64-bit integers")
    return np.array(given, np.int64)


class Server(ThreadingHTTPServer):
    """See the head of this file. `address`: host and port; port 0 takes a free one."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self, store: Store, served: Served, address: tuple[str, int], queue: int, token: str
    ) -> None:
        self.store, self.served, self.queue, self.token = store, served, queue, token
        self.places = threading.BoundedSemaphore(queue)
        self._began = time.time()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            raise UsageError(
                f"{address[0]}:{address[1]} cannot be listened on: {error.strerror or error}",
                "give another --address",
            ) from None

    def stats(self) -> dict[str, Any]:
        """Statistics of the store and the server."""
        return {
            "name": self.store.name,
            "dim": self.store.dim,
            "uptime_s": time.time() - self._began,
            "store": self.store.stats(),
            "served": self.served.to_json(),
        }

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of the server."""
        if not isinstance(sys.exc_info()[1], OSError):
            logger.exception("a request of %s failed", client_address)


def opened(folder: Path, name: str) -> Store:
    """An empty store with the options of the folder's newest file. Raises UsageError."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder", "give the folder of snapshots and deltas")
    there = files.numbered(folder)
    if not there:
        raise UsageError(
            f"there is no snapshot in {folder}", "write one: store.snapshot(folder), then deltas"
        )
    options = files.header(there[-1][2])["options"]
    return Store(name, Options.from_dict({**options, "tier": None}))
