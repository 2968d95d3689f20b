"""Senders and receivers for the network tests, each bounded in time and bytes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from evener.tools.lab import Lab, Node

# Answers each connection with the bytes that came and the moments of the first and the last.
_SINK = """
import socket, threading, time
server = socket.create_server(("", 5000), backlog=200)
print("up", flush=True)
def serve(peer):
    total, first = 0, None
    while data := peer.recv(1 << 20):
        first = first or time.monotonic()
        total += len(data)
        last = time.monotonic()
    if first: peer.send(f"{total} {first} {last}".encode())
    peer.close()
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""
# Arguments: host, seconds at most, bytes at most, source ports.
_SEND = """
import socket, sys, threading, time
host, seconds, most, ports = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
answers = [""] * len(ports)
def send(i):
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    peer.settimeout(20)
    peer.bind(("", int(ports[i])))
    peer.connect((host, 5000))
    until, left = time.monotonic() + seconds, most
    block = bytes(min(65536, most))
    while left > 0 and time.monotonic() < until: left -= peer.send(block)
    peer.shutdown(socket.SHUT_WR)
    answers[i] = peer.recv(100).decode()
threads = [threading.Thread(target=send, args=(i,)) for i in range(len(ports))]
for t in threads: t.start()
for t in threads: t.join()
print(*answers, sep="\\n")
"""
# Arguments: host, seconds to wait, source ports. Prints what became of each connection.
_TRY = """
import socket, sys, threading
became = {}
def attempt(port):
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    peer.settimeout(float(sys.argv[2]))
    peer.bind(("", int(port)))
    try:
        peer.connect((sys.argv[1], 5000))
    except TimeoutError:
        became[port] = "silence"
    except OSError as error:
        became[port] = error.strerror
    else:
        became[port] = "connected"
threads = [threading.Thread(target=attempt, args=(port,)) for port in sys.argv[3:]]
for t in threads: t.start()
for t in threads: t.join()
for port in sys.argv[3:]: print(became[port])
"""
# Reads a source port a line, sends 20 KB from it, says when they have arrived.
_PROBE = """
import socket, sys
for line in sys.stdin:
    peer = socket.socket()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    peer.settimeout(20)
    peer.bind(("", int(line)))
    try:
        peer.connect((sys.argv[1], 5000))
        peer.sendall(bytes(20000))
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(100): pass
    except OSError as error:
        print(error, flush=True)
    else:
        print("arrived", flush=True)
    peer.close()
"""


class Probe:
    """Finds out which path a flow from `node` to host `to` takes."""

    def __init__(self, lab: Lab, node: Node, to: str) -> None:
        self._lab, self._node = lab, node
        argv = [sys.executable, "-c", _PROBE, to]
        self._process = node.popen(argv, stdin=-1, stdout=-1, text=True)

    def path(self, port: int) -> int | None:
        """The path of a flow from source `port`; None where it does not arrive."""
        before = self._lab.traffic()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{port}\n")
        self._process.stdin.flush()
        if self._process.stdout.readline() != "arrived\n":
            return None
        after = self._lab.traffic()
        sent = {
            int(name.rpartition("path")[2]): after[name] - before[name]
            for name in after
            if name.startswith(f"{self._node.name}.")
        }
        return max(sent, key=lambda path: sent[path])

    def paths(self, ports: list[int]) -> list[int | None]:
        """The path of each."""
        return [self.path(port) for port in ports]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def sink(node: Node) -> Iterator[None]:
    """A receiver on port 5000 of `node`."""
    with node.popen([sys.executable, "-c", _SINK], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "up\n"
            yield
        finally:
            process.kill()


def send(node: Node, to: str, ports: list[int], *, seconds: float, most: int) -> list[float]:
    """Send from each of `ports` at once; bits per second that arrived, one a port."""
    flows = _flows(node, to, ports, seconds, most)
    return [total * 8 / max(last - first, 1e-9) for total, first, last in flows]


def throughput(node: Node, to: str, ports: list[int], *, seconds: float, most: int) -> float:
    """As `send`, for all flows together: from the first byte of any to the last byte of any."""
    totals, firsts, lasts = zip(*_flows(node, to, ports, seconds, most), strict=True)
    return float(sum(totals)) * 8 / max(max(lasts) - min(firsts), 1e-9)


def _flows(
    node: Node, to: str, ports: list[int], seconds: float, most: int
) -> list[tuple[int, float, float]]:
    argv = [sys.executable, "-c", _SEND, to, str(seconds), str(most), *map(str, ports)]
    done = node.run(argv, timeout=60, check=True)
    answers = [line.split() for line in done.stdout.splitlines()]
    return [(int(total), float(first), float(last)) for total, first, last in answers]


def attempt(node: Node, to: str, ports: list[int], *, seconds: float = 1) -> dict[int, str]:
    """What becomes of connections from source `ports`, all at once: connected, silence or else."""
    argv = [sys.executable, "-c", _TRY, to, str(seconds), *map(str, ports)]
    said = node.run(argv, timeout=60, check=True).stdout.splitlines()
    return dict(zip(ports, said, strict=True))
