"""Several nodes: each has a copy of the states, or all share them; the same weights either way, and
gradients that cross once per step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from evener import zero
from evener.zero.budget import Budget
from evener.zero.planner import Machine, Part, Work, plan
from evener.zero.store import Formats
from tests import worlds
from tests.zero.models import Model, batches, loss_of
from tests.zero.test_engine import configuration

STEPS = 3


def gathered(engine: zero.Engine) -> dict[str, torch.Tensor]:
    """Whole weights of one copy of the states."""
    engine.drain()
    found = {}
    for chunk in engine.chunks():
        whole = full = chunk.full()
        if engine.world > 1:
            whole = torch.empty(full.numel() * engine.world)
            engine.ranks.collect(whole, full)
        for piece in chunk.group.pieces:
            end = piece.offset + piece.numel
            found[piece.name] = whole[piece.offset : end].clone().view(piece.shape)
    return found


def train(
    rank: int, _size: int, nodes: str, accumulation: int, own: bool, folder: str
) -> tuple[dict[str, torch.Tensor], float, dict[str, int], tuple[int, int]]:
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # rank 0's values are taken by all
    given = configuration(
        gradient_accumulation_steps=accumulation,
        evener={"nodes": nodes, "budget": {"gpu": "2MB", "host": "1GB"}},
    )
    engine, optimizer, _, _ = zero.initialize(model=Model(), config=given, resident=set())
    engine.threads = 1
    data = batches(STEPS * accumulation, seed=10 + rank)
    norm = 0.0
    for number, tokens in enumerate(data, 1):
        loss = loss_of(engine, tokens)
        if own:  # a loop of the user's: nobody says which micro-batch is the last
            engine.scale(loss).backward()
            if number % accumulation == 0:
                norm = float(engine.norm())
                optimizer.step()
        else:
            engine.backward(loss)
            engine.step()
            norm = engine.get_global_grad_norm() or 0.0
    found = gathered(engine)
    sent, place = engine.memory(), (engine.world, engine.ranks.replicas)
    if folder:
        zero.save_checkpoint(engine, folder)
        engine.close()
        engine, *_ = zero.initialize(model=Model(), config=given, resident=set())
        zero.load_checkpoint(engine, folder)
        again = gathered(engine)
        assert all(torch.equal(found[name], again[name]) for name in found)
        zero.export(engine, Path(folder) / "whole.safetensors", torch.float32)
    engine.close()
    return found, norm, sent, place


def gathered_alone(seeds: list[int], accumulation: int) -> dict[str, torch.Tensor]:
    """One rank that sees all ranks' batches in each step."""
    torch.manual_seed(0)
    given = configuration(gradient_accumulation_steps=accumulation * len(seeds))
    engine, *_ = zero.initialize(model=Model(), config=given, resident=set())
    engine.threads = 1
    each = [batches(STEPS * accumulation, seed=seed) for seed in seeds]
    for step in range(STEPS):
        for turn in range(accumulation):
            for data in each:
                engine.backward(loss_of(engine, data[step * accumulation + turn]))
                engine.step()
    engine.drain()
    found = {
        piece.name: chunk.full()[piece.offset : piece.offset + piece.numel].view(piece.shape)
        for chunk in engine.chunks()
        for piece in chunk.group.pieces
    }
    engine.close()
    return found


@pytest.mark.parametrize(
    ("shape", "accumulation", "own"), [([1, 1], 1, False), ([2, 2], 2, False), ([1, 1], 2, True)]
)
def test_copies_are_equal_and_those_of_one_rank(
    shape: list[int], accumulation: int, own: bool, tmp_path: Path
) -> None:
    size = sum(shape)
    ends = worlds.run(shape, train, "replicate", accumulation, own, str(tmp_path))
    assert {end[3] for end in ends} == {(shape[0], len(shape))}
    first, norm, sent, _ = ends[0]
    for other, theirs, _, _ in ends[1:]:
        assert all(torch.equal(first[name], other[name]) for name in first)
        assert norm == theirs
    alone = gathered_alone([10 + rank for rank in range(size)], accumulation)
    for name, value in alone.items():
        torch.testing.assert_close(first[name].view(value.shape), value, rtol=1e-5, atol=1e-5)
    # Each step every gradient crosses once, whatever the number of micro-batches.
    numel = sum(value.numel() for value in alone.values())
    each = numel / shape[0] * 4 * 2 * (len(shape) - 1) / len(shape)
    assert abs(sent["gradients between nodes"] / STEPS / each - 1) < 0.03
    assert (tmp_path / "whole.safetensors").is_file()


def test_shared_by_all_gives_the_same(tmp_path: Path) -> None:
    one = worlds.run([1, 1], train, "shard", 1, False, "")
    two = worlds.run([1, 1], train, "replicate", 1, False, "")
    assert one[0][3] == (2, 1) and one[0][2]["gradients between nodes"] == 0
    for name, value in one[0][0].items():
        torch.testing.assert_close(two[0][0][name].view(value.shape), value, rtol=1e-5, atol=1e-5)


def planned(_rank: int, _size: int) -> list[int]:
    """What is chosen over a slow network and over a fast one."""
    torch.set_num_threads(1)
    found = []
    measured = zero.api.crossing
    for rate in (1e6, 1e13):
        zero.api.crossing = lambda *given, rate=rate: (measured(*given)[0], rate)
        torch.manual_seed(0)
        own = {"budget": {"gpu": "40MB", "host": "4GB"}}
        given = configuration(gradient_accumulation_steps=4, evener=own)
        engine, *_ = zero.initialize(
            model=Model(width=256), config=given, batch=(4, 16), machine=HERE
        )
        found.append(engine.ranks.replicas)
        engine.close()
    return found


HERE = Machine(flops=1e11, h2d=1e10, d2h=1e10, host_adam=1e8, device_adam=1e9)


def test_the_network_chooses() -> None:
    assert worlds.run([1, 1], planned) == [[2, 1], [2, 1]]


MACHINE = Machine(flops=1e14, h2d=5e10, d2h=5e10, host_adam=4e9, device_adam=4e10, between=3e9)


def test_the_plan_counts_what_crosses_once() -> None:
    parts = [Part(f"layers.{n}/0", 50_000_000, unit=n) for n in range(20)]
    budget = Budget(4 << 30, 64 << 30)
    times: list[Any] = []
    for accumulation in (1, 4):
        work = Work(tokens=8192, activations=0, accumulation=accumulation, replicas=2)
        made = plan(parts, Formats(), work, MACHINE, budget)
        assert made.times["between nodes"] == pytest.approx(1e9 * 2 / 3e9)
        times.append(made)
    assert times[0].tokens_per_second < times[1].tokens_per_second
    alone = plan(parts, Formats(), Work(tokens=8192, activations=0), MACHINE, budget)
    assert alone.times["between nodes"] == 0
    assert times[1].tokens_per_second < 2.001 * alone.tokens_per_second
