"""EVENER_PROFILE, where no file can be written: the job goes on without it, and says so."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import evener.ddp
from evener.comm.profile import Recorder, StepProfile
from tests import worlds
from tests.comm.scripts import heard


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


def is_not_profiled(rank: int, size: int) -> list[str]:
    model = evener.ddp.accelerate(DistributedDataParallel(torch.nn.Linear(8, 4)))
    with heard() as said:
        steps = model.evener_steps
        steps._settle([Recorder(torch.device("cpu"))] * len(steps._held))  # no mark was taken
        net = torch.nn.Linear(8, 4)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        evener.ddp.accelerate(DistributedDataParallel(net), optimizer, every=4)
    return [line for line in said.lines if "rofile" in line or "PROFILE" in line]


def test_a_step_that_cannot_be_profiled_is_said(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    first, second = worlds.run([1, 1], is_not_profiled, env={"EVENER_PROFILE": str(path)})
    assert first == [
        f"no profile: {path} is not written, because backward went round the model's forward",
        f"EVENER_PROFILE={path} has no effect: local steps have no profile",
    ]
    assert second == [] and not path.exists()
