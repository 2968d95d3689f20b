"""Values that check: exact in every type and order, and a wrong element is seen."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.tools.bench.collectives import values
from evener.tools.bench.collectives.options import OPERATIONS

KINDS = sorted(values.DTYPES)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 13, 64, 500])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", [op for op in OPERATIONS if op != "avg"])
def test_every_order_of_reduction_is_exact(op: str, kind: str, ranks: int) -> None:
    """All intermediate results are whole numbers that the type holds exactly."""
    parts = [values.contribution(kind, op, rank, ranks, 3) for rank in range(ranks)]
    want = values.reduced(kind, op, ranks, 3)
    for vector in (*parts, want):
        typed = vector.to(values.DTYPES[kind])
        assert torch.equal(typed.to(torch.float64), vector)
    # Partial results lie between 0 and the final one.
    assert all(bool((part >= 0).all()) for part in parts)
    if op != "min":
        assert bool((torch.stack(parts).amax(0) <= want).all())


@settings(deadline=None)  # machines are busy
@given(
    st.sampled_from(KINDS),
    st.integers(1, 3000),
    st.integers(0, 2999),
    st.integers(0, 7),
)
def test_one_wrong_element_is_one(kind: str, length: int, at: int, rank: int) -> None:
    period = values.contribution(kind, "none", rank, 8, 1)
    buffer = torch.zeros(length, dtype=values.DTYPES[kind])
    values.fill(buffer, period)
    assert values.wrong(buffer, period) == 0
    values.as_bits(buffer)[at % length] ^= 1
    assert values.wrong(buffer, period) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_blocks_and_repetitions_differ(kind: str) -> None:
    base = values.contribution(kind, "none", 1, 4, 1)
    for other in (
        values.contribution(kind, "none", 2, 4, 1),
        values.contribution(kind, "none", 1, 4, 2),
        values.contribution(kind, "none", 1, 4, 1, block=2),
    ):
        buffer = torch.zeros(1000, dtype=values.DTYPES[kind])
        values.fill(buffer, other)
        assert values.wrong(buffer, base) > 500


def test_a_mean_may_round_and_no_more() -> None:
    want = values.reduced("float", "avg", 3, 0)
    buffer = torch.zeros(500)
    values.fill(buffer, want)
    allowed = values.tolerance("float", "avg", 3)
    assert values.wrong(buffer * (1 + 1e-7), want, allowed) == 0
    assert values.wrong(buffer * (1 + 1e-4), want, allowed) > 300
    assert values.tolerance("float", "avg", 4) == 0
