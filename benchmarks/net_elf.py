"""Copies of a shared object in which some of its symbols cannot be found.

A loader finds a symbol by its name in the table of dynamic strings. Where the name's first letter
is another, `dlsym` finds nothing and everything else is as it was: so one library shows what NCCL
does with a plug-in that has only older interfaces.
"""

from __future__ import annotations

import struct
from pathlib import Path

_DYNAMIC = 2  # PT_DYNAMIC
_LOAD = 1
_STRTAB, _STRSZ = 5, 10


def hide(source: Path, target: Path, symbols: list[str]) -> list[str]:
    """Write `source` without `symbols` to `target`; those that were there.

    64-bit little-endian ELF only. Raises ValueError for anything else.
    """
    data = bytearray(source.read_bytes())
    start, end = _dynamic_strings(bytes(data))
    found = []
    for symbol in symbols:
        name = b"\0" + symbol.encode() + b"\0"
        at = data.find(name, start, end)
        if at >= 0:
            data[at + 1] = ord("X")
            found.append(symbol)
    target.write_bytes(data)
    return found


def _dynamic_strings(data: bytes) -> tuple[int, int]:
    """Where the dynamic strings are in the file (System V ABI, chapters 4 and 5)."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (headers,) = struct.unpack_from("<Q", data, 0x20)
    size, count = struct.unpack_from("<HH", data, 0x36)
    segments = []
    for index in range(count):
        kind, _, offset, address, _, length = struct.unpack_from(
            "<IIQQQQ", data, headers + index * size
        )
        segments.append((kind, offset, address, length))
    dynamic = next(one for one in segments if one[0] == _DYNAMIC)
    entries = dict(
        struct.unpack_from("<QQ", data, dynamic[1] + at) for at in range(0, dynamic[3], 16)
    )
    for kind, offset, address, length in segments:
        if kind == _LOAD and address <= entries[_STRTAB] < address + length:
            start = offset + entries[_STRTAB] - address
            return start, start + entries[_STRSZ]
    raise ValueError("the dynamic strings are in no loaded segment")
