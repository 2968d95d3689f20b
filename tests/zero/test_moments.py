"""Moments of one byte: which parameters have them, and what checkpoints and state_dicts make of
them. Their arithmetic: crates/kernels/tests, test_lanes.py; what they train: tests/twins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from evener import zero
from evener.base.optimizers import Run
from evener.zero import checkpoint, states, units
from evener.zero.checkpoint import CheckpointError
from evener.zero.entries import held_by
from evener.zero.rules import SGD
from evener.zero.store import Formats
from tests import worlds
from tests.zero.engines import start, weights
from tests.zero.models import Model, batches
from tests.zero.test_checkpoint import train


def begin(moments: str, **changes: Any) -> zero.Engine:
    torch.manual_seed(0)
    return start(Model(), bf16={"enabled": True}, evener={"moments": moments}, **changes)


def moments_of(engine: zero.Engine) -> dict[str, torch.Tensor]:
    """Each parameter's, as float32, in its own order."""
    engine.drain()
    return {
        f"{part.name}.{place}": part.chunk.read_moment(
            place, part.begin, part.begin + part.high - part.low
        ).float()
        for part in held_by(engine)
        for place in ("first", "second")
    }


def test_small_parameters_have_float32_and_blocks_are_of_one_parameter() -> None:
    engine = begin("int8")
    for chunk in engine.chunks():
        coded = chunk.coded("first")
        for piece in chunk.group.pieces:
            assert coded == (piece.numel >= units.LEAST), piece.name
            assert not coded or piece.offset % states.BLOCK == 0
        formats = chunk.formats()
        assert formats["first"] == (torch.int8 if coded else torch.float32)
    assert {c.group.name for c in engine.chunks() if c.coded("first")} == {
        f"layers.{n}/0" for n in range(4)
    }
    engine.close()


def test_bytes_per_parameter() -> None:
    half = torch.bfloat16
    assert Formats(half, torch.float32, half).host_bytes() == 14
    assert Formats(half, half, half).host_bytes() == 10
    assert Formats(half, torch.int8, half).host_bytes() == 8 + 2 / 256
    assert Formats(half, torch.int8, half, master=False).host_bytes() == 6 + 2 / 256


@pytest.mark.parametrize("place", ["first", "second"])
def test_a_number_on_the_grid_comes_back(place: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2560, generator=generator) * 10 ** torch.randn(2560, generator=generator)
    x = x.square() if place == "second" else x
    x[256:512] = 0
    x[600] = 1e-30
    once = states.decode(place, *states.encode(place, x))
    assert torch.equal(states.decode(place, *states.encode(place, once)), once)
    largest = x.view(-1, 256).abs().amax(1).repeat_interleave(256)
    least = largest / (1 << (14 if place == "first" else 30))
    # Half a step; below the smallest code a whole one, as a second moment is never rounded to zero.
    bound = torch.maximum(x.abs() / 15.9, least / (15.9 if place == "first" else 8))
    assert ((once - x).abs() <= bound).all()
    assert (once[256:512] == 0).all() and (place == "first" or once[600] > 0)


