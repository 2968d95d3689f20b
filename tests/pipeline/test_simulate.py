"""The simulator against what is known of the schedules in closed form."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.errors import UsageError
from evener.pipeline import schedules
from evener.pipeline.simulate import Link, Network, StageCost, simulate

FREE = Network(Link(1e30, 0.0), Link(1e30, 0.0))


def even(stages: int, **more: float) -> list[StageCost]:
    return [StageCost(1.0, 1.0, 1.0, **more) for _ in range(stages)]


@settings(max_examples=60)
@given(st.integers(1, 8), st.integers(1, 24), st.sampled_from(["GPipe", "1F1B", "Eager1F1B"]))
def test_the_bubble_of_equal_stages(ranks: int, microbatches: int, schedule: str) -> None:
    if schedules.check(schedules.kind_of(schedule), ranks, microbatches):
        return
    found = simulate(schedule, even(ranks), ranks, microbatches, FREE)
    assert found.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1), abs=1e-9)
    assert found.step == pytest.approx(3.0 * (microbatches + ranks - 1))


@settings(max_examples=30)
@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 5))
def test_interleaving_divides_the_bubble(ranks: int, local: int, rounds: int) -> None:
    microbatches = ranks * rounds
    found = simulate("Interleaved1F1B", even(ranks * local), ranks, microbatches, FREE)
    waiting = 3.0 * (ranks - 1)
    assert found.step == pytest.approx(3.0 * local * microbatches + waiting, rel=0.05)
    theory = waiting / (3.0 * local * microbatches + waiting)
    assert found.bubble == pytest.approx(theory, abs=0.05)


@pytest.mark.parametrize("ranks", [2, 4])
def test_zero_bubble_schedules_have_less_of_it(ranks: int) -> None:
    microbatches = 4 * ranks
    plain = simulate("Interleaved1F1B", even(2 * ranks), ranks, microbatches, FREE)
    zero = simulate("InterleavedZeroBubble", even(2 * ranks), ranks, microbatches, FREE)
    v = simulate("ZBVZeroBubble", even(2 * ranks), ranks, microbatches, FREE)
    assert zero.step < plain.step and v.step < plain.step
    # ZB-V has no bubble but the wait for the first microbatch, where the three times are equal.
    assert v.step == pytest.approx(3.0 * 2 * microbatches + (ranks - 1), rel=0.05)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(*[st.floats(0.01, 2.0)] * 3), min_size=2, max_size=5),
    st.integers(0, 8),
    st.sampled_from(["GPipe", "1F1B"]),
)
def test_a_step_is_bounded_by_its_parts(
    times: list[tuple[float, float, float]], more: int, schedule: str
) -> None:
    ranks = len(times)
    microbatches = ranks + more
    stages = [StageCost(*t) for t in times]
    found = simulate(schedule, stages, ranks, microbatches, FREE)
    whole = [sum(t) for t in times]
    assert found.step >= max(whole) * microbatches - 1e-9
    assert found.step <= sum(whole) * microbatches + 1e-9
    assert sum(found.busy) == pytest.approx(sum(whole) * microbatches)
    for rank in range(ranks):
        own = sorted((m.begin, m.end) for m in found.marks if m.rank == rank and m.kind != "send")
        assert len(own) == 2 * microbatches
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(own))


def test_what_the_schedule_holds() -> None:
    assert schedules.in_flight("GPipe", 4, 1, 8) == (8, 8, 8, 8)
    assert schedules.in_flight("1F1B", 4, 1, 8) == (4, 3, 2, 1)
    assert schedules.in_flight("Eager1F1B", 4, 1, 8) == (7, 5, 3, 1)
    stages = even(4, held=10.0, fixed=3.0)
    assert simulate("1F1B", stages, 4, 8, FREE).memory == [43, 33, 23, 13]
    assert simulate("GPipe", stages, 4, 8, FREE).memory == [83] * 4


@pytest.mark.parametrize("schedule", schedules.KINDS)
def test_every_microbatch_goes_forward_and_backward_once_everywhere(schedule: str) -> None:
    kind = schedules.kind_of(schedule)
    local = kind.local or 3
    ranks, microbatches = 4, 8
    orders = schedules.order(schedule, ranks, local, microbatches)
    done = [action for actions in orders for action in actions]
    assert len(done) == len(set(done))
    for stage in range(ranks * local):
        rank = schedules.rank_of(kind, stage, ranks)
        for microbatch in range(microbatches):
            own = [a.kind for a in orders[rank] if a[1:] == (stage, microbatch)]
            assert own in (["F", "B"], ["F", "I", "W"])


def test_a_transfer_takes_its_time_and_its_turn() -> None:
    slow = Network(Link(1.0, 0.5), Link(1.0, 0.5))
    found = simulate("GPipe", [StageCost(1, 0, 0, sent=4.0), StageCost(1, 1, 0)], 2, 2, slow)
    sends = sorted((m.begin, m.end) for m in found.marks if m.kind == "send" and m.rank == 0)
    assert sends == [(1.0, 5.5), (5.0, 9.5)]  # the second waits for the wire, not for the latency
    assert found.step == pytest.approx(9.5 + 1 + 2 + 0.5)


def test_eager_forwards_hide_transfers() -> None:
    slow = Network(Link(1.0, 0.0), Link(1.0, 0.0))
    stages = [StageCost(1.0, 1.0, 1.0, sent=0.7, returned=0.7), StageCost(1.0, 1.0, 1.0)]
    plain, eager = (simulate(s, stages, 2, 16, slow) for s in ("1F1B", "Eager1F1B"))
    assert plain.step > 1.15 * 3 * 17  # each round waits for two transfers
    assert eager.step == pytest.approx(3 * 17 + 1.4, abs=0.1)


def test_links_between_nodes_are_shared() -> None:
    network = Network(Link(1e30, 0.0), Link(1.0, 0.0), per_node=2)
    assert network.way(0, 1)[1] == network.inside and network.way(1, 2)[1] == network.between
    assert network.way(0, 3)[0] == network.way(1, 2)[0]


def test_what_a_schedule_cannot_run_is_said() -> None:
    with pytest.raises(UsageError, match="at least as many microbatches"):
        schedules.order("1F1B", 4, 1, 3)
    with pytest.raises(UsageError, match="equal rounds"):
        schedules.order("Interleaved1F1B", 4, 2, 11)
    with pytest.raises(UsageError, match="2 stage"):
        schedules.ranks_of(schedules.kind_of("ZBVZeroBubble"), 8, 4)
