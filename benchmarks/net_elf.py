"""Copies of a library in which some of its symbols cannot be found.

A loader finds a symbol by its name among the library's strings. Where the name's first letter is
another, `dlsym` finds nothing and everything else is as it was: so one library shows what NCCL does
with a plug-in that has only older interfaces.
"""

from __future__ import annotations

from pathlib import Path


def hide(source: Path, target: Path, symbols: list[str]) -> list[str]:
    """Write `source` without `symbols` to `target`; those that were there."""
    data, found = source.read_bytes(), []
    for symbol in symbols:
        name = b"\0" + symbol.encode() + b"\0"
        if name in data:
            data = data.replace(name, b"\0X" + name[2:])
            found.append(symbol)
    target.write_bytes(data)
    return found
