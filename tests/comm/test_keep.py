"""What is not sent yet, through a framework's checkpoint; tests/wild has it in real ones."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evener.ddp import accelerate
from evener.ddp.integrations import keep
from tests import worlds


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))


def train(module: nn.Module, rank: int, steps: int) -> DistributedDataParallel:
    model = accelerate(DistributedDataParallel(module), mode="int8")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    return model


def saved_and_resumed(rank: int, size: int) -> dict[str, bool]:
    first = net()
    assert keep.collect(first) is None
    model = train(first, rank, 6)
    owed = keep.collect(first)
    assert owed is not None
    found = {"owes": any(part.abs().sum() > 0 for part in owed["residual"].values())}
    # A framework saves behind the end of training too, when its wrapper is gone.
    keep.remember(first)
    model.evener.close()
    del model
    after = keep.collect(first)
    found["remembers"] = after is not None and _same(after["residual"], owed["residual"])
    # And loads before the model is accelerated.
    second = net()
    keep.install(second, owed)
    resumed = train(second, rank, 1)
    again = resumed.evener.state_dict()
    found["resumes"] = again["steps"] == 7 and _same(again["residual"], owed["residual"])
    resumed.evener.close()
    # That of another model is not taken, and ends no job.
    third = nn.Linear(64, 8)
    keep.install(third, owed)
    found["refuses"] = not train(third, rank, 2).evener.state_dict()["steps"] > 2
    return found


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_what_is_owed_comes_through_a_checkpoint() -> None:
    for found in worlds.run([1, 1], saved_and_resumed):
        assert all(found.values()) and len(found) == 4, found
