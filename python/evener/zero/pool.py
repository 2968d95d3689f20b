"""A stream's part of an accelerator's memory, as CUDA's caching allocator hands it out.

A segment grows in place (`expandable_segments`): what is asked for gets the smallest hole that it
fits into, or the segment grows by what the hole at its end lacks. So a pool is larger than the most
that is ever in use: a block that comes between two others leaves a hole that is too small for the
next. With tensors of hundreds of megabytes (all experts of a block are one) these holes are as
large as such a tensor. `holes` plays a step and says how much that is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

SMALL = 1 << 20
"""Bytes up to which a tensor lies in a pool for small ones."""

Event = tuple[int, int]
"""(key, bytes) of what is made; (key, 0): it is given back."""


class Pool:
    """See the head of this file. `size`: what it has grown to, in bytes."""

    def __init__(self) -> None:
        self.size = 0
        self._used: dict[int, Event] = {}
        self._free: list[tuple[int, int]] = []
        """Holes as (begin, end), in order, no two of which touch."""

    def take(self, key: int, size: int) -> None:
        """Room for `key`, until `give` is called for it."""
        best = -1
        for number, (begin, end) in enumerate(self._free):
            small = best < 0 or end - begin < self._free[best][1] - self._free[best][0]
            if end - begin >= size and small:
                best = number
        if best < 0:
            at_end = self._free and self._free[-1][1] == self.size
            begin = self._free.pop()[0] if at_end else self.size
            self.size = begin + size
        else:
            begin, end = self._free.pop(best)
            if end - begin > size:
                self._free.insert(best, (begin + size, end))
        self._used[key] = begin, begin + size

    def give(self, key: int) -> None:
        """It is free again."""
        if key not in self._used:
            return
        begin, end = self._used.pop(key)
        place = bisect_left(self._free, (begin, end))
        if place < len(self._free) and self._free[place][0] == end:
            end = self._free.pop(place)[1]
        if place and self._free[place - 1][1] == begin:
            begin = self._free.pop(place - 1)[0]
        insort(self._free, (begin, end))


def holes(events: Sequence[Event]) -> int:
    """Bytes by which the pool of a step that is run again and again grows beyond the most that is
    in use. The second step finds the holes of the first; what neither gives back is given back
    after it."""
    pool = Pool()
    most = 0
    for _ in range(2):
        live: dict[int, int] = {}
        now = 0
        for key, size in events:
            if size > SMALL:
                pool.take(key, size)
                live[key] = size
                now += size
                most = max(most, now)
            elif not size and key in live:
                pool.give(key)
                now -= live.pop(key)
        for key in live:
            pool.give(key)
    return pool.size - most
