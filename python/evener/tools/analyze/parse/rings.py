"""Rings: `Channel 00/16 :    0   7   5 ...`, and rank by rank `Ring 00 : 7 -> 0 -> 1`.

The first form is printed by rank 0 only. Up to 2.22 it stops after 20 ranks and does not say so;
from 2.23 it is cut at 128 characters and ends in `...`, the last number possibly cut in two. So a
ring is whole only where as many ranks were read as the communicator has; a cut ring is never
closed, because the hop from its last rank read to its first does not exist. RCCL writes ` comm
0x... nRanks 8 busId c1000` after the second form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_CHANNEL = re.compile(rb"Channel (\d{1,4})(?:/(\d{1,4}))? :((?:\s+\d{1,7})+)(?:(\s*)(\.\.\.))?$")
_RING = re.compile(rb"Ring (\d{1,4}) : (-?\d{1,7}) -> (\d{1,7}) -> (-?\d{1,7})(?: comm .*)?\s*$")
SILENT_CUT = 20


@dataclass(frozen=True, slots=True)
class RingLine:
    """The order of ranks of one channel, as far as the line shows it."""

    channel: int
    channels: int
    ranks: tuple[int, ...]
    cut: bool


@dataclass(frozen=True, slots=True)
class RingPlace:
    """One rank's neighbours in one channel's ring."""

    channel: int
    previous: int
    rank: int
    following: int


def channel(message: bytes) -> RingLine | None:
    """The ring of a `Channel cc/NN :` line, None where it is none."""
    found = _CHANNEL.match(message.rstrip())
    if not found:
        return None
    ranks = [int(r) for r in found[3].split()]
    cut = found[5] is not None
    if cut and not found[4]:
        ranks.pop()  # `15...` may be the head of 1523
    if not ranks:
        return None
    return RingLine(int(found[1]), int(found[2] or 0), tuple(ranks), cut)


def place(message: bytes) -> RingPlace | None:
    """The neighbours of a `Ring cc : prev -> rank -> next` line, None where it is none."""
    found = _RING.match(message)
    return RingPlace(*(int(n) for n in found.groups())) if found else None
