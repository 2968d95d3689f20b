"""When a job counts as standing still, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from evener.tools.why.stall import Stall


def _look(stall: Stall, pauses: list[float], until: float, period: float = 0.5) -> Iterator[float]:
    """Steps that take `pauses`, looked at every `period` until `until`: when a stall was said."""
    ends, total = [], 0.0
    for pause in pauses:
        total += pause
        ends.append(total)
    now = 0.0
    while now < until:
        step = sum(end <= now for end in ends)
        if stall.see(now, step, step):
            yield now
        now += period


def test_a_stall_is_said_once() -> None:
    said = list(_look(Stall(20.0), [0.1] * 100, until=200.0))
    assert len(said) == 1
    assert 10.0 + 20.0 <= said[0] <= 10.0 + 21.0


def test_long_steps_raise_the_limit() -> None:
    said = list(_look(Stall(20.0), [30.0] * 8, until=1000.0))
    assert len(said) == 1
    assert 240 + 299 <= said[0] <= 240 + 302


def test_a_pause_that_it_came_out_of_may_come_again_and_longer() -> None:
    """A checkpoint of 19 s under the floor makes one of 50 s no stall."""
    steps = [0.1] * 50 + [19.0] + [0.1] * 50 + [50.0] + [0.1] * 50
    assert list(_look(Stall(20.0), steps, until=84.0)) == []


def test_the_start_may_take_two_minutes() -> None:
    assert list(_look(Stall(3.0), [110.0] + [0.1] * 9, until=112.0)) == []
    said = list(_look(Stall(3.0), [1e9], until=200.0))
    assert len(said) == 1
    assert 119.0 <= said[0] <= 121.0


def test_it_is_said_again_after_it_moved() -> None:
    steps = [0.1] * 50 + [40.0] + [0.1] * 50
    assert len(list(_look(Stall(20.0), steps, until=400.0))) == 2


def test_a_job_without_steps_is_watched_by_its_operations() -> None:
    stall = Stall(10.0)
    said = [now for now in range(100) if stall.see(float(now), min(now, 40), 0)]
    assert said == [50]


@given(st.lists(st.floats(0.01, 19.0), min_size=1, max_size=60), st.floats(0.1, 1.0))
def test_pauses_below_the_floor_are_never_a_stall(pauses: list[float], period: float) -> None:
    assert list(_look(Stall(20.0), pauses, sum(pauses), period)) == []
