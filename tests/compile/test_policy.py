"""When a bucket is compiled, used and switched off; what the next process knows."""

from __future__ import annotations

import random

import pytest

from evener.compile.policy import Buckets, Options
from evener.errors import UsageError


def serve(buckets: Buckets, sizes: list[int], row: float = 1e-3, faster: float = 2.0) -> list[int]:
    """Calls whose time is that of their rows; gives the edges that were compiled."""
    made = []
    for size in sizes:
        turn = buckets.take(size)
        if turn.compile and turn.bucket is not None:
            made.append(turn.bucket.edge)
            buckets.made(turn.bucket, 1.0)
        rows = size if turn.bucket is None else turn.bucket.edge / faster
        if turn.timed:
            buckets.ran(turn, rows * row)
    return made


def many(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(range(40, 129), count)


@pytest.mark.parametrize("seed", range(20))
def test_58_sizes_need_few_compilations(seed: int) -> None:
    sizes = many(58, seed) + many(2, seed + 100)
    buckets = Buckets(Options())
    made = serve(buckets, sizes)
    assert 1 <= len(made) <= 6
    used = [b for b in buckets.buckets if b.calls]
    rows, padded = sum(b.rows for b in used), sum(b.edge * b.calls for b in used)
    assert sum(b.calls for b in used) > 30
    assert padded / rows - 1 <= 0.25


def test_nothing_is_compiled_for_a_size_that_comes_once() -> None:
    buckets = Buckets(Options(plan_after=4))
    assert serve(buckets, [10, 10, 10, 10, 500]) == [10]
    assert serve(buckets, [500]) == [rounded_up(500)]


def rounded_up(size: int) -> int:
    from evener.compile.buckets import rounded

    return rounded(size)


def test_a_bucket_that_is_not_faster_is_switched_off() -> None:
    buckets = Buckets(Options(plan_after=4))
    serve(buckets, [16] * 30, faster=0.9)
    (bucket,) = buckets.buckets
    assert bucket.status == "off"
    assert "not faster" in bucket.reason
    assert bucket.calls == 5  # and no more
    assert buckets.take(16).bucket is None


def test_a_wrong_form_is_not_used() -> None:
    buckets = Buckets(Options(plan_after=1, hits=1))
    turn = buckets.take(8)
    assert turn.compile and turn.bucket is not None
    assert buckets.take(8).bucket is None  # while it is being made
    buckets.made(turn.bucket, 0.1, "it is wrong")
    buckets.stop("it is wrong")
    assert buckets.take(8).bucket is None
    assert buckets.saved()["off"] == "it is wrong"


def test_the_next_process_compiles_at_the_first_call() -> None:
    first = Buckets(Options())
    made = serve(first, many(58))
    again = Buckets(Options(), first.saved())
    edges = [bucket.edge for bucket in again.buckets]
    assert set(made) == set(edges)
    turn = again.take(edges[0])
    assert turn.compile


def test_options_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="hits=0"):
        Options(hits=0)
