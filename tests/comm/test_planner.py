"""The planner: the step in virtual time, and choices that follow the probe and the model."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from evener.comm import steps, wires
from evener.comm.exchange import Exchange
from evener.comm.planner import choose, live
from evener.comm.planner.choose import Decision
from evener.comm.planner.costs import Costs, Curve, Link, of_network
from evener.comm.planner.live import Planner
from evener.comm.planner.sequence import best_sequence, first_sequence
from evener.comm.planner.simulate import play
from evener.comm.profile import BucketProfile, Recorder, StepProfile
from evener.comm.reducer import Reducer
from evener.ddp import accelerate
from evener.errors import UsageError
from tests import worlds
from tests.comm import models
from tests.comm.scripts import heard, plain
from tests.comm.test_overlap import Script

MB = 1 << 20
FORWARD, BACKWARD = 30.0, 60.0


def step_of(sizes: list[float], rest: float = 0.0) -> StepProfile:
    """Buckets of so many MB, evenly over backward, needed in the opposite order."""
    n = len(sizes)
    return StepProfile(
        FORWARD,
        BACKWARD,
        rest,
        tuple(
            BucketProfile(
                f"p{i}",
                int(size * MB) // 4,
                4,
                BACKWARD * (i + 1) / n,
                FORWARD * (n - 1 - i) / n,
            )
            for i, size in enumerate(sizes)
        ),
    )


# VGG16 as one H200 computes it in TF32 at batch 128, in parts of 32 MiB
# (benchmarks/results/vgg16-2x1-25gbit.json): nine tenths of all bytes are there at once, and are
# needed last.
_MIB = [15.6, 32.0, 32.0, 0.02, *[30.2] * 13, 18.0, 18.0, 15.8, 3.4, 1.0]
_READY = [*[0.2] * 3, *[0.5] * 14, 3.0, 8.5, 21.1, 29.0, 61.2]
_NEED = [*[27.9] * 3, *[27.7] * 14, 26.6, 24.5, 19.6, 16.1, 0.0]
VGG16 = StepProfile(
    28.0,
    61.7,
    0.5,
    tuple(
        BucketProfile(f"p{i}", int(size * MB) // 4, 4, ready, need)
        for i, (size, ready, need) in enumerate(zip(_MIB, _READY, _NEED, strict=True))
    ),
)
# Probed there over 25 Gb/s, in the same run.
VGG16_COSTS = Costs(
    2,
    1,
    Curve(()),
    Curve(()),
    {
        "exact": Curve(((1 << 16, 0.09), (1 << 20, 0.41), (16 << 20, 6.32), (32 << 20, 11.87))),
        "fp16": Curve(((1 << 16, 0.35), (1 << 20, 0.56), (16 << 20, 3.0), (32 << 20, 5.97))),
    },
)
VGG = step_of([64.0, 392.0, 20.0, 25.0, 20.0, 8.0])
RESNET = step_of([25.0, 25.0, 25.0, 22.0])


def down_to(floor: str) -> tuple[str, ...]:
    return wires.candidates(floor)


EXACT = down_to("exact")


def network(gbit: float, nodes: int = 2, per_node: int = 2, latency_us: float = 20) -> Costs:
    return of_network(
        nodes,
        per_node,
        Link.of_rate(gbit * 1e9, latency_us),
        Link(0.005, 150e6),
        wires.papers(),
        3e9,
    )


def test_nothing_to_send_is_compute_alone() -> None:
    played = play(VGG, [(0.0, 0.0, 0.0)] * 6, range(6), overlap=False)
    assert played.step_ms == pytest.approx(VGG.compute_ms)
    assert played.exposed_ms == pytest.approx(0)


def test_a_step_by_hand() -> None:
    """Two buckets, ready at 30 and 60 ms of backward; the exchange takes 40 and 50 ms."""
    profile = step_of([1.0, 1.0], rest=5.0)
    stages = [(0.0, 40.0, 0.0), (0.0, 50.0, 0.0)]
    # 30 forward; the first lands at 70, the second at 120 of backward; then 5 of rest.
    assert play(profile, stages, (0, 1), overlap=False).step_ms == pytest.approx(30 + 120 + 5)
    # Forward needs bucket 1 at once, 15 ms later bucket 0; the next backward needs both, and is 65
    # after this one's start at the earliest. Bucket 1 lands at 120, forward ends 30 later.
    assert play(profile, stages, (0, 1), overlap=True).step_ms == pytest.approx(120 + 30)


def test_an_exchange_slows_computing_down() -> None:
    """A quarter of computing is lost while an exchange is under way."""
    profile = dataclasses.replace(step_of([1.0, 1.0]), drag=0.25)
    stages = [(0.0, 20.0, 0.0), (0.0, 10.0, 0.0)]
    # 30 forward; the first is ready after 30 of backward, and for 20 ms only 15 are computed: the
    # second is ready at 30 + 20 + 15, and lands 10 later.
    assert play(profile, stages, (0, 1), overlap=False).step_ms == pytest.approx(30 + 75)
    # The second takes a quarter of 10 ms of the next forward, which needs the other one there.
    early = (
        dataclasses.replace(profile.buckets[0], need_ms=0.0),
        dataclasses.replace(profile.buckets[1], need_ms=30.0),
    )
    profile = dataclasses.replace(profile, buckets=early)
    assert play(profile, stages, (0, 1), overlap=True).step_ms == pytest.approx(32.5 + 65)
    # A form that encodes for half of its exchange takes that, and a quarter of the rest.
    assert play(profile, stages, (0, 1), True, [0.625, 0.0]).step_ms == pytest.approx(30 + 72.5)
    costs = dataclasses.replace(network(25), encode={"int8": Curve.line(0.0, 1.0)})
    assert costs.loss("exact", MB, 0.25) == 0.25 and costs.loss("int8", MB, 0.25) == 1.0


def test_what_slows_computing_down_is_compressed_more() -> None:
    """Hidden or not, a longer exchange costs more of the computing beside it."""
    free = choose.choose(VGG, network(50), down_to("int8"), overlap=True)
    held = dataclasses.replace(VGG, drag=0.2)
    slowed = choose.choose(held, network(50), down_to("int8"), overlap=True)
    assert free.hidden and not slowed.hidden
    busy = [sum(max(c.stages_ms) for c in made.choices) for made in (free, slowed)]
    assert busy[1] < 0.8 * busy[0]
    forced = choose.choose(held, network(50), ["int8"], overlap=True)
    assert slowed.step_ms <= 1.03 * forced.step_ms


def test_lanes_are_pipelined() -> None:
    profile = dataclasses.replace(step_of([1.0] * 3), backward_ms=0.0)
    buckets = tuple(dataclasses.replace(b, ready_ms=0.0) for b in profile.buckets)
    profile = dataclasses.replace(profile, backward_ms=0.0, buckets=buckets)
    played = play(profile, [(10.0, 20.0, 10.0)] * 3, range(3), overlap=False)
    assert played.landed_ms == pytest.approx((40.0, 60.0, 80.0))


def test_overlap_never_makes_a_step_longer_and_hides_up_to_forward() -> None:
    for gbit in (1, 5, 10, 25, 100):
        without = choose.choose(VGG, network(gbit), EXACT)
        overlapped = choose.choose(VGG, network(gbit), EXACT, overlap=True)
        assert overlapped.step_ms <= without.step_ms + 1e-6
        assert without.step_ms - overlapped.step_ms <= FORWARD + 1e-6
    assert choose.choose(VGG, network(25), EXACT).step_ms > VGG.compute_ms * 1.5


def test_a_large_bucket_does_not_keep_small_ones_waiting() -> None:
    """VGG16 in small buckets: the order that is found comes close to what the network can do."""
    sizes = [16.0, 64.0, 392.0, *[8.0] * 7]
    profile = step_of(sizes)
    buckets = tuple(
        dataclasses.replace(b, ready_ms=0.3 if i < 3 else 6.0 * (i - 2), need_ms=3.0 * (9 - i))
        for i, b in enumerate(profile.buckets)
    )
    profile = dataclasses.replace(profile, buckets=buckets)
    stages = [network(25).stages("2d", "exact", b.bytes) for b in buckets]
    found = play(profile, stages, best_sequence(profile, stages, True), True).step_ms
    listed = play(profile, stages, first_sequence(profile, stages, True), True).step_ms
    busy = sum(stage[1] for stage in stages)
    assert busy <= found <= listed and found < 1.06 * busy


@pytest.mark.parametrize("thought", [1.0, 1.6, 0.7])
def test_a_network_that_is_faster_than_thought_does_not_idle(thought: float) -> None:
    """Ranks keep to the order: one that waits for what is not complete yet would cost the wait."""
    sizes = [16.0, *[32.0] * 15, 18.0, 18.0, 16.0, 3.5, 1.0]
    profile = step_of(sizes)
    late = [0.0] * 16 + [8.5, 15.0, 21.0, 30.0, 59.0]
    buckets = tuple(
        dataclasses.replace(b, ready_ms=ready, need_ms=FORWARD - ready / 2)
        for b, ready in zip(profile.buckets, late, strict=True)
    )
    profile = dataclasses.replace(profile, buckets=buckets)
    stages = [network(25, 2, 1).stages("2d", "fp16", b.bytes) for b in buckets]
    guessed = [(a * thought, b * thought, c * thought) for a, b, c in stages]
    busy = sum(stage[1] for stage in stages)
    assert busy > profile.compute_ms
    found = play(profile, stages, best_sequence(profile, guessed, True), True).step_ms
    assert found < 1.01 * busy


def held(exchange: Curve, k: float = 1.0) -> StepProfile:
    """VGG16's step, its buckets held back: exchanges that took `k` times what they do."""
    buckets = tuple(
        dataclasses.replace(b, stages_ms=(0.0, k * exchange(b.bytes), 0.0)) for b in VGG16.buckets
    )
    return dataclasses.replace(VGG16, buckets=buckets)


