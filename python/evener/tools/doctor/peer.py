"""Between two hosts: ssh, what one flow gets, what several get, how many paths there are.

The other end is `evener doctor --serve`, started there by ssh (or by hand, with --port). A flow is
one TCP connection from a source port of its own. Rates: one flow, then 2, 4, 8 at once, one second
each. What several gain over one is what a cap a flow, or a hash over paths, takes from one.

Paths: UDP probes from many source ports with a small TTL; each router on the way answers, and
answers of different routers at the same distance are different paths. Routers need not answer, and
balancers between two routers are not seen: the number is a lower bound. (The idea is that of Paris
traceroute, Augustin et al., IMC 2006.) The kernel hands the answers to the socket's error queue, so
no privilege is needed.
"""

from __future__ import annotations

import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator

from evener.base.ssh import cause
from evener.errors import EvenerError
from evener.tools.doctor.line import Line

_CHUNK = 1 << 20
_SECONDS = 1.0
_IP_RECVERR = 11
_PROBE_PORT = 33434
_SOURCES = 48
_FURTHEST = 5
_MOST_CONNECTIONS = 64


class Server:
    """Takes connections and counts nothing: it reads until the end."""

    def __init__(self, host: str = "0.0.0.0", port: int = 0) -> None:
        self.socket = socket.create_server((host, port), backlog=64)
        self.port: int = self.socket.getsockname()[1]
        self.places = threading.BoundedSemaphore(_MOST_CONNECTIONS)

    def serve(self, seconds: float) -> None:
        """Until `seconds` have passed without a connection."""
        self.socket.settimeout(seconds)
        while True:
            try:
                connection, _ = self.socket.accept()
            except (TimeoutError, OSError):
                return
            if not self.places.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            _drain(connection)
        finally:
            self.places.release()

    def close(self) -> None:
        """Stop listening."""
        self.socket.close()


def _drain(connection: socket.socket) -> None:
    buffer = bytearray(_CHUNK)
    with connection:
        try:
            while connection.recv_into(buffer):
                pass
        except OSError:
            return


def rate(host: str, port: int, flows: int, seconds: float = _SECONDS) -> float:
    """Bytes per second that `flows` connections at once send to a Server. Raises OSError."""
    connections = [socket.create_connection((host, port), timeout=5) for _ in range(flows)]
    sent = [0] * flows
    block = bytes(_CHUNK)
    go = threading.Event()
    end = [0.0]

    def send(number: int) -> None:
        connection = connections[number]
        connection.settimeout(seconds + 5)
        go.wait()
        try:
            while time.monotonic() < end[0]:
                sent[number] += connection.send(block)
        except OSError:
            return

    threads = [threading.Thread(target=send, args=(i,), daemon=True) for i in range(flows)]
    for thread in threads:
        thread.start()
    begin = time.monotonic()
    end[0] = begin + seconds
    go.set()
    for thread in threads:
        thread.join(seconds + 6)
    passed = time.monotonic() - begin
    for connection in connections:
        connection.close()
    return sum(sent) / passed


def flows(host: str, port: int) -> Iterator[Line]:
    """What one flow gets and what more of them gain."""
    try:
        rates = {count: rate(host, port, count) for count in (1, 2, 4, 8)}
    except OSError as error:
        yield Line(
            "peer",
            f"TCP to {host}:{port}",
            "bad",
            str(error),
            "open the port in the firewall, or give --port one that is open",
            severity="broken",
        )
        return
    shown = ", ".join(f"{n}: {r * 8 / 1e9:.2f}" for n, r in rates.items())
    best = max(rates, key=lambda n: rates[n])
    gain = rates[best] / rates[1] if rates[1] else 0.0
    cap = per_flow_cap(rates)
    if cap:
        shown += (
            f"; each flow gets about {cap * 8 / 1e9:.2f} Gb/s whatever their number: a cap a flow"
        )
    if gain > 1.5:
        yield Line(
            "peer",
            "flows",
            "bad",
            f"Gb/s by number of flows: {shown}; one flow gets 1/{gain:.1f} of what {best} get",
            "use several flows: Evener's net does; NCCL's sockets need NCCL_SOCKET_NTHREADS=4 "
            "NCCL_NSOCKS_PERTHREAD=4",
            f"{gain:.1f} times the rate between these hosts, as just measured",
        )
    else:
        yield Line("peer", "flows", "good", f"Gb/s by number of flows: {shown}")


