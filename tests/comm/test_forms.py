"""What a form says of itself, who reads it, and what is done where a form does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from evener.comm import forms, guard, wires
from evener.comm.buckets import Bucket, Slot
from evener.comm.options import Options
from evener.comm.planner import choose
from evener.comm.planner.costs import Link, of_network
from evener.comm.profile import BucketProfile, StepProfile
from evener.comm.reducer import Reducer
from evener.ddp import accelerate
from evener.errors import UsageError
from tests import worlds
from tests.comm import models

NAMES = wires.names()


def test_what_is_read_without_torch_is_what_the_classes_say() -> None:
    assert forms.names() == NAMES
    for said in forms.listed():
        form = wires.get(said.name)
        assert (said.title, said.what, said.place) == (form.title, form.what, form.place)
        assert (said.first_update, said.late) == (form.first_update, form.late)


def test_places_tell_all_forms_apart() -> None:
    places = [wires.get(name).place for name in NAMES]
    assert places == sorted(set(places)) and NAMES[0] == "exact"


@pytest.mark.parametrize("name", NAMES)
def test_every_form_is_complete(name: str) -> None:
    form = wires.get(name)
    assert wires.ladder(name)[0] == "exact" and wires.ladder(name)[-1] == name
    assert form.paper(0.01).name == name and form.paper(0.01).payload(4 << 20) > 0
    assert wires.get(form.rows_as).rows_as == form.rows_as, "which sends rows by itself"
    assert not form.late or form.strict is not None, "late forms have limits for Adam"
    assert form.limits.residual == float("inf") or form.feedback
    found = wires.candidates(name)
    last = form.milder if form.overflows else name
    assert found[0] == "exact" and found[-1] == last
    assert set(found) <= set(NAMES[: NAMES.index(last) + 1])
    assert not any(wires.get(one).overflows for one in found)


def test_what_a_floor_allows() -> None:
    assert wires.candidates("fp16") == wires.candidates("bf16") == ("exact", "bf16")
    assert wires.candidates("int8") == ("exact", "bf16", "int8"), "of two as small the wider range"
    assert wires.candidates("topk")[-2:] == ("topk-chunk", "topk")
    assert "topk" not in wires.candidates("topk-chunk")


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    for wrong, near in (("in8", "int8"), ("TOPK", "topk"), ("top-k-chunk", "topk-chunk")):
        with pytest.raises(UsageError) as refused:
            forms.require(wrong, "EVENER_FLOOR")
        assert f"EVENER_FLOOR={wrong!r}" in refused.value.problem
        assert f"did you mean {near!r}?" in str(refused.value.fix)
    assert forms.require("auto", "mode", besides=("auto",)) == "auto"
    with pytest.raises(UsageError) as refused:
        forms.require(7, "mode")
    assert "did you mean" not in str(refused.value.fix)
    with pytest.raises(UsageError, match="no form 'fp15'"):
        wires.get("fp15")
    with pytest.raises(UsageError, match="wire='in8'"):
        Options.resolve(env={}, wire="in8")


# --- range ---


def bucket(dtype: torch.dtype, dense: bool = False, by_rows: bool = False) -> Bucket:
    slots = (Slot(0, 0, 64),)
    return Bucket(0, torch.zeros(64, dtype=dtype), slots, dense, (0,), by_rows=by_rows)


def test_a_cast_that_makes_nothing_smaller_is_not_made() -> None:
    for name in ("fp16", "bf16"):
        for dtype in (torch.float16, torch.bfloat16):
            assert wires.suitable(name, bucket(dtype)) == "exact"
        for dtype in (torch.float32, torch.float64):
            assert wires.suitable(name, bucket(dtype)) == name
    assert wires.suitable("int8", bucket(torch.bfloat16)) == "int8"
    assert wires.suitable("topk", bucket(torch.float32, by_rows=True)) == "exact"
    assert wires.suitable("int8", bucket(torch.float32, by_rows=True)) == "int8"


def test_costs_count_entries_not_bytes() -> None:
    """FP16 makes 16-bit gradients no smaller, and INT8 halves them, not to a quarter."""
    costs = of_network(2, 1, Link.of_rate(1e9, 0), Link(0, 1e9), wires.papers(), 1e12)

    def ms(form: str, itemsize: int) -> float:
        return costs.stages("2d", form, 1000 * itemsize << 10, itemsize)[1]

    assert ms("fp16", 2) == pytest.approx(ms("exact", 2), rel=0.01)
    assert ms("int8", 2) == pytest.approx(ms("int8", 4), rel=0.01)
    assert ms("exact", 2) == pytest.approx(ms("exact", 4) / 2, rel=0.01)
    profile = StepProfile(1.0, 2.0, 0.0, (BucketProfile("p", 1 << 24, 2, 1.0, 0.0),))
    made = choose.choose(profile, costs, wires.candidates("fp16"))
    assert made.step_ms == pytest.approx(made.exact_ms, rel=0.01), "nothing is to be won"


def small_gradients(rank: int, size: int, form: str, dtype: str) -> list[str]:
    """One parameter's gradients are 1e-9, another's 1, in one bucket; forms after every step."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    reducer = Reducer(
        model.to(getattr(torch, dtype)).named_parameters(),
        Options(wire=form, guard_steps=3, topk_min_bytes=0),
    )
    found = []
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        model.zero_grad()
        sizes = (1e-9, 1e-9, 1.0, 1.0)
        sum(
            (p * torch.randn_like(p)).sum() * s
            for p, s in zip(model.parameters(), sizes, strict=True)
        ).backward()  # type: ignore[union-attr]
        reducer.flush()
        reducer.apply()
        found.append(next(e.wire.name for e in reducer.exchanges if "0.weight" in e.names))
    assert models.same_on_all_ranks(model)
    gradient = model[0].weight.grad
    assert isinstance(gradient, torch.Tensor) and (gradient != 0).any()
    reducer.close()
    return found


