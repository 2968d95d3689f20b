"""What one rank does alone: plain DDP trains on, and so does Evener, with DDP's weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evener.comm.errors import CommError
from evener.ddp import accelerate
from tests import worlds


def trained(rank: int, kind: str, ours: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    if kind == "compiled" and rank == 1:
        net = torch.compile(net, backend="eager")
    model: Any = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if kind == "wrapped step" and rank == 0:
        inner = optimizer.step
        optimizer.step = lambda *args: inner(*args)  # type: ignore[method-assign]
    if ours:
        model = accelerate(model, optimizer, mode="exact")
    for step in range(60):
        generator = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(8, 16, generator=generator)).square().mean().backward()
        optimizer.step()
        if kind == "evaluation" and step > 2:
            if rank == 0:
                model(torch.ones(8, 16))
            dist.barrier()  # which a rank that waits for the others' next step never reaches
    if ours:
        model.evener_steps.finish("")
    return [p.detach().clone() for p in model.parameters()]


def alone(rank: int, size: int) -> dict[str, bool]:
    found = {}
    for kind in ("evaluation", "wrapped step", "compiled"):
        plain, ours = (trained(rank, kind, which) for which in (False, True))
        found[kind] = all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    return found


def test_what_one_rank_does_alone_hangs_nobody() -> None:
    env = {"EVENER_TRIAL_STEPS": "1"}
    for found in worlds.run([1, 1], alone, env=env):
        assert all(found.values()), found


def differ(rank: int, size: int) -> list[str]:
    """What is said where ranks give different modes, and have different settings."""
    said = []
    for mode, steps in (((None, "exact")[rank], "2"), ("exact", str(rank))):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(CommError) as raised:
            patch.setenv("EVENER_TRIAL_STEPS", steps)
            accelerate(DistributedDataParallel(nn.Linear(4, 4)), mode=mode)
        said.append(str(raised.value))
    return said


def test_what_differs_between_ranks_is_named() -> None:
    for mode, steps in worlds.run([1, 1], differ):
        assert "rank 0 has mode = None, rank 1 has 'exact'" in mode
        assert "EVENER_TRIAL_STEPS = 0" in steps
