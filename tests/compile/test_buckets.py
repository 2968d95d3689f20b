"""The choice of sizes: against trying all sets, and its promises."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from evener.compile.buckets import choose, rounded

COUNTS = st.dictionaries(st.integers(1, 300), st.integers(1, 9), min_size=1, max_size=7)


def waste_of(edges: tuple[int, ...], counts: dict[int, int]) -> int:
    return sum(
        (min(e for e in edges if e >= size) - size) * count for size, count in counts.items()
    )


@settings(max_examples=80, deadline=None)
@given(COUNTS, st.floats(0, 500), st.sets(st.integers(1, 300), max_size=2), st.integers(1, 5))
def test_no_set_of_edges_is_better(
    counts: dict[int, int], cost: float, have: set[int], most: int
) -> None:
    """Every set of edges among the sizes, tried one by one."""
    points = {rounded(size) for size in counts}
    rows = sum(size * count for size, count in counts.items())
    allowed = max(most - len(have), 0)
    tried = []
    for length in range(allowed + 1):
        for new in itertools.combinations(sorted(points - have), length):
            edges = tuple(sorted(have | set(new)))
            if edges and edges[-1] >= max(counts):
                tried.append((waste_of(edges, counts), length))
    plan = choose(counts, cost, have=have, most=most)
    if not tried:
        assert plan.edges == tuple(sorted(have))
        return
    got = waste_of(plan.edges, counts)
    new = len(set(plan.edges) - have)
    assert new <= allowed
    assert plan.edges[-1] >= max(counts)
    within = [t for t in tried if t[0] <= 0.25 * rows]
    if within:
        assert got <= 0.25 * rows + 1e-9
        assert got + cost * new <= min(w + cost * n for w, n in within) + 1e-6
    else:
        assert got == min(w for w, _ in tried)


@given(st.integers(1, 1 << 20))
def test_rounding_is_small(size: int) -> None:
    assert size <= rounded(size) <= size * 17 / 16
    assert rounded(rounded(size)) == rounded(size)


def test_a_dear_compilation_makes_few_buckets() -> None:
    counts = dict.fromkeys(range(60, 129), 1)
    assert len(choose(counts, 0.0, most=8).edges) == 8
    dear = choose(counts, 1e9, most=8)
    assert len(dear.edges) == 2  # one would pad by 36%
    assert dear.padding <= 0.25


def test_what_is_compiled_costs_nothing_more() -> None:
    counts = dict.fromkeys(range(60, 129), 1)
    assert 96 in choose(counts, 1e9, have=[96], most=8).edges
    assert choose({}, 1.0, have=[8]).edges == (8,)
    assert choose({100: 3}, 1.0, have=[8, 16], most=2).edges == (8, 16)