@pytest.mark.parametrize("form", ["fp16", "bf16"])
def test_the_guard_sees_gradients_that_vanish(form: str) -> None:
    for found in worlds.run([1, 1], small_gradients, form, "float32"):
        after = "bf16" if form == "fp16" else form
        assert found == [form, form, after, after]
    for found in worlds.run([1, 1], small_gradients, form, "bfloat16"):
        assert found == ["exact"] * 4


def test_nothing_that_came_is_past_any_limit() -> None:
    lost = guard.Figures.of([0.0, 1.0, 0.0, 0.0, 1.0])
    assert all(lost.past(guard.limits(Options(), wires.get(name), True)) for name in NAMES)


def planned(rank: int, size: int, scale: float, dtype: str) -> set[str]:
    """What mode="auto" takes, where the network is what takes long."""
    from evener.comm.planner import live

    torch.manual_seed(1)
    kind = getattr(torch, dtype)
    model = DistributedDataParallel(torch.nn.Linear(64, 64, bias=False, dtype=kind))
    accelerate(model, mode="auto")
    slow = of_network(2, 1, Link.of_rate(1e5, 0), Link(0, 1e9), wires.papers(), 1e12)
    planner = model.evener_steps.planner
    assert isinstance(planner, live.Planner)
    planner._measure = lambda _: slow
    for _ in range(6):
        model.zero_grad()
        (model(torch.ones(2, 64, dtype=kind)).sum() * scale).backward()
    assert planner.decision is not None
    found = {exchange.wire.name for exchange in model.evener.exchanges}
    model.evener.close()
    return found


@pytest.mark.parametrize(
    ("scale", "dtype", "taken"),
    [(1.0, "float32", "bf16"), (1e-10, "float32", "bf16"), (1.0, "bfloat16", "exact")],
)
def test_auto_takes_no_form_whose_range_a_gradient_may_leave(
    scale: float, dtype: str, taken: str
) -> None:
    assert worlds.run([1, 1], planned, scale, dtype) == [{taken}] * 2


# --- a form of one's own is one class ---


def test_a_form_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    registry: dict[str, Any] = dict(wires.base._FORMS)
    monkeypatch.setattr(wires.base, "_FORMS", registry)
    exact = wires.get("exact")

    @wires.register
    class Own(exact):  # type: ignore[misc, valid-type]
        name, title, what, place, first_update = "own", "own", "a form of a test", 15, 0.02

        @classmethod
        def paper(cls, ratio: float) -> wires.Paper:
            return wires.Paper("own", 0.4, True, 2.0)

    assert wires.candidates("int8") == ("exact", "bf16", "own", "int8")
    assert of_network(2, 1, Link(0, 1), Link(0, 1), wires.papers(), 1.0).exchange["own"](1e6) > 0
    with pytest.raises(ValueError, match="exists already"):
        wires.register(Own)
