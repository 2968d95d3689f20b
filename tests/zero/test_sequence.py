"""Parts of blocks in tiles: what they keep does not grow with the sequence, who listens to a
gradient hears it once, and recomputation ends where a part begins. Which parts these are, and that
results are the same: tests/twins/zero_tiles.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from evener import zero
from evener.zero import sequence, tokenwise
from evener.zero.meter import Ledger, Meter
from tests.zero.test_plan import MACHINE

WIDTH, INNER = 64, 512
ROWS = 128


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.norm, self.mlp = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x).cumsum(1) / x.shape[1]
        out: torch.Tensor = x + self.mlp(self.norm(x))
        return out


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = x
        return out


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sequence, "ROWS", ROWS)
    yield


def _peak(tokens: int, tiled: bool) -> int:
    """Bytes that a step of an MLP takes at most."""
    mlp = Mlp()
    tiles = sequence.Tiles([mlp]) if tiled else None
    ledger = Ledger()
    with Meter(ledger):
        x = torch.randn(1, tokens, WIDTH, requires_grad=True)
        mlp(x).backward(torch.ones(1, tokens, WIDTH))
    if tiles is not None:
        tiles.close()
    return ledger.peak


def test_the_peak_of_an_mlp_is_flat_but_for_what_goes_in_and_out() -> None:
    """Of bytes: its input, its result and their gradients grow, and nothing else."""
    ends = 4 * WIDTH * 4
    tiled = {n: _peak(n, True) - n * ends for n in (8 * ROWS, 16 * ROWS, 64 * ROWS)}
    assert len(set(tiled.values())) == 1, tiled
    whole = {n: _peak(n, False) - n * ends for n in (8 * ROWS, 16 * ROWS)}
    assert whole[16 * ROWS] > whole[8 * ROWS] + 8 * ROWS * INNER * 4 * 2
    # A tile in full with its gradients, and those of the weights, of a tile and summed.
    weights = sum(p.nbytes for p in Mlp().parameters())
    assert next(iter(tiled.values())) < 10 * ROWS * INNER * 4 + 3 * weights


def test_who_listens_hears_each_gradient_once() -> None:
    mlp, heard = Mlp(), []
    for name, parameter in mlp.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: heard.append(name))
    tiles = sequence.Tiles([mlp])
    mlp(torch.randn(2, 300, WIDTH)).sum().backward()
    assert sorted(heard) == sorted(name for name, _ in mlp.named_parameters())
    tiles.close()
    assert "forward" not in vars(mlp)


def test_a_part_at_the_end_of_a_block_runs_twice_per_step_where_it_is_recomputed() -> None:
    block, calls = Block(), []
    tiles = sequence.Tiles([block])
    (part,) = tiles.parts
    assert part.module is block.mlp
    inner = part.inner

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape[1])
        return inner(x)

    part.inner = counted
    x = torch.randn(1, 4 * ROWS, WIDTH, requires_grad=True)
    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert calls == [ROWS] * 8
    tiles.close()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_engine_trains_the_same(checkpointing: bool) -> None:
    tokens = torch.randint(0, 50, (2, 3 * ROWS + 5))
    found: list[list[float]] = []
    for tiled in (False, True):
        torch.manual_seed(0)
        model = Model()
        engine, *_ = zero.initialize(
            model=model,
            config={
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                "zero_optimization": {"stage3_param_persistence_threshold": 0},
                "evener": {"device": "cpu", "tiles": tiled, "checkpointing": checkpointing},
            },
            resident={"blocks.1/0"},
        )
        losses = []
        for _ in range(4):
            loss = engine(tokens).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.close()
        assert not any(hasattr(m.forward, "part") for m in model.modules())
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[0][-1] < found[0][0]


def _plan(length: int, gpu: int, **own: Any) -> zero.Plan:
    with zero.empty_weights():
        model = Model()
    config = zero.Config(device="cpu", checkpointing=True, small=0, **own)
    return zero.plan(
        model,
        config=config,
        machine=dataclasses.replace(MACHINE, reserve=0),
        budget={"gpu": gpu, "host": "4GB"},
        example=torch.zeros(1, length, dtype=torch.int64),
    )


def test_the_plan_knows_tiles_and_names_them_where_they_would_fit() -> None:
    length = 512 * ROWS
    tiled, whole = (_plan(length, 1 << 40, tiles=tiles).gpu_bytes for tiles in (True, False))
    resident = _plan(ROWS, 1 << 40).gpu_bytes
    assert tiled - resident < 0.6 * (whole - resident)
    between = (tiled + whole) // 2
    refused = _plan(length, between)
    assert not refused.fits
    assert refused.nearest[0].option == "the sequence in tiles (--tiles)"
    assert _plan(length, between, tiles=True).fits


def test_equal_tiles_of_a_trace_run_once_and_count_as_often_as_they_are() -> None:
    """Arithmetic grows with the sequence, the operations that a trace plays do not."""
    seen: dict[int, int] = {}
    for length in (8 * ROWS, 32 * ROWS):
        meter = Meter(Ledger(), count_work=True)
        with FakeTensorMode(allow_non_fake_inputs=True), sequence.counted(meter.repeated), meter:
            mlp = Mlp()
            part = sequence.Part(mlp, WIDTH)
            part.forward(torch.empty(1, length, WIDTH))
        assert meter.work is not None
        seen[length] = sum(flops * count for (flops, _), count in meter.work.items())
    assert seen[32 * ROWS] == 4 * seen[8 * ROWS] == 32 * ROWS * 3 * 2 * WIDTH * INNER


def test_what_someone_listens_to_runs_whole() -> None:
    mlp = Mlp()
    assert tokenwise.width_of(mlp) == WIDTH
    heard: list[int] = []
    hook = mlp.up.register_forward_hook(lambda *_: heard.append(1))
    assert tokenwise.width_of(mlp) == 0
    hook.remove()
    tiles = sequence.Tiles([mlp])
    mlp.up.register_forward_hook(lambda *_: heard.append(1))
    mlp(torch.randn(1, 4 * ROWS, WIDTH))
    assert heard == [1]
    tiles.close()


def test_norms_outside_of_blocks_run_in_tiles_too() -> None:
    model = Model()
    model.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])
    model.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU())
    tiles = sequence.Tiles(list(model.blocks), model.modules())
    mine = [part.module for part in tiles.parts]
    assert [each for each in mine if isinstance(each, nn.RMSNorm)][-3:] == [
        *model.norms,
        model.head[0],
    ]
    assert model.head not in mine and len(set(mine)) == len(mine)
    tiles.close()
    assert not any("forward" in vars(module) for module in model.modules())
