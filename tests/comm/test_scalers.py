"""Residuals follow a GradScaler that nobody named."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from evener.comm import scalers
from evener.comm.state import LossScale
from evener.ddp import accelerate
from tests import worlds
from tests.comm import models


def test_the_methods_are_torchs_own_again() -> None:
    step, unscale = GradScaler.step, GradScaler.unscale_
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    scale, second = LossScale(), LossScale()
    scale.watch(model.parameters())
    second.watch(other.parameters())
    assert GradScaler.step is not step and GradScaler.unscale_ is not unscale
    off = GradScaler("cpu", enabled=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    off.step(sgd)
    assert not scale.active
    scaler = GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.ones(1, 3)).sum()).backward()
    scaler.unscale_(sgd)
    assert scale.scaler is scaler and not second.active
    assert scale.value() == 8.0
    scaler.step(sgd)
    scaler.update()
    assert second._watcher is not None
    second.settle()
    second.settle()
    assert GradScaler.step is step and GradScaler.unscale_ is unscale


def test_one_that_was_named_or_is_gone_is_not_looked_for() -> None:
    step = GradScaler.step
    scale = LossScale(GradScaler("cpu"))
    scale.watch(torch.nn.Linear(2, 2).parameters())
    assert GradScaler.step is step
    scale = LossScale()
    scale.watch(torch.nn.Linear(2, 2).parameters())
    del scale
    gc.collect()
    assert not scalers._WATCHERS
    last = LossScale()
    last.watch(())
    last.settle()
    assert GradScaler.step is step


SCALES = [
    64.0,
    64.0,
    128.0,
    128.0,
    64.0,
    64.0,
    128.0,
]  # what growth every 2 steps and one skip give


def follows(rank: int, size: int, door: str) -> None:
    """What is applied, unscaled, and what is kept back add up to all gradients that came."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 50)
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=2)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    if door == "horovod":
        import evener.horovod.torch as hvd

        hvd.init()
        trained, optimizer = model, hvd.DistributedOptimizer(sgd, model.named_parameters())
    else:
        trained = accelerate(DistributedDataParallel(model), ratio=0.05, mode=door)
        optimizer = sgd
    before = model.weight.detach().double().clone()
    wanted = torch.zeros_like(before)
    skipped = 0
    for step in range(7):
        assert scaler.get_scale() == SCALES[step], step
        generator = torch.Generator().manual_seed(100 * step + rank)
        gradient = torch.randn(50, 64, generator=generator)
        wanted += models.mean_over_ranks({"weight": gradient})["weight"]
        gradient[0, 0] = torch.inf if step == 3 and rank == 0 else gradient[0, 0]
        optimizer.zero_grad()
        bias = model.bias.sum()
        if door != "horovod":
            trained(torch.zeros(1, 64))  # as a step has it
        scaler.scale((model.weight * gradient).sum() + bias).backward()
        if door == "horovod":
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < SCALES[step]
    assert skipped == 1
    reducer = optimizer._reducer if door == "horovod" else trained.evener
    owed = reducer.state_dict()["residual"]["weight"].double()
    applied = before - model.weight.detach().double()
    # The one entry that was infinite is lost, as it would be without compression.
    difference = applied + owed - wanted
    difference[0, 0] = 0.0
    assert difference.abs().max() < 1e-4, difference.abs().max()


@pytest.mark.parametrize("door", ["topk", "topk-chunk", "lowrank1"])
def test_the_ddp_door_follows_a_scaler_it_was_not_given(door: str) -> None:
    env = {"LIGHT_TOPK_THRESHOLD": "0", "EVENER_GUARD_STEPS": "0"}
    worlds.run([1, 1], follows, door, env=env)


def test_horovods_door_follows_a_scaler() -> None:
    env = {
        "LIGHT_TOPK_ALLREDUCE": "1",
        "LIGHT_TOPK_RATIO": "0.05",
        "LIGHT_TOPK_THRESHOLD": "0",
        "EVENER_GUARD_STEPS": "0",
    }
    worlds.run([1, 1], follows, "horovod", env=env)
