"""Which hosts an elastic job may use: order, blacklist, cool-down, scripts. No time passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from evener.errors import UsageError
from evener.tools.launch.discovery import Cooldown, DiscoveryError, Pool, Script
from evener.tools.launch.hosts import Host


def script(folder: Path, text: str) -> Script:
    path = folder / "hosts.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return Script(path, 3)


def test_a_script_names_hosts_and_slots(tmp_path: Path) -> None:
    assert script(tmp_path, "echo gpu1:2; echo; echo gpu2").find() == {"gpu1": 2, "gpu2": 3}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("echo no such cluster >&2; exit 4", "status 4: no such cluster"),
        ("echo gpu1:many", "'gpu1:many'"),
        ("echo gpu one", "'gpu one'"),
    ],
)
def test_a_bad_script_is_an_error_that_says_why(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(DiscoveryError, match=says):
        script(tmp_path, text).find()


def test_a_script_that_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("gpu1:2\n")
    with pytest.raises(DiscoveryError, match="cannot be run"):
        Script(tmp_path / "hosts", 1).find()


def test_hosts_keep_their_order_and_new_ones_come_last() -> None:
    pool = Pool()
    pool.update({"b": 1, "a": 2})
    pool.update({"a": 2, "c": 1, "b": 4})
    assert pool.available(0) == [Host("b", 4), Host("a", 2), Host("c", 1)]
    assert pool.available(0, most=5) == [Host("b", 4), Host("a", 1)]
    pool.update({"c": 1})
    assert pool.available(0) == [Host("c", 1)]


def test_a_failed_host_stays_out_for_good() -> None:
    pool = Pool()
    pool.update({"a": 1, "b": 1})
    assert pool.blacklist("a", 10) == float("inf")
    assert pool.available(1e9) == [Host("b", 1)]
    assert pool.hopeless(2, 1e9)
    assert not pool.hopeless(1, 1e9)


def test_with_a_cooldown_it_comes_back_as_the_youngest_and_stays_out_longer_each_time() -> None:
    pool = Pool(Cooldown(10, 50))
    pool.update({"a": 1, "b": 1})
    first = pool.blacklist("a", 100)
    assert 20 <= first <= 30
    assert pool.available(100 + first - 0.1) == [Host("b", 1)]
    assert not pool.hopeless(2, 100)
    assert pool.available(100 + first + 0.1) == [Host("b", 1), Host("a", 1)]
    assert 40 <= pool.blacklist("a", 200) <= 50
    assert pool.blacklist("a", 300) == 50  # the upper bound


@pytest.mark.parametrize(("low", "high"), [(0, 5), (5, 4), (1, 4000)])
def test_a_cooldown_that_cannot_be(low: float, high: float) -> None:
    with pytest.raises(UsageError, match="cooldown"):
        Cooldown(low, high)
