"""The planner in a running job: ranks agree, it tries its choice, and plans again."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from evener.comm import wires
from evener.comm.exchange import Exchange
from evener.comm.planner import choose, live
from evener.comm.planner.choose import Decision
from evener.comm.planner.costs import Costs
from evener.comm.planner.live import Planner
from evener.comm.profile import StepProfile
from evener.comm.reducer import Reducer
from evener.ddp import accelerate
from tests import worlds
from tests.comm import models
from tests.comm.scripts import heard, plain
from tests.comm.test_overlap import Script
from tests.comm.test_planner import forms, network

ALL = {"LIGHT_TOPK_THRESHOLD": "0"}  # the buckets of tests are small


def under(rank: int, size: int) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """The forms that a planner may choose, by optimizer, and what the log says of top-k."""
    found = {}
    with heard() as said:
        for kind in (torch.optim.SGD, torch.optim.AdamW):
            for how in ({"mode": "auto", "floor": "topk"}, {"mode": "topk"}):
                net = torch.nn.Linear(64, 64)
                optimizer = kind(net.parameters(), lr=0.01)
                model = accelerate(DistributedDataParallel(net), optimizer, **how)  # type: ignore[arg-type]
                planner = model.evener_steps.planner
                if planner.forced is None:
                    found[kind.__name__] = tuple(planner.forms)
                else:
                    assert planner.forms == ("exact", "topk")  # what is forced is done
    return found, [line for line in said.lines if "accuracy" in line]


def test_no_planner_takes_top_k_for_adam() -> None:
    (forms, said), (_, quiet) = worlds.run([1, 1], under)
    assert forms["SGD"] == (*wires.candidates("int4"), "topk-chunk", "topk")
    assert forms["AdamW"] == wires.candidates("int4")
    assert [line.split()[0] for line in said] == ["floor=topk:", "topk"]
    assert all("AdamW" in line for line in said) and not quiet


def planned(
    rank: int, size: int, gbits: list[float], steps: int, probe: bool
) -> tuple[list[Any], list[str], list[Decision]]:
    """Trains with a planner whose probe is fake (a network a decision) or real."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
    net.to(models.device())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = accelerate(
        DistributedDataParallel(net), optimizer, bucket_bytes=20_000, mode="auto", floor="topk"
    )
    reducer: Reducer = model.evener
    decisions: list[Decision] = []
    left = list(gbits)

    def fake(profile: StepProfile) -> Costs:
        # Buckets of a few KB on a network of a few Mb/s: VGG16's proportions.
        costs = network(left.pop(0), 2, 1, 0.001)
        exchange = {**costs.exchange, "bf16": costs.exchange["fp16"]}
        return dataclasses.replace(costs, exchange=exchange, flat=None)

    planner = Planner(
        reducer,
        overlap=True,
        measure=None if probe else fake,
        watch_every=4,
        trial_steps=0,
    )
    model.evener_steps.planner = planner
    with heard(level=logging.DEBUG) as said:
        for step in range(steps):
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad()
            model(torch.randn(4, 64).to(models.device())).square().mean().backward()
            optimizer.step()
            if planner.decision is not None and planner.decision not in decisions:
                decisions.append(planner.decision)
    model.evener_steps.finish("")
    weights = torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()
    return weights, said.lines, decisions


def test_ranks_agree_and_the_log_shows_why() -> None:
    found = worlds.run([1, 1], planned, [1e5], 6, False, env=ALL)
    slow = worlds.run([1, 1], planned, [1e-4], 6, False, env=ALL)
    for ranks in (found, slow):
        assert ranks[0][0] == ranks[1][0], "weights differ"
        assert ranks[0][2] == ranks[1][2] and len(ranks[0][2]) == 1
    assert forms(found[0][2][0]) == {"exact"}
    assert any(form.startswith("topk") for form in forms(slow[0][2][0]))
    text = "\n".join(slow[0][1])
    assert "topk" in text and "expected" in text and "probe:" in text
    assert not [line for line in slow[1][1] if line.startswith("plan:")], "rank 0 alone tells"


def test_a_network_that_drifts_is_planned_again() -> None:
    """The fake probe says nothing costs anything; the real exchanges are far from that."""
    found = worlds.run([1, 1], planned, [1e9, *[1e-4] * 5], 24, False, env=ALL)
    for weights, said, decisions in found:
        assert weights == found[0][0]
        assert len(decisions) >= 2 and forms(decisions[0]) != forms(decisions[1])
        del said
    assert any("planning again" in line for line in found[0][1])


def test_the_real_probe_on_two_levels() -> None:
    found = worlds.run([2, 2], planned, [], 6, True)
    first = found[0][2][0]
    assert all(ranks[2][0] == first for ranks in found)
    assert all(sum(choice.stages_ms) > 0 for choice in first.choices)
    assert any("GB/s" in line for line in found[0][1])