@pytest.mark.parametrize(("drag", "crowd"), [(0.0, 1.0), (0.1, 1.0), (0.2, 1.12)])
def test_vgg16_in_a_forced_form(drag: float, crowd: float) -> None:
    """Two steps with nothing beside them, as exact ones are ordered, know neither figure.

    Then their order is as good only where both are nothing: over the staged transport.
    """
    costs = VGG16_COSTS
    profile = dataclasses.replace(VGG16, drag=drag, crowd=crowd)
    made = choose.choose(profile, costs, ["fp16"], overlap=True, algorithm="2d")
    stages, losses = [c.stages_ms for c in made.choices], [c.loss for c in made.choices]
    old = steps._order(held(costs.exchange["fp16"]))
    before = play(profile, stages, old, True, losses).step_ms
    assert made.step_ms <= before + 1e-6
    assert (made.step_ms < 0.99 * before) == (drag > 0), (made.step_ms, before)
    assert made.step_ms < 0.85 * live.as_complete(profile, made)


@pytest.mark.parametrize("k", [0.5, 0.8, 1.0, 1.2, 1.5])
def test_vgg16_exact_needs_no_probe_for_its_order(k: float) -> None:
    made = choose.choose(VGG16, VGG16_COSTS, EXACT, overlap=True)
    stages = [choice.stages_ms for choice in made.choices]
    old = steps._order(held(VGG16_COSTS.exchange["exact"], k))
    assert play(VGG16, stages, old, True).step_ms == pytest.approx(made.step_ms, rel=1e-3)
    assert made.step_ms < 0.9 * live.as_complete(VGG16, made)


