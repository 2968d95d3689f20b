"""Which of several ranks takes the products of a matrix, and what crosses for it. Pure arithmetic.

A rank has 1/N of each chunk, cut anywhere, and Newton-Schulz needs whole matrices. So the rank that
has most of a matrix owns it: it gets the other ranks' elements and sends back what the products
made of them. In contiguous shares this spreads the products about evenly, and less crosses than
with any other owner.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Matrix:
    """Elements [offset, offset + numel) of a chunk. `flops`: of its update's products."""

    offset: int
    numel: int
    flops: float = 0.0


@dataclass(frozen=True)
class Cut:
    """Elements [begin, end) of the share of `rank`: its part of the matrix at `place` of the chunk,
    which `owner` takes the products of."""

    place: int
    rank: int
    owner: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        """Elements."""
        return self.end - self.begin


def cuts(matrices: Mapping[int, Matrix], share: int) -> list[Cut]:
    """All parts of the matrices, which are given by their places; ranks have `share` elements each.
    Those of one matrix by rank; of several ranks that have as much, the first owns it."""
    found = []
    for place, matrix in sorted(matrices.items()):
        end = matrix.offset + matrix.numel
        parts = [
            (rank, max(0, matrix.offset - rank * share), min(share, end - rank * share))
            for rank in range(matrix.offset // share, -(-end // share))
        ]
        owner = max(parts, key=lambda part: part[2] - part[1])[0]
        found += [Cut(place, rank, owner, low, high) for rank, low, high in parts]
    return found


@dataclass(frozen=True)
class Exchange:
    """What one rank sends and gets. `mine`: its parts, in the order in which they go; `owned`:
    those of its matrices, in the order in which they come. `gone` and `came`: elements by rank."""

    mine: list[Cut]
    owned: list[Cut]
    gone: list[int]
    came: list[int]

    @classmethod
    def of(cls, found: list[Cut], rank: int, world: int) -> Exchange:
        """That of `rank` among `world`."""
        mine = sorted((c for c in found if c.rank == rank), key=lambda c: (c.owner, c.place))
        owned = sorted((c for c in found if c.owner == rank), key=lambda c: (c.rank, c.place))
        gone = [sum(c.numel for c in mine if c.owner == other) for other in range(world)]
        came = [sum(c.numel for c in owned if c.rank == other) for other in range(world)]
        return cls(mine, owned, gone, came)


@dataclass(frozen=True)
class Load:
    """The largest of any rank: elements that it holds for the exchange; elements that cross to it,
    or from it; and operations of its products."""

    held: int
    crossing: int
    flops: float


@functools.lru_cache(maxsize=1 << 10)  # blocks are alike
def load(matrices: tuple[Matrix, ...], share: int, world: int) -> Load:
    """What one update of all these matrices costs."""
    found = cuts(dict(enumerate(matrices)), share)
    held = crossing = 0
    flops = [0.0] * world
    for cut in {c.place: c for c in found}.values():
        flops[cut.owner] += matrices[cut.place].flops
    for rank in range(world):
        mine = Exchange.of(found, rank, world)
        gone, came = sum(mine.gone), sum(mine.came)
        held = max(held, gone + came)
        crossing = max(crossing, gone + came - 2 * mine.gone[rank])
    return Load(held, crossing, max(flops))
