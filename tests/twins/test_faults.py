"""A fault is found by a difference, and not by an error of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
from hypothesis import strategies as st

from evener.errors import UsageError
from tests.twins import harness
from tests.twins._alone import Alone
from tests.twins._ranks import Ranks, Switch


class Sum:
    """What is broken on purpose."""

    def of(self, values: list[int]) -> int:
        if -1 in values:
            raise UsageError("a value is negative", "leave it out")
        return sum(values)


def _put(name: str, value: Any) -> Callable[[], Any]:
    return lambda: mock.patch.object(Sum, name, value)


def _negative(self: Sum, values: list[int], of: Any = Sum.of) -> Any:
    return of(self, [*values, -1])


def _wrapped(_: Sum, values: Any) -> Any:
    try:
        return values.total()
    except AttributeError as error:
        raise AssertionError("no sum") from error


FAULTS: dict[str, Callable[[], Any]] = {
    "a difference": _put("of", lambda _, values: sum(values) + 1),
    "noticed": _put("of", _negative),
    "noticed, and not declared": _put("of", _negative),
    "another signature": _put("of", lambda values: sum(values)),
    "another name": _put("total", lambda _, values: sum(values)),
    "an attribute that is no more": _put("of", _wrapped),
    "a key that is no more": _put("of", lambda *_: {}["sum"]),
}
FOUND = {"a difference", "noticed"}
_switch = Switch()
_world = Ranks(1)


def run(_rank: int, _size: int, values: list[int], fault: str) -> None:
    """One rank: raises where something differs."""
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        assert Sum().of(values) == sum(values), "sums differ"


def _example(where: str) -> harness.Twin:
    def check(values: list[int]) -> None:
        if where == "ranks":
            _world.run("tests.twins.test_faults:run", values, _switch.fault)
        else:
            run(0, 1, values, _switch.fault if where == "here" else "")

    switched = {name: partial(_switch.put, name) for name in FAULTS}
    faults = FAULTS if where == "put in by the search" else switched
    programs = st.lists(st.integers(0, 9), max_size=3)
    return harness.Twin(
        "example", programs, check, faults, {"noticed": "UsageError: a value is negative"}
    )


@pytest.mark.parametrize("where", ["put in by the search", "here", "ranks"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_only_raises_is_broken(fault: str, where: str) -> None:
    result = harness.find(_example(where), fault, seed=1, count=5)
    assert (not result.broken) == (fault in FOUND), result
    if fault in FOUND:
        assert result.error
    else:
        assert harness.TRACED in result.broken


def _never_right() -> harness.Twin:
    def check(_: list[int]) -> None:
        raise AssertionError("sums differ")

    return harness.Twin("example", st.just([]), check, {"none": contextlib.nullcontext})


def test_a_program_that_is_wrong_without_the_fault_shows_nothing() -> None:
    result = harness.find(_never_right(), "none", seed=1, count=5)
    assert not result.error and "without the fault" in result.without


def _dies() -> harness.Twin:
    def check(_: list[int]) -> None:
        raise SystemExit(3)

    return harness.Twin("example", st.just([]), check, {"none": contextlib.nullcontext})


def test_a_fault_of_which_the_process_dies_is_broken() -> None:
    with contextlib.closing(Alone("example", _dies)) as alone:
        assert "the process died" in alone.search(1, 5, "none").broken
