"""The reducer on GPUs through NCCL. Four GPUs, pretended to be on two or four hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from evener.ddp import accelerate
from tests import gpus, worlds
from tests.comm import models, test_compression, test_lowrank, test_reducer

pytestmark = pytest.mark.gpu
SHAPES = {"2x2": [2, 2], "4x1": [1, 1, 1, 1], "1x4": [4], "uneven": [3, 1]}
ALL = [pytest.param(name, marks=gpus.needs(*shape)) for name, shape in SHAPES.items()]
ENV = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_NVLS_ENABLE": "0"}


@pytest.mark.parametrize("shape", ALL)
def test_every_mode_and_dtype(shape: str) -> None:
    for wire in ("exact", "fp16", "bf16"):
        cases = [
            (dtype, algorithm, size, to_none)
            for dtype in test_reducer.DTYPES
            for algorithm, size, to_none in (("auto", 4096, True), ("flat", 0, False))
        ]
        described = worlds.run(
            SHAPES[shape], test_reducer._train_all, wire, cases, gpu=True, env=ENV
        )
        assert any("2-D" in text for text in described[0]) == (shape in ("2x2", "uneven"))


@pytest.mark.parametrize("shape", ALL[:2])
def test_error_feedback_loses_nothing(shape: str) -> None:
    cases = [(form, "float32", False, False) for form in test_compression.FEEDBACK]
    cases += [("topk", "float32", True, False), ("topk-chunk", "bfloat16", False, False)]
    cases += [("int8", "float16", False, True), ("int4", "bfloat16", False, False)]
    cases += [("lowrank2", "bfloat16", False, True)]
    worlds.run(SHAPES[shape], test_compression.loses_nothing, cases, gpu=True, env=ENV)


@gpus.needs(2, 2)
def test_loss_scale_and_skipped_steps() -> None:
    worlds.run([2, 2], test_compression.scaled, gpu=True, env=ENV)


@pytest.mark.parametrize("shape", ALL[:2])
def test_what_is_of_low_rank_arrives(shape: str) -> None:
    worlds.run(SHAPES[shape], test_lowrank.learns, gpu=True, env=ENV)


@gpus.needs(2, 2)
def test_the_guard_falls_back(tmp_path: Path) -> None:
    env = {**ENV, "EVENER_STATS_DIR": str(tmp_path)}
    found = worlds.run([2, 2], test_compression.guarded, 0.9999999, gpu=True, env=env)
    assert found[0][0] == "topk" and found[0][-1] == "exact"
    record = json.loads(next(iter(tmp_path.glob("comm-*.json"))).read_text())
    assert any(bucket["measured_ms"] for bucket in record["comm"]["buckets"])


def with_collectives_of_its_own(rank: int, size: int) -> None:
    """A script that reduces things itself, in the forward, in the backward and asynchronously."""
    device = models.device()
    layers = [torch.nn.Linear(256, 256) for _ in range(6)]
    net = torch.nn.Sequential(*layers[:3], torch.nn.BatchNorm1d(256), *layers[3:])
    net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(net).to(device)
    model = accelerate(
        DistributedDataParallel(net, device_ids=[device]), algorithm="2d", bucket_bytes=100_000
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(30):
        torch.manual_seed(100 * step + rank)
        x = torch.randn(64, 256, device=device)
        mine = torch.full((1 << 20,), float(rank), device=device)
        work = dist.all_reduce(mine, async_op=True)
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        optimizer.step()
        work.wait()
        assert mine[0].item() == sum(range(size))
    assert models.same_on_all_ranks(model)


@gpus.needs(2, 2)
@pytest.mark.parametrize("connections", ["1", "8"])
def test_beside_a_users_own_collectives(connections: str) -> None:
    """One hardware queue is where collectives issued in different orders would wait in a circle."""
    env = {**ENV, "CUDA_DEVICE_MAX_CONNECTIONS": connections}
    worlds.run([2, 2], with_collectives_of_its_own, gpu=True, env=env)


def dies(rank: int, size: int) -> None:
    import os

    model = accelerate(DistributedDataParallel(models.seeded(), find_unused_parameters=True))
    for step in range(4):
        if rank == size - 1 and step == 2:
            os._exit(9)
        models.backward(model, models.batch(rank, step, torch.float32).to(models.device()))
        torch.cuda.synchronize()


@gpus.needs(2, 2)
def test_a_peer_that_dies_ends_every_rank_within_the_timeout() -> None:
    found = worlds.outcomes([2, 2], dies, gpu=True, env={**ENV, "EVENER_TIMEOUT": "10"}, timeout=60)
    for outcome in found:
        assert outcome.error and "not finished" not in outcome.error, outcome.error