def forms(made: Decision) -> set[str]:
    return {choice.form for choice in made.choices}


def test_the_network_changes_the_choice() -> None:
    chosen = {gbit: choose.choose(VGG, network(gbit), down_to("topk")) for gbit in (1, 10, 25, 400)}
    assert forms(chosen[400]) == {"exact"} and chosen[400].hidden
    assert {"fp16", "bf16"} & (forms(chosen[25]) | forms(chosen[10]))
    assert any(form.startswith("topk") for form in forms(chosen[1]))
    sent = {
        gbit: sum(max(choice.stages_ms) * gbit for choice in made.choices)
        for gbit, made in chosen.items()
    }
    assert sent[1] < sent[10] < sent[25] <= sent[400], "a slower network must send less"


def test_the_model_changes_the_choice() -> None:
    vgg = choose.choose(VGG, network(25), down_to("int8"))
    resnet = choose.choose(RESNET, network(25), down_to("int8"))
    assert forms(vgg) != forms(resnet)
    assert sum(c.form == "exact" for c in resnet.choices) > sum(
        c.form == "exact" for c in vgg.choices
    )


def test_the_mildest_that_hides_is_taken_and_the_floor_holds() -> None:
    free = choose.choose(VGG, network(25), down_to("topk"), overlap=True)
    assert free.hidden and free.step_ms < free.exact_ms
    for bucket, choice in enumerate(free.choices):
        if choice.form == "exact":
            continue
        tried = down_to("topk")
        milder = tried[tried.index(choice.form) - 1]
        size = VGG.buckets[bucket].bytes
        stages = [c.stages_ms for c in free.choices]
        stages[bucket] = network(25).stages("2d", milder, size)
        losses = [c.loss for c in free.choices]
        losses[bucket] = network(25).loss(milder, size, VGG.drag)
        slower = play(VGG, stages, free.sequence, True, losses).step_ms
        assert slower > free.step_ms, f"bucket {bucket} need not be {choice.form}"
    floored = choose.choose(VGG, network(1), down_to("fp16"))
    assert forms(floored) <= {"exact", "fp16"} and not floored.hidden
    assert forms(choose.choose(VGG, network(1), EXACT)) == {"exact"}
    forced = choose.choose(VGG, network(400), ["fp16"])
    assert forms(forced) == {"fp16"}
    small = choose.choose(VGG, network(1), down_to("topk"), allowed=lambda b, _: b < 5)
    assert [c.form for c in small.choices][-1] == "exact"


