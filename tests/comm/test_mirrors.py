"""Verdicts on checksums: however many there are between two announcements, none is lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evener.comm import mirrors
from evener.comm.codecs.checks import checksum
from evener.comm.errors import CommError
from evener.comm.mirrors import Mirror, Traffic, announce


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The way of one rank."""
    monkeypatch.setattr(
        mirrors.dist,
        "all_gather_into_tensor",
        lambda every, mine, group: every.copy_(mine),  # noqa: ARG005 - as torch has it
    )
    return SimpleNamespace(
        size=1, communicators=SimpleNamespace(rank=0, control=SimpleNamespace(handle=None))
    )


def refreshed(spread: Any, name: str) -> Mirror:
    mirror = Mirror(name, spread, Traffic(), host=False)
    weights = torch.arange(40, dtype=torch.bfloat16)
    found = mirror.look(weights)
    announce([(mirror, found)])
    found.rows = [weights]
    mirror.apply(found)
    return mirror


@pytest.mark.parametrize("wrong", [0, 31, 32, 33, 99, None])
def test_no_wrong_checksum_is_lost_among_many(alone: Any, wrong: int | None) -> None:
    mirror = refreshed(alone, "a unit")
    weights = torch.arange(40, dtype=torch.bfloat16)
    for number in range(100):
        own = weights.clone()
        if number == wrong:
            own[3] = 7
        mirror.copy(torch.empty(40, dtype=torch.bfloat16), own)
    found = mirror.look(weights)
    assert found.says[1] == checksum(weights)
    if wrong is None:
        announce([(mirror, found)])
        assert found.unchanged
        return
    with pytest.raises(CommError, match="a unit that rank 0 put together do not match"):
        announce([(mirror, found)])


def test_all_mirrors_at_fault_are_forgotten_at_once(alone: Any) -> None:
    every = [refreshed(alone, name) for name in ("one", "two", "three")]
    weights = torch.arange(40, dtype=torch.bfloat16)
    for mirror in every[1:]:
        mirror.copy(torch.empty(40, dtype=torch.bfloat16), weights + 1)
    looked = [(mirror, mirror.look(weights)) for mirror in every]
    with pytest.raises(CommError, match="two that rank 0"):
        announce(looked)
    assert [mirror.filled for mirror in every] == [True, False, False]
