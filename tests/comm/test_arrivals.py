"""What leaves when, for any layout and any order in which gradients come."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener.comm.arrivals import Arrivals, Phase
from evener.comm.errors import CommError
from evener.comm.lanes import Ticket


class Owner:
    """Keeps what it is told; every gradient is counted, and complete when it is."""

    def __init__(self, sizes: list[int], sequence: list[int], repeats: bool = False) -> None:
        places = [bucket for bucket, size in enumerate(sizes) for _ in range(size)]
        self.arrivals = Arrivals([f"p{i}" for i in range(len(places))], self, repeats=repeats)
        self.arrivals.sequence = tuple(sequence)
        self.arrivals.lay_out(sizes, [(bucket,) for bucket in places])
        self.places = places
        self.began_count = 0
        self.complete: list[int] = []
        self.left: list[int] = []

    def began(self) -> None:
        self.began_count += 1

    def begins(self) -> None:
        pass

    def special(self) -> tuple[int, ...] | None:
        return None

    def arrived(self, index: int) -> None:
        self.arrivals.begin()
        if self.arrivals.count(index):
            self.arrivals.order.append(index)
            self.arrivals.complete(index)

    def completed(self, bucket: int) -> None:
        self.complete.append(bucket)

    def submit(self, bucket: int) -> Ticket:
        assert self.arrivals.place == len(self.left)
        self.left.append(bucket)
        return cast(Ticket, bucket)


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int]:
    """Sizes of buckets, the order in which they leave, that of the gradients, passes."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    sequence = draw(st.permutations(range(len(sizes))))
    passes = draw(st.integers(1, 3))
    came = draw(st.permutations([i for i in range(sum(sizes)) for _ in range(passes)]))
    some = draw(st.integers(0, len(came)))
    return sizes, list(sequence), list(came)[:some], passes


@given(steps(), st.booleans())
def test_buckets_leave_complete_and_in_sequence(
    step: tuple[list[int], list[int], list[int], int], holds: bool
) -> None:
    sizes, sequence, came, passes = step
    owner = Owner(sizes, sequence)
    arrivals = owner.arrivals
    arrivals.set_passes(passes)
    for _ in range(2):  # the second step as the first
        owner.left, owner.complete, owner.began_count = [], [], 0
        arrivals.holds = holds
        assert arrivals.phase is Phase.WAITING
        for place, index in enumerate(came, 1):
            arrivals.came(index)
            whole = {i for i in range(sum(sizes)) if came[:place].count(i) == passes}
            ready = [
                bucket
                for bucket in range(len(sizes))
                if all(i in whole for i, b in enumerate(owner.places) if b == bucket)
            ]
            assert sorted(owner.complete) == ready
            # As far in the sequence as all is there, and no further.
            far = next((n for n, b in enumerate(sequence) if b not in ready), len(sequence))
            assert owner.left == ([] if holds else sequence[:far])
        assert owner.began_count == bool(came)
        assert set(arrivals.partly()) == set(came)
        assert arrivals.used == [i in came for i in range(sum(sizes))]
        arrivals.flush()
        assert owner.left == sequence
        assert arrivals.phase is Phase.LEFT
        assert set(arrivals.tickets) == set(sequence)
        arrivals.reset()


def test_what_comes_under_no_sync_is_used_and_nothing_else() -> None:
    owner = Owner([1, 1], [0, 1])
    owner.arrivals.active = False
    owner.arrivals.came(1)
    assert owner.arrivals.used == [False, True]
    assert owner.arrivals.phase is Phase.WAITING
    owner.arrivals.active = True
    owner.arrivals.came(0)
    assert owner.arrivals.used == [True, True]
    assert owner.left == [0]


def test_a_gradient_that_comes_again_is_an_error_unless_it_does_so_in_every_step() -> None:
    owner = Owner([1], [0])
    owner.arrivals.came(0)
    with pytest.raises(CommError, match="p0 came again before it was applied"):
        owner.arrivals.came(0)
    owner = Owner([1, 1], [0, 1], repeats=True)
    for index in (0, 1, 0, 0):
        owner.arrivals.came(index)
    assert owner.left == []  # nobody knew how often
    owner.arrivals.flush()
    owner.arrivals.settle()
    owner.arrivals.reset()
    for index, left in ((0, []), (0, []), (1, []), (0, [0, 1])):
        owner.left = []
        owner.arrivals.came(index)
        assert owner.left == left
    with pytest.raises(CommError):
        owner.arrivals.came(0)


@given(steps(), st.sets(st.integers(0, 3)), st.integers(1, 2))
def test_gradients_that_are_only_counted_leave_alike(
    step: tuple[list[int], list[int], list[int], int], special: set[int], times: int
) -> None:
    """The quick way for plain gradients and the whole way: the same buckets, order and phase."""
    sizes, sequence, came, passes = step
    kept = tuple(index for index in special if index < sum(sizes))
    owners = [Owner(sizes, sequence), Owner(sizes, sequence)]
    owners[0].special = lambda: kept  # type: ignore[method-assign]
    quick = 0
    for _ in range(times):
        for owner in owners:
            owner.arrivals.set_passes(passes)
            owner.left.clear()
            for index in came:
                if owner.arrivals._plain[index]:
                    owner.arrivals.came_plain(index)
                    quick += 1
                else:
                    owner.arrivals.came(index)
        one, other = (owner.arrivals for owner in owners)
        assert owners[0].left == owners[1].left and owners[0].complete == owners[1].complete
        assert (one.order, one.used, one.phase) == (other.order, other.used, other.phase)
        assert one.partly() == other.partly()
        for owner in owners:
            owner.arrivals.flush()
    if passes == 1 and not kept:
        assert quick == times * max(0, len(came) - 1)


def test_a_plain_gradient_that_comes_again_is_refused() -> None:
    owner = Owner([2, 1], [0, 1])
    owner.special = lambda: ()  # type: ignore[method-assign]
    owner.arrivals.came(0)
    owner.arrivals.came_plain(1)
    assert owner.left == [0] and not any(owner.arrivals._plain[:2])
    with pytest.raises(CommError, match="came again"):
        owner.arrivals.came(1)
