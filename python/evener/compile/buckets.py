"""Which sizes to compile for: a dynamic program over the sizes that were seen. No framework.

A call of size n runs in the compiled form of the smallest *edge* >= n, on n rows and edge - n rows
of padding. More edges mean less padding and more to compile. The set that is chosen makes

    padded rows of all recorded calls + k * number of new edges

least, where k is the time of one compilation in rows (seconds to compile / seconds per row), among
the sets whose padding is within a limit. What is compiled already costs nothing more.

Sizes are first rounded up to 4 binary digits after the leading one (64, 68, 72, ..., 128, 136):
at most 1/16 more rows, and few sizes to choose from, however many there are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from evener.base.given import given

_STEPS = 16  # per octave


@dataclass(frozen=True)
class Plan:
    """Edges in rising order. padding: padded rows over real rows, of the recorded calls."""

    edges: tuple[int, ...]
    padding: float


def rounded(size: int) -> int:
    """The smallest size >= `size` that an edge may have."""
    step = max(1, (1 << (size.bit_length() - 1)) // _STEPS)
    return -(-size // step) * step


@given
def choose(
    counts: Mapping[int, int],
    cost: float,
    *,
    have: Collection[int] = (),
    most: int = 6,
    padding: float = 0.25,
) -> Plan:
    """The edges to compile for.

    counts: calls by size. cost: of one compilation, in rows. have: edges that are compiled.
    most: edges in all, `have` included. padding: the limit; where no set keeps it, the set with the
    least padding is taken.
    """
    if not counts:
        return Plan(tuple(sorted(have)), 0.0)
    calls: dict[int, int] = dict.fromkeys(have, 0)
    for size, count in counts.items():
        point = min([rounded(size), *(edge for edge in have if edge >= size)])
        calls[point] = calls.get(point, 0) + count
    points = sorted(calls)
    rows = sum(size * count for size, count in counts.items())
    new = [0 if point in have else 1 for point in points]
    # before[i]: calls of the first i points, and the rows of them.
    before, filled = [0], [0]
    for point in points:
        before.append(before[-1] + calls[point])
        filled.append(filled[-1] + point * calls[point])
    last = max(index for index, point in enumerate(points) if calls[point])
    budget = max(most - len(set(have)), 0)
    # best[m][i]: least padding of the points up to i where i is an edge and m edges are new.
    best = [[math.inf] * len(points) for _ in range(budget + 1)]
    link: dict[tuple[int, int], tuple[int, int] | None] = {}
    for i, point in enumerate(points):
        for m in range(new[i], budget + 1):
            best[m][i], link[m, i] = float(point * before[i + 1] - filled[i + 1]), None
            for j in range(i):
                left = best[m - new[i]][j]
                part = point * (before[i + 1] - before[j + 1]) - (filled[i + 1] - filled[j + 1])
                if left + part < best[m][i]:
                    best[m][i], link[m, i] = left + part, (m - new[i], j)
    # Rounding pads too, whatever the edges are.
    unavoidable = filled[-1] - rows
    ends = [
        (best[m][i] + unavoidable, m, i)
        for m in range(budget + 1)
        for i in range(last, len(points))
        if best[m][i] < math.inf
    ]
    if not ends:  # no room for an edge above the largest size
        return Plan(tuple(sorted(have)), math.inf)
    within = [end for end in ends if end[0] <= padding * rows]
    if within:
        waste, m, i = min(within, key=lambda end: (end[0] + cost * end[1], end[1]))
    else:
        waste, m, i = min(ends)
    edges = set(have)
    step: tuple[int, int] | None = (m, i)
    while step is not None:
        edges.add(points[step[1]])
        step = link[step]
    return Plan(tuple(sorted(edges)), waste / rows)
