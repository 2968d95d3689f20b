"""When precision switches: the state machine on losses that are made up, no model."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.precision.rules import Event, Facts, Limits, Machine, State

QUICK = Limits(settle=40, hold=60, longest_hold=240, forgive=400)


def quiet(step: int, seed: int = 0) -> float:
    noise = random.Random(f"{seed}/{step}").gauss(0, 0.05)
    return 1.0 + math.exp(-step / 60) + noise


def never() -> float:
    raise AssertionError("nothing asked for the probe")


def settled(limits: Limits = QUICK) -> Machine:
    machine = Machine(limits)
    while not machine.half:
        assert machine.step < 4 * limits.settle
        machine.observe(Facts(quiet(machine.step)), never)
    return machine


def test_half_begins_when_the_loss_has_settled() -> None:
    machine = settled()
    assert machine.step == QUICK.settle
    assert machine.state is State.HALF


def test_a_loss_that_is_not_finite_delays_it() -> None:
    machine = Machine(QUICK)
    for step in range(QUICK.settle + 29):
        machine.observe(Facts(math.nan if step == 30 else quiet(step)), never)
    assert not machine.half


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        (Facts(1.0, halved=True), "halvings"),
        (Facts(1.0, underflow=0.2), "underflow"),
        (Facts(math.nan), "loss"),
        (Facts(30.0), "loss"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_fault_of_half_precision_is_seen_within_20_steps(facts: Facts, cause: str) -> None:
    machine = settled()
    for _ in range(100):
        machine.observe(Facts(quiet(machine.step)), lambda: 0.5)
    begun, events = machine.step, []
    while machine.half and machine.step < begun + 20:
        events += machine.observe(facts, lambda: 0.5)
    assert machine.state is State.HOLD
    assert [event.cause for event in events] == [cause]
    assert events[0].switched


@pytest.mark.parametrize("loss", [math.nan, 30.0])
def test_the_same_of_the_data_switches_nothing_and_is_said(loss: float) -> None:
    machine = settled()
    for _ in range(100):
        machine.observe(Facts(quiet(machine.step)), never)
    events = [e for _ in range(5) for e in machine.observe(Facts(loss), lambda: 0.0)]
    assert machine.half
    assert [event.cause for event in events] == ["data"]
    assert not events[0].switched


@pytest.mark.parametrize(
    ("dtype", "limit"), [("bfloat16", 2**-7), ("float16", 2**-10)], ids=["bfloat16", "float16"]
)
@pytest.mark.parametrize("beyond", [0.9, 1.1])
def test_what_a_format_cannot_tell_apart_is_no_cause(
    dtype: str, limit: float, beyond: float
) -> None:
    """A loss that is not finite has no rise to compare with: the format's epsilon alone counts."""
    machine = settled()
    machine.dtype = dtype
    machine.observe(Facts(math.nan), lambda: beyond * limit)
    assert machine.half == (beyond < 1)


def test_a_difference_that_does_not_explain_the_rise_is_no_cause() -> None:
    """From 1 to 30, where full precision has 29.4: the data have risen. 10 of 30 is precision."""
    for gap, stays in ((0.02, True), (0.5, False)):
        machine = settled()
        for _ in range(100):
            machine.observe(Facts(quiet(machine.step)), never)
        events = [e for _ in range(3) for e in machine.observe(Facts(30.0), lambda gap=gap: gap)]
        assert machine.half == stays
        assert [event.cause for event in events] == ["data" if stays else "loss"]


def test_a_limit_that_is_given_counts() -> None:
    machine = settled(Limits(settle=40, difference=1e-4))
    machine.observe(Facts(math.nan), lambda: 2e-4)
    assert not machine.half


def test_a_suspicion_of_underflow_is_looked_into() -> None:
    """Zeros become more as a training goes on, in full precision too."""
    machine = settled()
    assert not machine.observe(Facts(1.0, underflow=0.2), never, lambda: 0.01)
    assert machine.half
    events = machine.observe(Facts(1.0, underflow=0.2), never, lambda: 0.06)
    assert [event.cause for event in events] == ["underflow"]


def test_one_halving_of_a_scale_is_normal() -> None:
    machine = settled()
    for step in range(600):
        facts = Facts(quiet(step), halved=step % 60 == 0)
        assert not machine.observe(facts, never)
    assert machine.half


def test_holds_double_and_are_forgiven() -> None:
    machine = settled()
    lengths = []
    for _ in range(4):
        machine.observe(Facts(math.inf), lambda: math.inf)
        begun = machine.step
        while not machine.half:
            machine.observe(Facts(quiet(machine.step)), never)
        lengths.append(machine.step - begun)
    assert lengths == [60, 120, 240, 240]
    for _ in range(QUICK.forgive + 1):
        machine.observe(Facts(quiet(machine.step)), never)
    machine.observe(Facts(math.inf), lambda: math.inf)
    assert machine._left == QUICK.hold


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    noise=st.floats(0.005, 0.3),
    kind=st.sampled_from(["steady", "drift", "jump", "season"]),
)
def test_data_that_drift_switch_nothing(seed: int, noise: float, kind: str) -> None:
    """Whatever the loss does: where full precision says the same, half precision stays."""
    machine, draw = Machine(QUICK), random.Random(seed)
    events: list[Event] = []
    for step in range(1200):
        base = 1.0 + math.exp(-step / 50)
        base += {
            "steady": 0.0,
            "drift": step / 600,
            "jump": 2.0 * (step > 500),
            "season": 0.5 * math.sin(step / 100),
        }[kind]
        loss = abs(draw.gauss(base, noise))
        events += machine.observe(Facts(loss), lambda: draw.uniform(0, 2**-7))
    assert [event.cause for event in events if event.switched] in ([], ["settled"])
    if kind == "steady":
        assert machine.half


@settings(max_examples=50, deadline=None)
@given(
    losses=st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=300),
    halved=st.integers(1, 40),
)
def test_nothing_breaks_it(losses: list[float], halved: int) -> None:
    machine = Machine(Limits(settle=5, hold=5, longest_hold=40))
    for step, loss in enumerate(losses):
        machine.observe(Facts(loss, step % halved == 0, 0.01), lambda: 0.0)
    assert machine.step == len(losses)
    assert 0 <= machine.half_steps <= machine.step


def test_limits_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="settle=0"):
        Limits(settle=0)
