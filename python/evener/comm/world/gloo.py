"""Gloo where it needs help: the interface on which it listens, and its threads at the end.

Gloo listens where the host's name resolves to, which on Debian is 127.0.1.1: no peer can reach that
(`choose_interface`).

A thread drops the tensors of a collective after the call that waited for it returned, and needs
Python's lock for that. One that asks for it when the interpreter ends aborts the process, whose
results were right. A group that nobody holds waits for its threads when it is destroyed; the others
are given until they rest, while the lock is there for them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evener.base import interfaces
from evener.comm.world.topology import host_identity

logger = logging.getLogger("evener.comm")

# Seconds: for how long to see whether a thread does anything, and how long it may go on.
_LOOK, _LIMIT = 0.01, 2.0


@dataclass(frozen=True)
class Place:
    """Where a rank is. `reached`: the address by which it reached the store of rank 0's node."""

    node: str
    reached: str


def own_place() -> Place:
    """This rank's, where the default process group has been made."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    host = getattr(store, "host", None) or os.environ.get("MASTER_ADDR", "")
    with contextlib.suppress(OSError):
        host = str(socket.getaddrinfo(host, None)[0][4][0])
    return Place(host_identity(), str(host))


def choose_interface(rank: int, places: Sequence[Place]) -> None:
    """Set GLOO_SOCKET_IFNAME where Gloo would listen on an address that no peer can reach.

    `rank` is this one's place in `places`.
    """
    nodes = [place.node for place in places]
    if len(set(nodes)) == 1 or os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    if not interfaces.hostname_misleads():
        return
    # On rank 0's node: the interface whose address the other nodes used. Elsewhere: the one that
    # leads to rank 0.
    far = next(place.reached for place in places if place.node != nodes[0])
    name = interfaces.interface_of(far) if nodes[rank] == nodes[0] else None
    if not name:
        name = interfaces.interface_to(places[rank].reached)
    if not name:
        logger.warning(
            "%s resolves to an address that its peers cannot reach, and no interface leads to %s: "
            "set GLOO_SOCKET_IFNAME",
            socket.gethostname(),
            far or "rank 0",
        )
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name
    logger.debug("GLOO_SOCKET_IFNAME=%s: the name %s misleads", name, socket.gethostname())


def threads() -> dict[str, list[str]]:
    """The threads of Gloo's groups by number: the state of each, and how often it was switched."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (task / "comm").read_text().startswith("pt_gloo"):
                lines = (task / "status").read_text().splitlines()
                kept = [line for line in lines if line.startswith("State") or "_ctxt_" in line]
                found[task.name] = kept
    return found


def settle() -> None:
    """Wait until the threads rest, for 2 seconds at most."""
    deadline = time.monotonic() + _LIMIT
    before, now = None, threads()
    # At rest a thread sleeps and is never switched to; who waits for the lock looks for it often.
    while now and time.monotonic() < deadline:
        if now == before and all("sleeping" in lines[0] for lines in now.values()):
            break
        time.sleep(_LOOK)
        before, now = now, threads()


@functools.cache
def settle_at_exit() -> None:
    """Call `settle` when this process ends, once."""
    atexit.register(settle)
