"""Which algorithm NCCL chose for which size (subsystem TUNING).

2.20-2.22  1048576 Bytes -> Algo 1 proto 2 time 55.2      (numbers, no collective)
from 2.24  AllReduce: 1048576 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..3}
"""

from __future__ import annotations

import re
from typing import NamedTuple

_LINE = re.compile(
    rb"(?:(\w+): *)?(\d{1,18}) Bytes -> Algo (\w+) proto (\w+)"
    rb"(?: time ([\d.eE+-]+)| channel\{Lo\.\.Hi\}=\{(\d{1,4})\.\.(\d{1,4})\})?"
)
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOCOLS = ("LL", "LL128", "SIMPLE")


class Choice(NamedTuple):
    """One choice; `channels` is 0 where the version does not print it."""

    collective: str
    size: int
    algorithm: str
    protocol: str
    channels: int


def choice(message: bytes) -> Choice | None:
    """The choice in a TUNING line, None where it is none."""
    found = _LINE.match(message)
    if not found:
        return None
    collective, size, algorithm, protocol, _time, low, high = found.groups()
    return Choice(
        (collective or b"").decode("ascii", "replace"),
        int(size),
        _name(algorithm, _ALGORITHMS),
        _name(protocol, _PROTOCOLS),
        int(high) - int(low) + 1 if high is not None else 0,
    )


def _name(raw: bytes, names: tuple[str, ...]) -> str:
    text = raw.decode("ascii", "replace")
    if text.isdigit() and len(text) < 3 and int(text) < len(names):
        return names[int(text)]
    return text
