"""`precision.follow` on small models of torch: faults that are injected, ranks, records."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from evener import precision
from evener.errors import UsageError
from evener.precision import Limits, State
from tests import worlds

QUICK = Limits(settle=30, hold=60, longest_hold=240)


class Tower(nn.Module):
    """A classifier. spike: noise on the logits in half precision only; explode: what they are
    multiplied by, and divided by again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 4)
        self.spike, self.explode = 0.0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        narrow = hidden.dtype != torch.float32
        out = self.last(torch.tanh(hidden)) * self.explode / self.explode
        if narrow and self.spike:
            out = out + self.spike * torch.randn_like(out)
        return out.float()


def batch(step: int, shift: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(64, 8, generator=generator)
    return x, ((x[:, 0] + shift) > 0).long() + 2 * (x[:, 1] > shift).long()


def train(policy: precision.torch.Policy, steps: int, begin: int = 0, shift: float = 0.0) -> None:
    for step in range(begin, begin + steps):
        x, y = batch(step, shift * (step - begin))
        policy.step(lambda x=x, y=y: nn.functional.cross_entropy(policy.model(x), y))


def made(dtype: torch.dtype = torch.bfloat16) -> precision.torch.Policy:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    policy = precision.follow(model, optimizer, dtype=dtype, limits=QUICK)
    train(policy, 120)
    assert policy.half
    return policy


def test_it_learns_and_is_mostly_half() -> None:
    policy = made()
    assert policy.machine.half_steps == 120 - QUICK.settle
    x, y = batch(1)
    assert (policy.model(x).argmax(1) == y).float().mean() > 0.8
    assert all(p.dtype == torch.float32 for p in policy.model.parameters())


def test_a_spike_of_half_precision() -> None:
    policy = made()
    policy.model.spike = 20.0
    train(policy, 20, 120)
    assert policy.machine.state is State.HOLD
    assert policy.events[-1].cause == "loss"


def test_an_exploding_layer_in_float16() -> None:
    policy = made(torch.float16)
    policy.model.explode = 1e6  # beyond what float16 holds
    train(policy, 20, 120)
    assert policy.machine.state is State.HOLD
    assert policy.events[-1].cause in ("halvings", "loss")
    assert all(torch.isfinite(p).all() for p in policy.model.parameters())


def test_gradients_that_underflow_in_float16() -> None:
    policy = made(torch.float16)
    # The loss is as small as if it were divided by many; the scale has grown little yet.
    policy.scaler.update(new_scale=1.0)
    x, y = batch(0)
    for _ in range(20):
        policy.step(lambda: nn.functional.cross_entropy(policy.model(x), y) * 1e-6)
    assert policy.machine.state is State.HOLD
    assert policy.events[-1].cause == "underflow"


def test_drifting_data_switch_nothing() -> None:
    policy = made()
    before = policy.machine.switches
    train(policy, 300, 120, shift=0.005)
    x, y = batch(1)
    policy.step(lambda: nn.functional.cross_entropy(policy.model(x), 3 - y))  # wrong labels
    assert policy.machine.switches == before


@pytest.mark.parametrize("look", ["_probe", "_zeroed"])
def test_a_look_leaves_the_model_as_it_is(look: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    policy = precision.follow(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = batch(0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    difference = getattr(policy, look)(lambda: nn.functional.cross_entropy(model(x), y))
    assert 0 <= difference < 0.05
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and model[1].training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENER_STATS_DIR", str(tmp_path))
    policy = made()
    policy._journal.close()
    (file,) = tmp_path.glob("precision-*.json")
    record = json.loads(file.read_text())["precision"]
    assert record["state"] == "HALF"
    assert [event["cause"] for event in record["events"]] == ["settled"]


def test_what_cannot_be() -> None:
    model = nn.Linear(2, 2).bfloat16()
    with pytest.raises(UsageError, match="bfloat16"):
        precision.follow(model, torch.optim.SGD(model.parameters(), lr=0.1))


def ranks(rank: int, size: int) -> list[tuple[int, str]]:
    policy = made()
    if rank == 1:
        policy.model.spike = 30.0  # on one rank only
    train(policy, 20, 120)
    assert math.isfinite(policy.machine._slow)
    return [(event.step, event.cause) for event in policy.events]


def statistics(rank: int, _: int) -> None:
    """DistributedDataParallel sends rank 0's statistics in each forward pass, in a probe's too."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model = nn.parallel.DistributedDataParallel(plain)
    policy = precision.follow(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        plain[1].running_mean.fill_(rank)
    x = torch.zeros(4, 8)
    policy._probe(lambda: model(x).square().mean())
    assert plain[1].running_mean.eq(rank).all()
    model(x).sum().backward()  # sends them, as it would have without a look
    assert plain[1].running_mean.abs().max() < 0.5


def test_a_look_leaves_each_ranks_statistics() -> None:
    worlds.run([2], statistics)


def test_ranks_switch_in_the_same_step() -> None:
    first, second = worlds.run([2], ranks)
    assert first == second
    assert [cause for _, cause in first] == ["settled", "loss"]
