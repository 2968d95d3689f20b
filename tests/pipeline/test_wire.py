"""Activations in fewer bits between nodes: what is sent, the guard, and the loss beside exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evener import pipeline
from evener.errors import UsageError
from evener.pipeline.wire import LIMIT, Wire
from tests import worlds
from tests.pipeline import models

RATES = pipeline.Rates(1e11, 1e10, 1e-6)
STEPS = 12


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1024, 5000),
    st.sampled_from([("bf16", torch.float32, 2**-8), ("int8", torch.float32, 0.02),
                     ("int8", torch.bfloat16, 0.02)]),
    st.floats(1e-6, 1e6),
)  # fmt: skip
def test_what_is_sent_is_close(
    size: int, kind: tuple[str, torch.dtype, float], scale: float
) -> None:
    form, dtype, close = kind
    wire = Wire(form, 0, 1)
    values = (torch.randn(size, generator=torch.Generator().manual_seed(size)) * scale).to(dtype)
    assert wire.fits(dtype, values.shape)
    sent = wire.encode(values, 3, 0)
    assert sent.shape == wire.buffer(size, sent.device).shape
    back = wire.decode(sent, values.shape, dtype)
    assert back.dtype is dtype
    lost = float((back.double() - values.double()).norm() / values.double().norm())
    assert lost <= close and wire.worst() == pytest.approx(lost, rel=0.2, abs=1e-3)
    assert wire.worst() == 0.0
    # A rerun sends the same bits; another microbatch rounds in another way.
    assert torch.equal(sent, wire.encode(values, 3, 0))
    if form == "int8":
        assert not torch.equal(sent, wire.encode(values, 3, 1))
        assert sent.numel() * sent.element_size() <= 1.01 * (size + 1024)


def test_what_goes_as_it_is() -> None:
    for form, dtype, shape in (
        ("exact", torch.float32, (4096,)), ("bf16", torch.bfloat16, (4096,)),
        ("int8", torch.long, (4096,)), ("int8", torch.float32, (1023,)),
    ):  # fmt: skip
        assert not Wire(form, 0, 0).fits(dtype, shape)
    values = torch.ones(2048)
    values[7] = torch.inf
    wire = Wire("int8", 0, 0)
    assert not wire.decode(wire.encode(values, 0, 0), values.shape, torch.float32)[7].isfinite()
    with pytest.raises(UsageError, match="activations='fp4'"):
        pipeline.plan(models.GPT(), batch(0), rates=RATES, activations="fp4")


def test_the_plan_knows_that_links_are_faster() -> None:
    slow = pipeline.network(between="10mbit", per_node=1)
    model = models.GPT(2)
    with models.trace_once:
        steps = [
            pipeline.plan(model, batch(0), rates=RATES, microbatches=4, network=slow,
                          activations=form).step_seconds
            for form in ("exact", "bf16", "int8")
        ]  # fmt: skip
    assert steps[0] > 1.5 * steps[1] > 2.2 * steps[2]


def batch(step: int) -> dict[str, torch.Tensor]:
    tokens = models.tokens(64, step % 3)
    return {"tokens": tokens, "labels": (tokens * 7 + 3) % models.VOCABULARY}


def train(rank: int, size: int) -> Any:
    found = {}
    torch.manual_seed(3)
    model = models.GPT(2, tied=False)
    for form in ("exact", "bf16", "int8", "outlier"):
        with models.trace_once:
            pipe = pipeline.auto(model, batch(0), rates=RATES, microbatches=4, timeout=30,
                                 activations="int8" if form == "outlier" else form)  # fmt: skip
        if form == "outlier":
            with torch.no_grad():
                for name, parameter in pipe.named_parameters():
                    if name == "embed.weight":
                        parameter[7, 0] = 100.0
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        losses, cuts = [], [set(pipe.lossy_cuts)]
        for step in range(STEPS):
            losses.append(pipe.step(**batch(step)).item())
            optimizer.step()
            optimizer.zero_grad()
            cuts.append(set(pipe.lossy_cuts))
        pipe.close()
        found[form] = losses, cuts
    return found


def test_training_between_two_nodes() -> None:
    one, two = worlds.run([1, 1], train)
    assert one == two
    exact, cuts = one["exact"]
    assert exact[-1] < 0.7 * exact[0] and cuts == [set()] * (STEPS + 1)
    for form, close in (("bf16", 0.01), ("int8", 0.03)):
        losses, cuts = one[form]
        assert losses != exact and cuts == [{0}] * (STEPS + 1)
        assert losses == pytest.approx(exact, rel=close), form
    # A token with one huge value: the rest of its block would be lost.
    losses, cuts = one["outlier"]
    assert cuts == [{0}] + [set()] * STEPS


def inside(rank: int, size: int) -> Any:
    found = []
    torch.manual_seed(3)
    model = models.GPT(1, tied=False)
    for form in ("exact", "int8"):
        with models.trace_once:
            pipe = pipeline.auto(model, batch(0), rates=RATES, microbatches=4, timeout=30,
                                 activations=form)  # fmt: skip
        found.append((pipe.step(**batch(0)).item(), set(pipe.lossy_cuts)))
        pipe.close()
    return found


def test_inside_a_node_they_go_as_they_are() -> None:
    for exact, asked in worlds.run([2], inside):
        assert exact == asked and asked[1] == set()
    assert 0 < LIMIT < 1