def watched(rank: int, size: int) -> tuple[list[bool], float, StepProfile]:
    """Whether buckets left before backward had ended, in each of the first steps."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = accelerate(DistributedDataParallel(net), optimizer, bucket_bytes=0, mode="auto")
    left = []
    net[0].weight.register_hook(lambda _: left.append(model.evener.arrivals.place > 0))
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    model.evener_steps.finish("")
    assert model.evener_steps.planner.forced_ms.keys() == (
        {"exact", "bf16"} if rank == 0 else set()
    )
    return left, model.evener_steps.profile.drag, model.evener_steps.profile


def test_profiled_steps_hold_their_buckets_back() -> None:
    for left, drag, profile in worlds.run([1, 1], watched):
        assert left == [True, False, False, True, True, True]
        assert 0 <= drag <= 1 and profile.compute_ms > 0
        assert StepProfile.from_json(profile.to_json()) == profile


def exact_plan(rank: int, size: int) -> bool:
    """mode="exact" changes no bit but the order of sums: one level only, so none at all."""
    results = []
    for mode in (None, "exact"):
        torch.manual_seed(3)
        script = Script(rank, False, always_all=True)
        if mode is not None:
            script.model.evener_steps.planner = Planner(script.model.evener, overlap=False)
            script.model.evener_steps._wanted = True
        plain(script)
        results.append(script.result())
    return all(models.raw(results[0][k]) == models.raw(v) for k, v in results[1].items())


def test_exact_changes_nothing() -> None:
    assert worlds.run([1, 1], exact_plan) == [True, True]
    assert live.DRIFT > 1


def forced(rank: int, size: int, form: str) -> tuple[list[Any], bytes, list[str]]:
    """The decision, and the weights, which are those of a training without a planner."""
    weights = []
    for plans in (True, False):
        torch.manual_seed(3)
        layers = [torch.nn.Linear(64, 64) for _ in range(6)]
        net = torch.nn.Sequential(*layers, torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        model = accelerate(DistributedDataParallel(net), optimizer, bucket_bytes=0, mode=form)
        planner, reducer = model.evener_steps.planner, model.evener
        assert planner.forced == form
        if not plans:
            model.evener_steps.planner = None
        torch.manual_seed(rank)  # once: what a probe draws would shift all that comes after
        with heard() as said:
            for _ in range(8):
                optimizer.zero_grad()
                model(torch.randn(4, 64)).square().mean().backward()
                optimizer.step()
        model.evener_steps.finish("")
        weights.append(models.raw(torch.cat([p.detach().flatten() for p in net.parameters()])))
        if plans:
            made, lines = planner.decision, said.lines
            assert reducer.sequence == made.sequence
            sent = [exchange.wire.name for exchange in reducer.exchanges]
            assert sent == [choice.form for choice in made.choices] and form in sent
            if rank == 0:
                profile = model.evener_steps.profile
                assert made == choose.choose(
                    profile,
                    planner.costs,
                    [form],
                    overlap=True,
                    algorithm="2d",
                    allowed=reducer.assignment.permitted,
                )
        reducer.close()
    assert weights[0] == weights[1]
    return [made], weights[0], [line for line in lines if line.startswith("plan:")]


@pytest.mark.parametrize("form", ["fp16", "int8"])
def test_a_forced_form_leaves_in_the_planners_order(form: str) -> None:
    first, second = worlds.run([1, 1], forced, form, env={"EVENER_TRIAL_STEPS": "0"})
    assert first[:2] == second[:2]
    order = " ".join(map(str, first[0][0].sequence))
    said = f"plan: the form is fixed, {form} was asked for; buckets leave in the order {order}:"
    assert [line.startswith(said) for line in first[2]].count(True) == 1
    assert not second[2], "rank 0 alone tells"


def warms_up(rank: int, size: int) -> list[bool]:
    """While top-k sends more than it will, exchanges that take longer are no other network."""
    net = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = accelerate(
        DistributedDataParallel(net), optimizer, mode="topk", warmup_steps=8, ratio=0.01
    )
    planner, began = model.evener_steps.planner, []
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        began.append(planner._steps > 0)
    assert planner.decision is not None
    return began


def test_a_warm_up_is_not_another_network() -> None:
    for began in worlds.run([1, 1], warms_up, env={**ALL, "EVENER_TRIAL_STEPS": "0"}):
        assert began == [False] * 8 + [True] * 4


def tried(
    rank: int, size: int, clips: bool, mode: str, slow: str
) -> tuple[bytes, list[str], dict[str, Any]]:
    """Trains while its ways are tried; those whose name begins as `slow` sleep in each exchange."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = accelerate(
        DistributedDataParallel(net), optimizer, bucket_bytes=20_000, mode=mode, **FLOORS[mode]
    )
    reducer, planner, overlap = model.evener, model.evener_steps.planner, model.evener_steps.overlap
    run = Exchange.run

    def late(exchange: Exchange, shard: torch.Tensor, *more: Any) -> None:
        window = None if planner._trial is None else planner._trial.window
        if window is not None and planner._trial.ways[window.way].name.startswith(slow):
            time.sleep(0.004)
        run(exchange, shard, *more)

    Exchange.run = late  # type: ignore[method-assign]
    try:
        with heard() as said:
            for step in range(400):
                if planner.kept is not None:
                    break
                torch.manual_seed(10 * step + rank)
                optimizer.zero_grad()
                model(torch.randn(4, 64)).square().mean().backward()
                if clips:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    finally:
        Exchange.run = run  # type: ignore[method-assign]
    model.evener_steps.finish("")
    assert planner.kept is not None, "the trial has ended"
    found = {
        "kept": planner.kept.name,
        "ways": sorted(planner.tried),
        "overlaps": overlap.wanted,
        "forms": [exchange.wire.name for exchange in reducer.exchanges],
        "expected": planner.decision.step_ms == planner.tried[planner.kept.name][1],
        "own": planner.own_ms is not None,
        "looked": planner.looked_at,
    }
    weights = models.raw(torch.cat([p.detach().flatten() for p in net.parameters()]))
    reducer.close()
    return weights, said.lines, found


