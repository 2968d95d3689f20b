"""What the plan knows of a real allocator and of a real step: holes in pools, what kernels take
inside themselves, the next forward pass chunk by chunk, and what the first steps teach."""

from __future__ import annotations

import logging

import pytest
import torch

from evener import zero
from evener.base.budget import Budget
from evener.zero import learned
from evener.zero.config import read
from evener.zero.meter import PER_CORE, inside
from evener.zero.planner import WORKSPACE, Machine, Part, Plan, Work, plan
from evener.zero.planning import plan_units
from evener.zero.profile import LARGE, Held, Moment, Profile, outgoing, peaks
from evener.zero.store import Formats
from evener.zero.units import Group, Unit


def test_weights_of_two_sizes_take_more_than_their_sum() -> None:
    def moments(*units: int) -> tuple[Moment, ...]:
        return tuple(Moment(kind, u, 0, 0) for u in units for kind in ("enter", "leave"))

    profile = Profile(plain=moments(0, 1, 2, 1, 0), recomputed=(), repeated=frozenset({0, 1}))
    chunks = [Held(0, 100, 0, True, False), Held(1, 100, 0, True, False),
              Held(2, 150, 0, True, False)]  # fmt: skip
    plain, _ = peaks(profile, chunks, recompute=set(), depth=1)
    real, _ = peaks(profile, chunks, recompute=set(), depth=1, pools=True)
    assert plain == 250
    assert real == 350  # the hole of unit 0 is too small for unit 2


def test_large_gradients_leave_one_at_a_time() -> None:
    assert outgoing(2, LARGE) == 2
    assert outgoing(2, LARGE + 1) == 1
    assert outgoing(0, LARGE + 1) == 0


def test_what_kernels_take_inside() -> None:
    aten = torch.ops.aten
    x = torch.empty(8192, 2560, dtype=torch.bfloat16, device="meta")
    # Measured on an H200 of 132 multiprocessors: 138.9, 104.9, 134.2, 92.7, 269.5, 53.2 MB.
    assert inside(aten.sum.dim_IntList, [x], 132) == pytest.approx(138.9e6, rel=0.05)
    assert inside(aten.sum.dim_IntList, [x[:, :1600]], 132) == pytest.approx(104.9e6, rel=0.01)
    assert inside(aten.sum.dim_IntList, [x.float()], 132) == 0
    logits = torch.empty(8192, 4096, device="meta")
    assert inside(aten.logsumexp.default, [logits], 132) == pytest.approx(134.3e6, rel=0.01)
    assert inside(aten.embedding_dense_backward.default, [x], 132) == pytest.approx(
        92.7e6, rel=0.03
    )
    query = torch.empty(8, 32, 1024, 128, dtype=torch.bfloat16, device="meta")
    backward = aten._scaled_dot_product_cudnn_attention_backward.default
    assert inside(backward, [query, query, query[:, :8]], 132) == pytest.approx(269.5e6, rel=0.01)
    small = torch.empty(8, 25, 1024, 64, dtype=torch.bfloat16, device="meta")
    assert inside(backward, [small, small, small], 132) == pytest.approx(53.2e6, rel=0.02)
    assert inside(aten.add.Tensor, [x, x], 132) == 0
    assert PER_CORE > 0


def _made(sizes: list[int], updates: float) -> Plan:
    parts = [Part(f"p{n}", size, unit=n) for n, size in enumerate(sizes)]
    machine = Machine(1e18, 1e12, 1e12, updates, 1e12)
    return plan(parts, Formats(), Work(tokens=1, activations=0), machine, Budget(1 << 20, 1 << 40))


def test_the_next_forward_pass_waits_for_each_chunk() -> None:
    """1.5e9 parameters at 1e9 a second, and then the last chunk has still to come in."""
    sizes = [500_000_000] * 3
    made = _made(sizes, 1e9)
    first_out = last_in = 500_000_000 * 2 / 1e12
    rest = made.step_seconds - made.times["backward"]
    backward = max(made.times["weights in"], made.times["gradients out"])
    assert rest == pytest.approx(1.5 + first_out + last_in + backward, rel=0.01)


def test_the_first_steps_say_what_a_step_takes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(learned.time, "perf_counter", lambda: now[0])
    caplog.set_level(logging.INFO, "evener.zero")
    seen = learned.Learned(0.5)
    for took in (9.0, 3.0, 0.8, 0.8, 0.8, 0.1):
        now[0] += took
        assert not seen.step(0)
    assert seen.over
    assert seen.seconds == pytest.approx(0.8)
    assert "a step takes 0.800 s, 0.500 s were planned" in caplog.text


def test_an_allocator_that_searches_wants_room_and_not_for_ever() -> None:
    seen = learned.Learned(0.5)
    asked = [seen.step(searched) for searched in (5, 9, 10, 12, 12, *range(13, 40))]
    assert asked[:5] == [False, False, True, True, False]
    assert sum(asked) <= learned.SEARCHING
    assert seen.over


def test_only_what_does_not_fit_without_a_hole_is_refused() -> None:
    """Two sizes of weights: with the hole 350 MB, without it 250."""
    mb = 1_000_000

    class _Module(torch.nn.Module):
        def __init__(self, numel: int) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(numel, device="meta"))

    def moments(*numbers: int) -> tuple[Moment, ...]:
        return tuple(Moment(kind, u, 0, 0) for u in numbers for kind in ("enter", "leave"))

    sizes = [0, 50 * mb, 50 * mb, 75 * mb]  # two bytes each
    units = [
        Unit(
            f"u{n}",
            _Module(size) if n else None,
            [Group(f"g{n}", 0, [], size)] if n else [],
            repeated=n in (1, 2),
        )
        for n, size in enumerate(sizes)
    ]  # fmt: skip
    profile = Profile(
        plain=moments(1, 2, 3, 2, 1),
        recomputed=moments(1, 2, 3, 2, 1),
        repeated=frozenset({1, 2}),
    )
    config = read({"bf16": {"enabled": True}, "evener": {"depth": 1, "balance": False}})
    machine = Machine(1e15, 1e10, 1e10, 1e9, 1e9, slack=0.12)

    def planned(gpu: int) -> Plan:
        return plan_units(units, config, machine, Budget(gpu, 1 << 40), 1, 1, profile)

    least = WORKSPACE + 250 * mb
    easy = planned(2000 * mb)
    assert easy.fits and easy.gpu_bytes < 2000 * mb
    tight = planned(least + mb)
    assert tight.fits and tight.gpu_bytes == least + mb
    assert not planned(least - mb).fits


def test_an_example_in_float32_is_the_call_that_comes_in_bf16(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Inputs are cast to the compute dtype: the same shapes are no new inputs."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    config = {"bf16": {"enabled": True}, "evener": {"device": "simulated"}}
    x = torch.randn(4, 16)
    engine, *_ = zero.initialize(model=model, config=config, example=x)
    caplog.clear()
    with caplog.at_level("INFO", "evener.zero"):
        engine.backward(engine(x).float().square().mean())
        engine.step()
    assert "new inputs" not in caplog.text
    engine.close()