def test_exchanges_that_are_crowded_are_compressed_more() -> None:
    crowded = dataclasses.replace(VGG, crowd=1.5)
    made = [choose.choose(p, network(40), down_to("int8"), overlap=True) for p in (VGG, crowded)]
    milder = [sum(c.form == "exact" for c in m.choices) for m in made]
    assert milder[0] > milder[1]
    forced = [choose.choose(p, network(10), ["fp16"], overlap=True).step_ms for p in (VGG, crowded)]
    assert forced[1] > 1.3 * forced[0]


def test_small_buckets_go_flat_where_hops_cost_more_than_bytes() -> None:
    slow_inside = of_network(2, 2, Link.of_rate(100e9, 1), Link(5.0, 150e6), wires.papers(), 3e9)
    slow_inside = dataclasses.replace(slow_inside, flat=Curve.line(1.0, 1 / 12e6))
    made = choose.choose(RESNET, slow_inside, EXACT)
    assert {c.algorithm for c in made.choices} == {"flat"}
    assert {c.algorithm for c in choose.choose(VGG, network(25, 4), EXACT).choices} == {"2d"}
    forced = choose.choose(RESNET, slow_inside, EXACT, algorithm="2d")
    assert {c.algorithm for c in forced.choices} == {"2d"}


def test_curves_are_straight_between_points_and_beyond() -> None:
    curve = Curve(((10.0, 2.0), (20.0, 3.0), (40.0, 9.0)))
    assert [curve(x) for x in (0, 15, 30, 60)] == pytest.approx([0, 2.5, 6, 15])
    assert curve(1) == pytest.approx(1.1)
    assert Curve(((10.0, 2.0),))(20) == 4
    assert Curve.line(1.0, 0.5)(10) == pytest.approx(6)
    assert Curve(((10.0, 3.0), (20.0, 2.0)))(30) == 3, "noise must not make a larger one cheaper"
    assert Curve(((10.0, 1.0), (20.0, 9.0)))(5) == 0.5, "nor a small one free"


def test_exchanges_that_are_under_way_together_pass_one_after_the_other() -> None:
    recorder = Recorder(torch.device("cpu"))
    recorder.marks = {"begin": 1.0, "forward_ended": 1.01, "backward_ended": 1.05}
    # Seconds: three streams; the second waits for the first, the third comes late.
    recorder.ready = {0: 1.01, 1: 1.01, 2: 1.03}
    recorder.stages = {(0, 1): (1.01, 1.02), (1, 1): (1.01, 1.028), (2, 1): (1.03, 1.06)}
    took = recorder.occupied(1)
    assert [took[b] for b in range(3)] == pytest.approx([10, 8, 30])
    assert recorder.occupied(0) == {}
    # Of 40 ms backward 18 + 20 were beside an exchange, and 9.5 more than it takes alone.
    assert recorder.drag(30.5) == pytest.approx(9.5 / 38)
    # The second took 8 ms beside backward and 5 alone; the third ended behind it.
    alone = Recorder(torch.device("cpu"))
    alone.ready, alone.marks = recorder.ready, recorder.marks
    alone.stages = {(0, 1): (2.0, 2.02), (1, 1): (2.0, 2.025), (2, 1): (2.0, 2.05)}
    assert recorder.crowd(alone) == pytest.approx(1.6)
    assert alone.crowd(recorder) == 1.0


