"""The planner: the step in virtual time, and choices that follow the probe and the model."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from evener.comm import steps, wires
from evener.comm.groups import Communicators
from evener.comm.planner import choose, report
from evener.comm.planner.choose import Decision
from evener.comm.planner.costs import Costs, Curve, Link, of_network
from evener.comm.planner.probe import Probe
from evener.comm.planner.sequence import best_sequence, first_sequence
from evener.comm.planner.simulate import play
from evener.comm.profile import BucketProfile, Recorder, StepProfile
from evener.errors import UsageError

MB = 1 << 20
FORWARD, BACKWARD = 30.0, 60.0


def step_of(sizes: list[float], rest: float = 0.0) -> StepProfile:
    """Buckets of this many MB, evenly over backward, needed in the opposite order."""
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
    assert made.step_ms < 0.85 * report.as_complete(profile, made)


@pytest.mark.parametrize("k", [0.5, 0.8, 1.0, 1.2, 1.5])
def test_vgg16_exact_needs_no_probe_for_its_order(k: float) -> None:
    made = choose.choose(VGG16, VGG16_COSTS, EXACT, overlap=True)
    stages = [choice.stages_ms for choice in made.choices]
    old = steps._order(held(VGG16_COSTS.exchange["exact"], k))
    assert play(VGG16, stages, old, True).step_ms == pytest.approx(made.step_ms, rel=1e-3)
    assert made.step_ms < 0.9 * report.as_complete(VGG16, made)


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
    assert forms(floored) <= {"exact", "bf16"} and not floored.hidden
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


def test_no_wait_for_the_network_is_taken_for_computing() -> None:
    """transformers' Trainer: marks that come late, because something waited between them."""
    recorder = Recorder(torch.device("cpu"))
    recorder.marks = {
        "begin": 1.0, "forward_ended": 1.02, "backward_ended": 1.10, "landed": 1.12, "end": 1.22,
    }  # fmt: skip
    recorder.ready = {0: 1.04, 1: 1.06}
    # Seconds; 30 of 40 ms are within backward's marks, and 50 of 60 behind `landed`.
    recorder.stages = {(0, 1): (1.07, 1.11), (1, 1): (1.11, 1.17), (1, 2): (1.165, 1.17)}
    found = recorder.profile([("a", 4, 4, False), ("b", 4, 4, False)])
    parts = (found.forward_ms, found.backward_ms, found.rest_ms)
    assert parts == pytest.approx((20.0, 50.0, 50.0))
    # The usual case: exchanges lie between backward and `landed`, and nothing is taken away.
    recorder.stages = {(0, 1): (1.10, 1.11), (1, 1): (1.11, 1.12)}
    found = recorder.profile([("a", 4, 4, False), ("b", 4, 4, False)])
    assert found.compute_ms == pytest.approx(20.0 + 80.0 + 100.0)


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


@pytest.mark.parametrize(("gbit", "once"), [(1, 1), (10, 1), (400, 0)])
def test_long_calls_of_a_probe_are_timed_once(gbit: float, once: int) -> None:
    """And which they are follows from what all ranks were told: they make the same calls."""
    asked = []

    class Calls(Probe):
        def _time(self, size: int, operation: Any, lanes: Any, times: int = 2) -> float:
            asked.append((size, times))
            return size / (gbit * 125e3)

    found = Calls(cast(Communicators, SimpleNamespace(device=torch.device("cpu"))))._curve(
        (1 << 16, 64 << 20), lambda _: None
    )
    assert [size for size, _ in asked] == [int(size) for size, _ in found.points]
    assert [times for _, times in asked] == [2] * (len(asked) - once) + [1] * once
    assert asked[0][1] == 2