@pytest.mark.parametrize("before", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("after", ["fp32", "int8"])
def test_a_checkpoint_goes_on_with_other_moments(before: str, after: str, tmp_path: Path) -> None:
    first, data = begin(before), batches(8)
    train(first, data[:4])
    zero.save_checkpoint(first, tmp_path)
    second = begin(after)
    zero.load_checkpoint(second, tmp_path)
    saved, loaded = moments_of(first), moments_of(second)
    for name, value in saved.items():
        place = name.rpartition(".")[2]
        if before != "int8" and after == "int8" and value.numel() >= units.LEAST:
            value = states.decode(place, *states.encode(place, value))
        assert torch.equal(loaded[name], value), name
    steps = {
        piece.name: n
        for c in first.chunks()
        for piece, n in zip(c.group.pieces, c.steps, strict=True)
    }
    assert steps == {
        p.name: n for c in second.chunks() for p, n in zip(c.group.pieces, c.steps, strict=True)
    }
    theirs, mine = train(first, data[4:]), train(second, data[4:])
    assert (mine == theirs) == (before == after)
    assert mine == pytest.approx(theirs, rel=0.05)
    first.close()
    second.close()


def test_an_older_checkpoint_of_other_chunks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def old(engine: zero.Engine, extra: Any) -> dict[str, Any]:
        meta = made(engine, extra)
        del meta["steps"]
        return {**meta, "chunk_steps": {c.group.name: c.steps for c in engine.chunks()}}

    made = checkpoint._meta
    monkeypatch.setattr(checkpoint, "_meta", old)
    first = begin("fp32")
    train(first, batches(2))
    zero.save_checkpoint(first, tmp_path)
    second = begin("fp32")
    zero.load_checkpoint(second, tmp_path)
    assert [c.steps for c in second.chunks()] == [c.steps for c in first.chunks()]
    third = begin("int8")
    with pytest.raises(CheckpointError, match="older Evener"):
        zero.load_checkpoint(third, tmp_path)
    assert not any(step for c in third.chunks() for step in c.steps)
    for engine in (first, second, third):
        engine.close()


def test_state_dicts_hold_numbers_and_not_codes() -> None:
    first = begin("int8")
    train(first, batches(3))
    first.drain()
    state = zero.moments.collect(first, first.param_groups)
    assert all(s["exp_avg"].dtype == torch.float32 for s in state.values())
    second = begin("int8")
    groups = [{**g, "params": list(range(len(g["params"])))} for g in first.param_groups]
    zero.moments.install(second, second.param_groups, {"state": state, "param_groups": groups})
    mine, theirs = moments_of(second), moments_of(first)
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())
    first.close()
    second.close()


@pytest.mark.parametrize("before", [True, False])
def test_a_checkpoint_goes_on_with_or_without_exact_weights(before: bool, tmp_path: Path) -> None:
    def begin_with(master: bool) -> zero.Engine:
        torch.manual_seed(0)
        return start(Model(), bf16={"enabled": True}, evener={"master": master})

    first, second = begin_with(before), begin_with(not before)
    assert all(("lower" in c.formats()) == before for c in first.chunks())
    train(first, batches(3))
    train(second, batches(1))
    zero.save_checkpoint(first, tmp_path)
    zero.load_checkpoint(second, tmp_path)
    theirs, mine = weights(first), weights(second)
    for name, value in theirs.items():
        assert torch.equal(mine[name].bfloat16(), value.bfloat16()), name
        assert torch.equal(mine[name], value) == (not before), name
    first.close()
    second.close()


def test_steps_that_are_smaller_than_a_weight_s_last_bit_still_count() -> None:
    """To the nearest, a step of 0.0001 would leave 1.5 as it is: its last bit is 1/128."""
    found = states.States(torch.full((1 << 16,), 1.5).bfloat16(), None, None, None, None)
    rule, gradient = SGD(lr=1.0), torch.full((1 << 16,), 1e-4)
    for step in range(1, 11):
        rule.on_host(found, gradient, rule.values, step, 1.0, Run(seed=1))
    assert found.weights.float().mean().item() == pytest.approx(1.5 - 10 * 1e-4, rel=1e-4)


def saves(rank: int, _size: int, moments: str, folder: str) -> dict[str, torch.Tensor]:
    torch.set_num_threads(1)
    engine = begin(moments)
    train(engine, [tokens[2 * rank : 2 * rank + 2] for tokens in batches(3)])
    zero.save_checkpoint(engine, folder)
    found = moments_of(engine)
    engine.close()
    return found


@pytest.mark.parametrize("after", ["fp32", "int8"])
def test_a_checkpoint_of_two_ranks_on_one(after: str, tmp_path: Path) -> None:
    both = worlds.run([2], saves, "int8", str(tmp_path))
    engine = begin(after)
    zero.load_checkpoint(engine, tmp_path)
    for name, value in moments_of(engine).items():
        parts = [found[name] for found in both if name in found]
        assert torch.equal(torch.cat(parts), value), name
    engine.close()