FLOORS: dict[str, dict[str, str]] = {"exact": {}, "auto": {"floor": "int8"}}


def test_what_is_slower_is_not_kept() -> None:
    """The planner's own ways sleep: DDP's own stays, or torch's hook's, on all ranks alike."""
    ranks = worlds.run([1, 1], tried, False, "auto", "planned")
    (weights, said, found), (others, quiet, same) = ranks
    assert weights == others and found == same
    assert not found["kept"].startswith("planned") and found["expected"] and found["own"]
    assert len(found["ways"]) >= 3
    told = [line for line in said if line.startswith("plan: kept")]
    assert len(told) == 1 and found["kept"] in told[0] and "tried: " in told[0]
    assert not [line for line in quiet if line.startswith("plan:")]


def test_clipping_is_planned_for() -> None:
    """Nothing outlasts the step, nothing is expected to, and the log says what looks."""
    (weights, said, found), (others, _, same) = worlds.run([1, 1], tried, True, "exact", "none")
    assert weights == others and found["kept"] == same["kept"]
    assert "clip_grad" in found["looked"] and not found["overlaps"]
    assert set(found["forms"]) == {"exact"}
    assert not [line for line in said if "is interrupted" in line]
    assert any("plan: no overlap across the step" in line for line in said)


def trials_change_nothing(rank: int, size: int) -> list[bytes]:
    """With exact forms alone: the same bits whichever way is taken when."""
    weights = []
    taken = 400  # on a busy machine a trial takes more turns
    for trial_steps in (2, 0):
        torch.manual_seed(1)
        net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        model = accelerate(DistributedDataParallel(net), optimizer, bucket_bytes=20_000)
        planner = Planner(model.evener, overlap=True, trial_steps=trial_steps)
        model.evener_steps.planner, model.evener_steps._wanted = planner, True
        for step in range(taken):
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad()
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            if planner.kept is not None and step >= 60:
                taken = step + 1
                break
        model.evener_steps.finish("")
        assert (planner.kept is not None) == bool(trial_steps)
        weights.append(models.raw(torch.cat([p.detach().flatten() for p in net.parameters()])))
        model.evener.close()
    return weights


def test_a_trial_of_exact_ways_changes_no_bit() -> None:
    (tried_one, plain_one), (tried_two, plain_two) = worlds.run([1, 1], trials_change_nothing)
    assert plain_one == tried_one == plain_two == tried_two


def forced_and_tried(rank: int, size: int) -> tuple[str, list[str], bool, set[str]]:
    """A forced form stays; whether steps outlast themselves is tried."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = accelerate(DistributedDataParallel(net), optimizer, mode="fp16", bucket_bytes=20_000)
    planner, overlap = model.evener_steps.planner, model.evener_steps.overlap
    forms: set[str] = set()
    for _ in range(400):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        if planner.decision is not None:
            forms |= {exchange.wire.name for exchange in model.evener.exchanges}
        if planner.kept is not None:
            break
    model.evener_steps.finish("")
    return planner.kept.name, sorted(planner.tried), overlap.wanted, forms


def test_a_forced_form_is_tried_without_overlap_too() -> None:
    (kept, ways, wanted, sent), other = worlds.run([1, 1], forced_and_tried)
    assert (kept, ways, wanted, sent) == other
    assert ways == ["planned", "without overlap"] and sent == {"fp16"}
    assert wanted == (kept == "planned")


def in_one_node(rank: int, size: int) -> bool:
    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = accelerate(DistributedDataParallel(net), optimizer, mode="fp16")
    return model.evener_steps.planner is None


def test_nothing_is_probed_where_nothing_crosses() -> None:
    assert worlds.run([2], in_one_node) == [True, True]
