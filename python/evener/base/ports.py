"""A port for a job, chosen before the job listens on it."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path


def free_port(address: str = "") -> int:
    """A TCP port of `address` ("": of any of this host's) on which no process listens.

    It lies outside the range from which the kernel takes ports for connections, so it is most
    likely free a moment later too.
    """
    for port in random.SystemRandom().sample(_quiet(), 20):  # jobs may share a seed
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def _quiet() -> range:
    low = 32768
    with contextlib.suppress(OSError, ValueError):
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return range(20000, low) if low > 21000 else range(61000, 65536)
