"""Models that ask for values while their step is traced: of their inputs, and of activations."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from evener import zero
from evener.zero.profile import Profile
from evener.zero.trace import timed_trace
from evener.zero.units import cut
from tests import worlds

from .models import Block
from .test_memory import MACHINE, WHOLE, engine_of

CPU = torch.device("cpu")
WIDTH = 64


def traced(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Profile | None, str]:
    units = cut(model, {}, small=100)
    return timed_trace(model, units, args, kwargs, device=CPU, dtype=torch.float32)


def peak(profile: Profile) -> int:
    return max(moment.peak for moment in profile.plain)


class Trimmed(nn.Module):
    """Looks only at as many tokens as the longest row has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        x = x[:, : lengths.max().item()]
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_length_among_the_inputs_is_the_length_that_is_planned() -> None:
    torch.manual_seed(0)
    model, x = Trimmed(), torch.randn(4, 64, WIDTH)
    found = {}
    for most in (16, 64):
        profile, said = traced(model, x, torch.tensor([3, 9, most, 5]))
        assert profile is not None and "1 x item" in said
        found[most] = peak(profile)
    inputs = x.nbytes
    assert 3.5 < (found[64] - inputs) / (found[16] - inputs) < 4.5
    lengths = torch.tensor([3, 9, 32, 5])
    with engine_of(model, example=(x, lengths)) as engine:
        engine.backward(engine(x, lengths))
        engine.step()
        memory = engine.memory()
    assert 0.95 < memory["gpu planned"] / memory["gpu peak"] < 1.05


class Experts(nn.Module):
    """Each expert by itself, with the tokens that chose it."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        scores, chosen = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if rows.numel():
                out = out.index_add(0, rows, expert(flat[rows]) * scores[rows, place, None])
        return x + out.view_as(x)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_tokens_that_choose_an_expert_are_drawn(
    checkpointing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 64, WIDTH)
    caplog.set_level(logging.INFO, logger="evener.zero")
    with engine_of(Mixture(), example=x, evener={"checkpointing": checkpointing}) as engine:
        assert engine.plan is not None and engine.plan.traced
        engine.backward(engine(x))
        engine.step()
        memory = engine.memory()
    assert "values of activations were drawn" in caplog.text and "nonzero" in caplog.text
    assert 0.95 < memory["gpu planned"] / memory["gpu peak"] < 1.1


def test_a_trace_draws_the_same_twice_and_leaves_random_bits_as_they_were() -> None:
    class Shuffled(Mixture):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.nonzero(x[:, 0, 0] > 0).flatten()
            return super().forward(x[rows[torch.randperm(rows.numel())]])

    torch.manual_seed(0)
    x = torch.randn(32, 64, WIDTH)
    before = torch.get_rng_state()
    model = Shuffled()
    after = torch.get_rng_state()
    (one, said), (other, _) = (traced(model, x) for _ in range(2))
    assert one is not None, said
    assert one == other
    assert torch.equal(torch.get_rng_state(), after) and not torch.equal(before, after)


def test_values_that_leave_torch_are_answered_too() -> None:
    class Matched(nn.Module):
        """Costs are matched outside of torch."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
            out = self.layer(x)
            best = torch.as_tensor(np.asarray(out.detach()).argmin(1))
            height, width = sizes[0].tolist()
            also = torch.tensor([sizes[0, 0], sizes[0, 1]])
            assert also.sum() == height + width
            return (out[best] * out.new_ones(height // 2 * width)[: best.numel(), None]).mean()

    profile, said = traced(Matched(), torch.randn(16, WIDTH), torch.tensor([[8, 4]]))
    assert profile is not None, said
    assert "x item" in said and "drawn (1 x numpy)" in said


def test_what_was_written_by_activations_is_not_taken_for_the_examples() -> None:
    seen = []

    class Overwritten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
            out = self.layer(x)
            kept = steps[:2]
            seen.append(kept[0].item())
            steps[:] = out[0, :4].argmax()
            seen.append(kept[0].item())
            return out.mean()

    steps = torch.tensor([7, 7, 7, 7])
    profile, said = traced(Overwritten(), torch.randn(16, WIDTH), steps)
    assert profile is not None, said
    assert seen == [7, 0]
    assert steps.tolist() == [7, 7, 7, 7], "the batch is as it was"


def test_a_mask_does_not_hide_what_another_batch_takes() -> None:
    """The example has no padding; a batch with some takes the way with the mask."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            out = self.layer(x)
            if not mask.all():
                out = functional.softmax(out * mask[..., None], -1) * out
            return out.mean()

    x = torch.randn(4, 64, WIDTH)
    padded, _ = traced(Padded(), x, mask=torch.ones(4, 64, dtype=torch.bool))
    assert padded is not None
    without, _ = traced(nn.Sequential(nn.Linear(WIDTH, WIDTH)), x)
    assert without is not None and peak(padded) > 1.1 * peak(without)


def _ranks(rank: int, _size: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, lengths = torch.randn(4, 64, WIDTH), torch.tensor([8 if rank else 64] * 4)
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100},
        "evener": {
            "device": "simulated", "checkpointing": "auto",
            "budget": {"gpu": WHOLE, "host": 1 << 30},
        },
    }  # fmt: skip
    engine, *_ = zero.initialize(
        model=Trimmed(), config=config, machine=MACHINE, example=(x, lengths)
    )
    assert engine.plan is not None
    Path(folder, str(rank)).write_text(repr(engine.plan.gpu_bytes))
    engine.close()


def test_ranks_whose_batches_differ_make_one_plan(tmp_path: Path) -> None:
    worlds.run([2], _ranks, str(tmp_path))
    assert Path(tmp_path, "0").read_text() == Path(tmp_path, "1").read_text()


class Widened(nn.Module):
    """Sums products of bfloat16 in float32, in place, as trl's loss does on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        with torch.no_grad():
            acc = torch.zeros(WIDTH, WIDTH, device=x.device)
            half = y[0].to(torch.bfloat16)
            torch.addmm(acc, half.t(), half, out_dtype=torch.float32, out=acc)
            more = torch.addmm(acc, half.t(), half, out_dtype=torch.float32)
        out: torch.Tensor = y + (acc + more).sum()
        return out


def test_sums_in_a_wider_dtype_have_a_shape() -> None:
    """And their products are counted."""
    model = Widened()
    units = cut(model, {}, small=100)
    given = (torch.randn(1, 8, WIDTH),)
    found, said = timed_trace(model, units, given, {}, device=CPU, dtype=torch.float32)
    assert found is not None, said
    flops = sum(work * count for work, _, count in found.forward)
    assert flops >= 2 * (2 * WIDTH * 8 * WIDTH) + 2 * 8 * WIDTH * WIDTH
