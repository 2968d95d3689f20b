"""Reads the files of a trace, block by block, and refuses what is none.

A file has one section: packets as raw IP on interface 0, events on interface 1, and at the end what
was counted (docs/reference/network-trace.md). One whose process still writes, or was killed, may
end in the middle of a block: what comes before is read, and `cut` says so.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from evener.errors import UsageError

LAYOUT = 1
EVENT = struct.Struct("<BBBBIQIIIIQQ")
"""version, kind, path, detail, connection, number, size, took, trip, nothing, window, in flight"""
ARRIVED, LOST, SILENT, REPLACED, DECIDED, OPENED, OVER = range(1, 8)
# By the place of each in `Decision` (crates/proto/src/packet/trace.rs), from 1.
DECISIONS = ("", "shrink", "heavy", "compete", "yield", "drain", "refill")

_HEAD = struct.Struct("<II")
_ENHANCED = struct.Struct("<IIIII")
_PACKET = struct.Struct("<BBBBII")
_SECTION, _INTERFACE, _STATISTICS, _BLOCK = 0x0A0D0D0A, 1, 5, 6
_LINKS = {0: 101, 1: 147}
_MAGIC = 0xE7


@dataclass(frozen=True, slots=True)
class Packet:
    """A packet that went (`inbound` false) or came. `at`: nanoseconds since 1970."""

    at: int
    inbound: bool
    path: int
    connection: int
    port: int
    """This side's UDP port."""
    size: int
    """Bytes of the datagram."""
    comment: str


@dataclass(frozen=True, slots=True)
class Event:
    """Something that the protocol did. `at`: nanoseconds since 1970; `took`, `trip`: us."""

    at: int
    kind: int
    path: int
    detail: int
    connection: int
    number: int
    size: int
    took: int
    trip: int
    window: int
    flying: int
    comment: str


@dataclass
class File:
    """What a file holds."""

    path: Path
    process: str = ""
    packets: list[Packet] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    left_out: int = 0
    """Records that found no room when they were to be noted."""
    cut: bool = False
    """It ends in the middle of a block, or without its last ones."""


def files(places: list[Path]) -> list[Path]:
    """The traces in these files and directories. Raises UsageError where there is none."""
    found: list[Path] = []
    for place in places:
        if place.is_dir():
            inside = sorted(place.glob("*.pcapng"))
            if not inside:
                raise UsageError(
                    f"no trace in {place}",
                    "set EVENER_NET_TRACE_DIR and EVENER_NET_ENGINE=udp for the job",
                )
            found += inside
        elif place.is_file():
            found.append(place)
        else:
            raise UsageError(f"{place} is not there", "give files of a trace, or their directory")
    return list(dict.fromkeys(found))


def read(path: Path) -> File:
    """All of a file. Raises UsageError, with the place, where it is no trace of Evener."""
    found = File(path)
    ended = False
    for at, kind, body in _blocks(path, found):
        try:
            if kind == _SECTION:
                found.process = _options(body[16:]).get(1, b"").decode()
            elif kind == _BLOCK:
                _record(body, found)
            elif kind == _STATISTICS:
                ended = True
                counts = _options(body[12:])
                found.left_out += int.from_bytes(counts.get(5, b""), "little")
            elif kind != _INTERFACE:
                raise ValueError(f"a block of kind {kind}")
        except (ValueError, struct.error, IndexError) as error:
            raise UsageError(
                f"{path}: byte {at}: {error}",
                f"give a trace of layout {LAYOUT}, or `tshark` reads it",
            ) from None
    found.cut |= not ended
    return found


def _blocks(path: Path, found: File) -> Iterator[tuple[int, int, memoryview]]:
    data = memoryview(path.read_bytes())
    at, interfaces = 0, 0
    while at < len(data):
        if len(data) - at < 12:
            found.cut = True
            return
        kind, length = _HEAD.unpack_from(data, at)
        first = at == 0
        if first and kind != _SECTION:
            raise UsageError(f"{path} is no pcapng file", "give one that a job has written")
        if length < 12 or length % 4:
            raise UsageError(
                f"{path}: byte {at}: a block of {length} bytes", "copy the file again: it is broken"
            )
        if at + length > len(data):
            found.cut = True
            return
        if int.from_bytes(data[at + length - 4 : at + length], "little") != length:
            raise UsageError(
                f"{path}: byte {at}: the two lengths of a block differ",
                "copy the file again: it is broken",
            )
        body = data[at + 8 : at + length - 4]
        if first and int.from_bytes(body[:4], "little") != 0x1A2B3C4D:
            raise UsageError(
                f"{path} has the bytes of its numbers in another order",
                "write it on this host's kind",
            )
        if kind == _INTERFACE:
            link = int.from_bytes(body[:2], "little")
            if _LINKS.get(interfaces) != link:
                raise UsageError(
                    f"{path}: interface {interfaces} has link type {link}",
                    "give a trace of Evener; Wireshark reads all others",
                )
            interfaces += 1
        yield at, kind, body
        at += length


def _options(data: memoryview) -> dict[int, bytes]:
    found, at = {}, 0
    while at + 4 <= len(data):
        code, length = struct.unpack_from("<HH", data, at)
        if code == 0:
            break
        if at + 4 + length > len(data):
            raise ValueError(
                f"option {code} has {length} bytes, and {len(data) - at - 4} are there"
            )
        found[code] = bytes(data[at + 4 : at + 4 + length])
        at += 4 + -(-length // 4) * 4
    return found


def _record(body: memoryview, found: File) -> None:
    interface, high, low, length, size = _ENHANCED.unpack_from(body)
    if length > len(body) - 20:
        raise ValueError(f"{length} bytes in a block that has {len(body) - 20}")
    data, options = body[20 : 20 + length], body[20 + -(-length // 4) * 4 :]
    more = _options(options) if len(options) else {}
    comment = more.get(1, b"").decode()
    at = high << 32 | low
    if interface == 0:
        found.packets.append(_packet(at, data, size, more.get(2, b"\0")[0] & 3 == 1, comment))
        return
    version, kind, path, detail, connection, number, *rest = EVENT.unpack(data)
    if version != LAYOUT:
        raise ValueError(f"an event of layout {version}, and this Evener reads {LAYOUT}")
    took, trip, window, flying = rest[1], rest[2], rest[4], rest[5]
    found.events.append(
        Event(
            at, kind, path, detail, connection, number, rest[0], took, trip, window, flying, comment
        )
    )


def _packet(at: int, data: memoryview, size: int, inbound: bool, comment: str) -> Packet:
    before = 20 if data[0] >> 4 == 4 else 40
    ports = struct.unpack_from(">HH", data, before)
    head = data[before + 8 :]
    path = connection = 0
    if len(head) >= _PACKET.size and head[0] == _MAGIC:
        _, _, _, path, connection, _ = _PACKET.unpack_from(head)
    return Packet(at, inbound, path, connection, ports[inbound], size - before - 8, comment)
