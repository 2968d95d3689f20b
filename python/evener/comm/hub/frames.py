"""Messages between hub and nodes: a few fields as JSON, and bytes that they describe.

    "EVH1"  length of the fields  length of the bytes  CRC-32 of both    then both

Whoever reads says how long each may be, before anything is allocated. TLS guards against strangers;
the CRC is for our own errors. Nothing that comes is ever executed, or made an object but by `json`.
"""

from __future__ import annotations

import asyncio
import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

PROTOCOL = 1
FIELDS = 1 << 23  # of one message, once a node is let in; the first one may have FIRST
FIRST = 1 << 16
_HEAD = struct.Struct(">4sIQI")
_MAGIC = b"EVH1"
_CHUNK = 1 << 18

Fields = dict[str, Any]
Payload = bytes | bytearray | memoryview


class FrameError(Exception):
    """What came is no message, or is larger than it may be."""


async def read(
    reader: asyncio.StreamReader,
    most: Callable[[Fields], int],
    fields_most: int = FIELDS,
    heard: Callable[[], None] = lambda: None,
) -> tuple[Fields, bytearray]:
    """The next message. `most`: how many bytes may follow these fields. `heard`: some came.

    Raises FrameError, and what a connection raises that ends.
    """
    magic, length, size, said = _HEAD.unpack(await reader.readexactly(_HEAD.size))
    if magic != _MAGIC:
        raise FrameError("this is no message of a hub's")
    if length > fields_most:
        raise FrameError(f"fields of {length} bytes; {fields_most} are allowed")
    raw = await reader.readexactly(length)
    heard()
    try:
        fields = json.loads(raw)
    except ValueError:
        raise FrameError("its fields are no JSON") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("is"), str):
        raise FrameError("its fields say not what it is")
    if size > (allowed := most(fields)):
        raise FrameError(f"{fields['is'][:40]!r} with {size} bytes; {allowed} are allowed")
    found = zlib.crc32(raw)
    payload = bytearray(size)
    view = memoryview(payload)
    at = 0
    while at < size:
        part = await reader.read(min(_CHUNK, size - at))
        if not part:
            raise asyncio.IncompleteReadError(bytes(at), size)
        view[at : at + len(part)] = part
        found = zlib.crc32(part, found)
        at += len(part)
        heard()
    if found != said:
        raise FrameError("its checksum is another one")
    return fields, payload


async def write(writer: asyncio.StreamWriter, fields: Fields, payload: Payload = b"") -> None:
    """Send a message, as fast as the other side takes it."""
    raw = json.dumps(fields).encode()
    view = memoryview(payload).cast("B")
    check = zlib.crc32(view, zlib.crc32(raw))
    writer.write(_HEAD.pack(_MAGIC, len(raw), len(view), check) + raw)
    for at in range(0, len(view), _CHUNK):
        writer.write(view[at : at + _CHUNK])
        await writer.drain()
    await writer.drain()


def count(fields: Fields, name: str, most: int = 1 << 62) -> int:
    """A number of `fields`, from 0 to `most`. Raises FrameError."""
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise FrameError(f"{name}={str(value)[:40]!r} is no number from 0 to {most}")
    return value


def words(fields: Fields, name: str, most: int = 200) -> str:
    """A text of `fields`, of at most `most` letters. Raises FrameError."""
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > most:
        raise FrameError(f"{name} is no text of at most {most} letters")
    return value
