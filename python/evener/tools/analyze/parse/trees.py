"""Trees: `Trees [0] 1/-1/-1->0->8 [1] ...`, one line per rank, one bracket per channel.

from 2.8  d0/d1/d2->rank->up
2.7       d0/d1/d2->rank->up|up->rank->d0/d1/d2     (the tree up and the tree down)
2.4       up->rank->d0/d1/d2
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_TREE = re.compile(
    rb"\[(\d{1,4})\] (-?\d{1,7}(?:/-?\d{1,7})*)->(-?\d{1,7})->(-?\d{1,7}(?:/-?\d{1,7})*)"
)


@dataclass(frozen=True, slots=True)
class TreePlace:
    """One rank's place in one channel's tree; -1 above the root is given as None."""

    channel: int
    rank: int
    up: int | None
    down: tuple[int, ...]


def trees(message: bytes) -> tuple[TreePlace, ...]:
    """Every channel's place in a `Trees` line; empty where it is none."""
    places = []
    for channel, down, rank, up in _TREE.findall(message):
        if b"/" in up:
            down, up = up, down
        places.append(
            TreePlace(
                channel=int(channel),
                rank=int(rank),
                up=int(up) if up.isdigit() else None,
                down=tuple(int(d) for d in down.split(b"/") if d.isdigit()),
            )
        )
    return tuple(places)
