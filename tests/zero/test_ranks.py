"""Two ranks over Gloo: the same weights on both, those of one rank on both batches, any stage."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from evener import zero
from tests.zero.models import Model, batches, loss_of
from tests.zero.test_engine import configuration, start, weights

CASES: list[tuple[int, int, set[str]]] = [
    (1, 1, set()),
    (1, 2, set()),
    (2, 2, {"layers.1/0"}),
    (3, 1, set()),
    (3, 2, {"layers.1/0"}),
]


def train(engine: zero.Engine, data: list[torch.Tensor]) -> None:
    for tokens in data:
        engine.backward(loss_of(engine, tokens))
        engine.step()


def gathered(engine: zero.Engine) -> dict[str, torch.Tensor]:
    engine.drain()
    found = {}
    for chunk in engine.chunks():
        full = chunk.states.full()
        whole = torch.empty(full.numel() * engine.world)
        dist.all_gather_into_tensor(whole, full)
        for piece in chunk.group.pieces:
            found[piece.name] = whole[piece.offset : piece.offset + piece.numel].view(piece.shape)
    return found


def worker(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for number, (stage, accumulation, resident) in enumerate(CASES):
        torch.manual_seed(rank)  # rank 0's values are taken by all
        changes: dict[str, Any] = {
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "gradient_accumulation_steps": accumulation,
        }
        engine, *_ = zero.initialize(
            model=Model(), config=configuration(**changes), resident=resident
        )
        train(engine, [tokens[2 * rank : 2 * rank + 2] for tokens in batches(4)])
        found = gathered(engine)
        torch.save(found, Path(folder) / f"{number}-{rank}.pt")
        if number == len(CASES) - 1:
            zero.save_checkpoint(engine, Path(folder) / "saved")
            zero.export(engine, Path(folder) / "out", torch.float32)
        engine.close()
    dist.destroy_process_group()


def test_two_ranks(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, args=(port, str(tmp_path)), nprocs=2)
    one = {}
    for accumulation in (1, 2):
        torch.manual_seed(0)
        engine = start(Model(), gradient_accumulation_steps=accumulation)
        train(engine, batches(4))
        one[accumulation] = {name: value.clone() for name, value in weights(engine).items()}
        engine.close()
    for number, (_, accumulation, _) in enumerate(CASES):
        mine, theirs = (torch.load(tmp_path / f"{number}-{rank}.pt") for rank in (0, 1))
        for name, value in one[accumulation].items():
            assert torch.equal(mine[name], theirs[name]), (number, name)
            # Sums over two halves of a batch are rounded otherwise than over the whole.
            torch.testing.assert_close(mine[name], value, rtol=2e-3, atol=2e-4)
    # A checkpoint of two ranks on one: the same bits.
    torch.manual_seed(5)
    engine = start(Model(), gradient_accumulation_steps=2)
    zero.load_checkpoint(engine, tmp_path / "saved")
    last = torch.load(tmp_path / f"{len(CASES) - 1}-0.pt")
    assert all(torch.equal(value, last[name]) for name, value in weights(engine).items())
    assert (tmp_path / "out/model.safetensors").stat().st_size > 4 * 30000
    engine.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("resident", [set(), {"layers.1/0", "head/0"}])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_on_a_gpu(resident: set[str], checkpointing: bool) -> None:
    """Streams and events: the bits do not depend on where chunks live, nor on timing."""
    ends = []
    for where in (resident, resident, {f"layers.{i}/0" for i in range(4)}):
        torch.manual_seed(0)
        engine = start(
            Model(width=256),
            where,
            bf16={"enabled": True},
            evener={"device": "cuda", "checkpointing": checkpointing},
        )
        for tokens in batches(8):
            engine.backward(loss_of(engine, tokens.cuda()))
            engine.step()
        ends.append({name: value.cpu() for name, value in weights(engine).items()})
        engine.close()
    for other in ends[1:]:
        assert all(torch.equal(ends[0][name], other[name]) for name in other)
