"""What would make a model fit is found by few plays of its step, and is what a search over all
sizes finds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.base.budget import Budget
from evener.tools.plan.memory import plan_memory
from evener.zero import profile as profiles
from evener.zero.config import Config, read
from evener.zero.nearest import nearest
from evener.zero.planner import Machine, Part, Work, least_gpu, plan
from evener.zero.planning import Ways, plan_units
from evener.zero.profile import Moment, Profile
from evener.zero.store import Formats
from evener.zero.units import Group, Unit
from tests.zero.test_plan import MACHINE, formats, parts, works

GB = 10**9


@given(parts, works, formats, st.integers(0, 60 * GB), st.sampled_from([0, 0, 10 * GB]))
@settings(max_examples=60, deadline=None)
def test_the_least_is_what_a_search_finds(
    parts: list[Part], work: Work, formats: Formats, host: int, ssd: int
) -> None:
    found = least_gpu(parts, formats, work, MACHINE, Budget(0, host, ssd))

    def fits(gpu: int) -> bool:
        return plan(parts, formats, work, MACHINE, Budget(gpu, host, ssd)).fits

    if found is None:
        assert not fits(1 << 44)
        return
    assert fits(found) and not fits(found - 1)
    assert least_gpu(parts, formats, work, MACHINE, Budget(0, host, ssd), found) == found
    assert least_gpu(parts, formats, work, MACHINE, Budget(0, host, ssd), found - 1) is None


class _Module(torch.nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(numel, device="meta"))


def _model(blocks: int, each: int, saved: int) -> tuple[list[Unit], Profile]:
    """Blocks of `each` parameters that save `saved` bytes, and what a trace would say of them."""
    units = [Unit("(stays)", None, [])]
    for n in range(blocks):
        module = _Module(each)
        group = Group(f"layers.{n}/0", 0)
        group.add("weight", module.weight)
        units.append(Unit(f"layers.{n}", module, [group], repeated=True))

    def moments(per_block: int) -> tuple[Moment, ...]:
        found, level = [Moment("other", -1, 0, 0)], 0
        for unit in range(1, blocks + 1):
            found.append(Moment("enter", unit, level, level + saved))
            level += per_block
            found.append(Moment("leave", unit, level, level))
        for unit in reversed(range(1, blocks + 1)):
            found.append(Moment("enter", unit, level, level + saved))
            found.append(Moment("gradient", unit - 1, level, level + 2 * each))
            level -= per_block
            found.append(Moment("leave", unit, level, level))
        return tuple(found)

    inputs = saved // 16
    return units, Profile(
        plain=moments(saved),
        recomputed=moments(inputs),
        repeated=frozenset(range(1, blocks + 1)),
        rows=8,
        inputs=dict.fromkeys(range(1, blocks + 1), inputs),
    )


def _machine() -> Machine:
    return dataclasses.replace(MACHINE, balanced=2 * MACHINE.host_adam, slack=0.12)


def _config(**own: object) -> Config:
    return read({"bf16": {"enabled": True}, "evener": {"checkpointing": "auto", **own}})


@pytest.mark.parametrize(
    ("gpu", "host"),
    [(80, 110), (24, 64), (8, 20), (80, 3000), (200, 8)],
    ids=["an H100", "an RTX 4090", "little", "activations", "no host"],
)
def test_few_plays_of_the_step_find_it(gpu: int, host: int) -> None:
    """25.8 billion parameters in 60 blocks. A search by bisection took 5,000 plays and minutes."""
    units, profile = _model(60, 430_000_000, 100 * GB if host == 3000 else 2 * GB)
    budget = Budget(gpu * GB, host * GB)
    with mock.patch.object(profiles, "_play", side_effect=profiles._play) as play:
        made = plan_units(units, _config(), _machine(), budget, 8192, 1, profile)
        assert not made.fits
        found = nearest(units, _config(), _machine(), budget, 8192, 1, profile)
    assert play.call_count <= 700
    assert found, "it always says what would fit"


def test_each_is_the_least_that_fits() -> None:
    units, profile = _model(24, 100_000_000, GB)
    budget = Budget(8 * GB, 12 * GB)
    ways = Ways.of(units, _config(), _machine(), 8192, 1, profile)
    assert ways.best(budget) is None
    host = ways.least_host(budget)
    gpu = ways.least_gpu(budget)
    assert host is not None and gpu is not None
    for size, kind in ((host, "host"), (gpu, "gpu")):
        enough = dataclasses.replace(budget, **{kind: size})
        less = dataclasses.replace(budget, **{kind: size - 20_000_000})
        assert plan_units(units, _config(), _machine(), enough, 8192, 1, profile).fits
        assert not plan_units(units, _config(), _machine(), less, 8192, 1, profile).fits


def test_smaller_states_with_more_host_memory_are_named_where_they_are_not_enough(
    tmp_path: Path,
) -> None:
    def run(*arguments: str) -> tuple[int, list[str]]:
        given = ["70b", "--on", "h100-80gb", *arguments, "--json"]
        shown = CliRunner().invoke(plan_memory, given)
        nearest = json.loads(shown.stdout)["plan"]["nearest"]
        return shown.exit_code, [fit["option"] for fit in nearest]

    code, found = run("--host", "110GB")
    assert code == 1
    (named,) = [option for option in found if "--moments" in option]
    options = named[named.index("(") + 1 : -1].split()
    assert options[:4] == ["--moments", "int8", "--no-master", "--host"]
    assert run(*options) == (0, [])
