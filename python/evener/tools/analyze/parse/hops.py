"""Hops: `Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA`, one line an edge and end.

    2.4   Ring 00 : 0[1b000] -> 1[1c000] via P2P/IPC
    2.7   Channel 00 : 0[1b000] -> 1[1c000] via P2P/IPC       (the bracket is the bus id)
    2.14  Channel 00/0 : ...                                   (channel/connection)
    2.18  Channel 00/0 : 0[0] -> 1[1] ...                      (the bracket is the NVML index)

A NET edge is logged by both ends: join on channel, source and destination. `NET/IB/3(5)` means that
rank 5 drives the card for the sender: PXN. The network's name is the plug-in's and may hold a
space ("AWS Libfabric"). `/Shared` and `/GDRDMA(PCI)` come last. RCCL adds ` comm 0x... nRanks 16`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_HOP = re.compile(
    rb"(?:Channel|Ring) (\d{1,4})(?:/(\d{1,2}))? : (\d{1,7})(?:\[\w+\])? -> (\d{1,7})(?:\[\w+\])?"
    rb" (?:\[(send|receive)\] )?via (.+)"
)
_NET = re.compile(
    rb"NET/(.+?)/(\d{1,4})(?:\((\d{1,7})\))?((?:/GDRDMA(?:\(PCI\))?|/Shared)*)"
    rb"(?: comm 0x\w+ n[rR]anks \d+)?\s*$"
)


class Hop(NamedTuple):
    """One edge as one end saw it. `direction` is empty for edges inside a node."""

    channel: int
    connection: int
    source: int
    destination: int
    direction: str
    transport: str
    """`P2P/IPC`, `P2P/CUMEM`, `P2P/direct pointer`, `SHM`, or `NET`."""
    network: str = ""
    device: int = -1
    proxy: int = -1
    """The rank whose card sends for `source` (PXN), -1 where it is its own."""
    direct: bool = False
    """GPUDirect RDMA: the card reads and writes GPU memory."""


_EDGE = re.compile(rb"^(\d{1,4})(/\d{1,2})? : (\d{1,7})(?:\[\w+\])? -> (\d{1,7})", re.MULTILINE)

_transports: dict[bytes, tuple[str, str, int, int, bool] | None] = {}


def hop(message: bytes) -> Hop | None:
    """The hop of a line `... via ...`, None where it is none."""
    found = _HOP.match(message)
    if not found:
        return None
    channel, connection, source, destination, direction, via = found.groups()
    try:
        how = _transports[via]
    except KeyError:
        how = _transport(via)
        # A training log holds some hundreds of different ones; a hostile file must not fill memory.
        if len(_transports) < 20_000:
            _transports[via] = how
    if how is None:
        return None
    return Hop(
        int(channel),
        int(connection) if connection else 0,
        int(source),
        int(destination),
        direction.decode() if direction else "",
        *how,
    )


def edges(text: bytes | bytearray) -> Iterator[tuple[int, int, int, int]]:
    """Place in `text`, channel, source and destination of edges like `00/0 : 7[7] -> 8[0]`."""
    for found in _EDGE.finditer(text):
        channel, connection, source, destination = found.groups()
        if connection in (None, b"/0"):
            yield found.start(), int(channel), int(source), int(destination)


def kind(via: bytes) -> str:
    """The transport of what follows `via` in a line of a hop inside a node, empty if unknown."""
    how = _transport(via)
    return how[0] if how else ""


def _transport(via: bytes) -> tuple[str, str, int, int, bool] | None:
    via = via.strip()
    if found := _NET.match(via):
        name, device, proxy, flags = found.groups()
        return (
            "NET",
            name.decode("utf-8", "replace"),
            int(device),
            int(proxy) if proxy is not None else -1,
            b"GDRDMA" in flags,
        )
    if via.startswith(b"P2P/indirect"):
        return ("P2P/indirect", "", -1, -1, False)
    if via.startswith(b"P2P/"):
        kind = via[4:].split(b"/")[0].split(b" comm ")[0]
        if kind in (b"IPC", b"CUMEM", b"direct pointer", b"MNNVL", b"common device"):
            return (f"P2P/{kind.decode()}", "", -1, -1, False)
        return None
    if via.startswith((b"SHM", b"direct shared memory")):
        return ("SHM", "", -1, -1, False)
    return None