def per_flow_cap(rates: dict[int, float]) -> float:
    """Bytes per second that one flow cannot pass; 0 where rates do not rise with the flows' number.

    Flows that a hash spreads over paths also gain together, but not in step: some share a path.
    """
    first, *others = sorted(rates)
    each = rates[first] / first
    steps = (
        [count for count in others if abs(rates[count] / count / each - 1) < 0.15] if each else []
    )
    # In step from one to four at least, else two paths would look alike.
    return each if {2, 4} <= set(steps) else 0.0


def paths(host: str) -> Iterator[Line]:
    """How many ways lead there, at least."""
    try:
        address = socket.gethostbyname(host)
        seen = [routers(address, ttl) for ttl in range(1, _FURTHEST + 1)]
    except OSError as error:
        yield Line("peer", "paths", "info", f"cannot be told: {error}")
        return
    most = max((len(one) for one in seen), default=0)
    if not most:
        yield Line(
            "peer", "paths", "info", "no router on the way answers: one link, or silent ones"
        )
    else:
        ways = "1 path" if most == 1 else f"at least {most} paths"
        yield Line("peer", "paths", "good", f"{ways} (routers by distance: {[*map(len, seen)]})")


def routers(address: str, ttl: int) -> set[str]:
    """Routers at that distance which answered probes from different source ports."""
    found: set[str] = set()
    probes = []
    try:
        for _ in range(_SOURCES):
            probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            probes.append(probe)
            probe.setsockopt(socket.IPPROTO_IP, _IP_RECVERR, 1)
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, ttl)
            probe.setblocking(False)
            probe.sendto(b"evener", (address, _PROBE_PORT + ttl))
        poll = select.poll()
        by_number = {probe.fileno(): probe for probe in probes}
        for number in by_number:
            poll.register(number, select.POLLERR)
        limit = time.monotonic() + 1.0
        while by_number and (left := limit - time.monotonic()) > 0:
            for number, _ in poll.poll(left * 1000):
                poll.unregister(number)
                router = _offender(by_number.pop(number))
                if router and router != address:
                    found.add(router)
    finally:
        for probe in probes:
            probe.close()
    return found


def _offender(probe: socket.socket) -> str | None:
    """Who answered: struct sock_extended_err (16 bytes), then a sockaddr_in."""
    try:
        _, ancillary, _, _ = probe.recvmsg(64, 512, socket.MSG_ERRQUEUE)
    except OSError:
        return None
    for level, kind, data in ancillary:
        if level == socket.IPPROTO_IP and kind == _IP_RECVERR and len(data) >= 24:
            origin = data[4]
            family = struct.unpack_from("=H", data, 16)[0]
            if origin == 2 and family == socket.AF_INET:  # SO_EE_ORIGIN_ICMP
                return socket.inet_ntoa(data[20:24])
    return None


def broken(host: str, found: str, fix: str) -> Line:
    """ssh does not work."""
    return Line("peer", f"ssh {host}", "bad", found, fix, severity="broken")


def ssh(host: str) -> Line:
    """Whether a command runs there without a question."""
    command = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", host, "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        return broken(host, "no ssh here", "apt-get install openssh-client")
    except subprocess.TimeoutExpired:
        return broken(host, "no answer in 20 s", "check the name and the firewall")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        why = cause(done.stderr, host) or (reason, f"make `{' '.join(command)}` work")
        return broken(host, *why)
    return Line("peer", f"ssh {host}", "good", "runs commands without a question")


def examine_peer(host: str, port: int = 0) -> list[Line]:
    """All checks of one other host; with a port, its server is there already."""
    lines: list[Line] = []
    remote: subprocess.Popen[str] | None = None
    try:
        if not port:
            lines.append(ssh(host))
            if lines[-1].state == "bad":
                return lines
            remote = subprocess.Popen(
                ["ssh", "-o", "BatchMode=yes", host, "evener doctor --serve 20"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            port = _port(remote, host)
        lines += flows(host, port)
        lines += paths(host)
    except EvenerError as error:
        name = f"evener on {host}"
        lines.append(Line("peer", name, "bad", error.problem, error.fix, severity="broken"))
    finally:
        if remote is not None:
            remote.kill()
            remote.wait()
    return lines


def _port(remote: subprocess.Popen[str], host: str) -> int:
    assert remote.stdout is not None
    ready, _, _ = select.select([remote.stdout], [], [], 30)
    word = remote.stdout.readline().split() if ready else []
    if len(word) == 2 and word[0] == "port" and word[1].isdigit():
        return int(word[1])
    raise EvenerError(
        "evener doctor --serve did not start there",
        f"install evener on {host}, or start `evener doctor --serve` there and give --port here",
    )
