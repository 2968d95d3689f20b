"""EVENER_PROFILE names a file that cannot be written: the job goes on without it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import evener.ddp
from evener.comm.profile import StepProfile
from tests import worlds


def train(rank: int, size: int) -> int:
    model = evener.ddp.accelerate(DistributedDataParallel(torch.nn.Linear(8, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(40):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    return rank


def test_a_profile_is_written_or_the_job_goes_on_without(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    worlds.run([1, 1], train, env={"EVENER_PROFILE": str(path)})
    assert StepProfile.load(path).compute_ms > 0
    in_the_way = {"EVENER_PROFILE": str(path / "below" / "a" / "file")}
    assert worlds.run([1, 1], train, env=in_the_way) == [0, 1]