def test_one_slow_exchange_does_not_crowd_the_others() -> None:
    def steps_of(times: list[float]) -> Recorder:
        recorder = Recorder(torch.device("cpu"))
        recorder.marks = {"begin": 0.0, "forward_ended": 0.0, "backward_ended": 9.0}
        ends = itertools.accumulate(times)
        recorder.stages = {
            (b, 1): (end - took, end) for b, (end, took) in enumerate(zip(ends, times, strict=True))
        }
        recorder.ready = dict.fromkeys(range(len(times)), 0.0)
        return recorder

    alone = steps_of([1.0, 1.0, 1.0, 1.0, 0.2, 0.2])
    assert steps_of([1.0, 1.0, 2.5, 1.0, 0.2, 0.2]).crowd(alone) == pytest.approx(1.0)
    assert steps_of([1.0, 1.3, 1.3, 1.3, 0.2, 0.2]).crowd(alone) == pytest.approx(1.3)


def test_the_order_does_not_follow_a_wait_for_peers() -> None:
    """The first bucket's own time holds it; what its bytes take at the others' rate counts."""
    sizes = [16.0, 32.0, 32.0, 32.0, 1.0]
    times = [21.0, 12.0, 12.0, 12.0, 0.5]
    profile = step_of(sizes)
    buckets = tuple(
        dataclasses.replace(b, stages_ms=(0.0, t, 0.0))
        for b, t in zip(profile.buckets, times, strict=True)
    )
    evened = steps._evened(dataclasses.replace(profile, buckets=buckets), 1)
    assert evened == pytest.approx([6.0, 12.0, 12.0, 12.0, 0.5])
    assert steps._evened(profile, 1) == [0.0] * 5


def test_profiles_are_kept_in_files(tmp_path: Path) -> None:
    VGG.save(tmp_path / "p.json")
    assert StepProfile.load(tmp_path / "p.json") == VGG
    assert VGG.scaled(45.0).compute_ms == pytest.approx(45)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UsageError, match="not a step's profile"):
        StepProfile.load(tmp_path / "bad.json")
    with pytest.raises(UsageError, match="missing"):
        StepProfile.load(tmp_path / "missing.json")


# --- in a running job ---


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
    with heard() as said:
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
        {"exact", "fp16"} if rank == 0 else set()
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
                    allowed=reducer.permitted,
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
        # The eighth ends in the ninth forward, which begins before that.
        assert began == [False] * 9 + [True] * 3


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

    def late(exchange: Exchange, shard: torch.Tensor, step: Any) -> None:
        window = None if planner._trial is None else planner._trial.window
        if window is not None and planner._trial.ways[window.way].name.startswith(slow):
            time.sleep(0.004)
        run(exchange, shard, step)

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
    for trial_steps in (0, 2):
        torch.manual_seed(1)
        net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        model = accelerate(DistributedDataParallel(net), optimizer, bucket_bytes=20_000)
        planner = Planner(model.evener, overlap=True, trial_steps=trial_steps)
        model.evener_steps.planner, model.evener_steps._wanted = planner, True
        for step in range(60):
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad()
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
        model.evener_steps.finish("")
        assert (planner.kept is not None) == bool(trial_steps)
        weights.append(models.raw(torch.cat([p.detach().flatten() for p in net.parameters()])))
        model.evener.close()
    return weights


def test_a_trial_of_exact_ways_changes_no_bit() -> None:
    (plain_one, tried_one), (plain_two, tried_two) = worlds.run([1, 1], trials_change_nothing)
    assert plain_one == tried_one == plain_two == tried_two


def forced_and_tried(rank: int, size: int) -> tuple[str, list[str], bool, set[str]]:
    """A forced form stays; whether steps outlast themselves is tried."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = accelerate(DistributedDataParallel(net), optimizer, mode="fp16", bucket_bytes=20_000)
    planner, overlap = model.evener_steps.planner, model.evener_steps.overlap
    forms: set[str] = set()
    for _ in range(60):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
        if planner.decision is not None:
            forms |= {exchange.wire.name for exchange in model.evener.exchanges}
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
