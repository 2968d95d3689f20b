"""The guard's limits: when it looks, what it takes from whom, and that all ranks do the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from evener.comm import guard, wires
from evener.comm.options import Options
from evener.comm.wires import Limits
from evener.ddp import accelerate
from tests import worlds

SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW


def test_it_looks_early_and_then_every_so_many_steps() -> None:
    def checked(every: int, strict: bool, until: int) -> list[int]:
        return [step for step in range(1, until) if guard.due(step, every, strict)]

    assert checked(200, False, 801) == [6, 200, 400, 600, 800]
    assert checked(200, True, 801) == [6, 25, 100, 200, 400, 600, 800]
    for strict in (False, True):
        assert checked(2, strict, 10) == [2, 4, 6, 8]
        assert checked(1, strict, 5) == [1, 2, 3, 4]
        assert checked(0, strict, 1000) == []


def test_figures_of_sums() -> None:
    figures = guard.Figures.of([9.0, 36.0, 2.0, 1.0, 6.0, 4.0, 3.0, 10.0])
    assert figures.cosine == 6 / 8 and figures.residual_ratio == 0.5 and figures.gain == 0.25
    assert figures.least_cosine == pytest.approx(4 / 30**0.5)
    assert figures.past(Limits(residual=0.49)) and figures.past(Limits(cosine=0.76))
    assert figures.past(Limits(each=0.74)) and not figures.past(Limits(each=0.73))
    assert not figures.past(Limits(residual=0.5, cosine=0.75))
    nothing = guard.Figures.of([0.0] * 5)
    assert not nothing.past(Limits(residual=0.0, cosine=1.0))
    # An overflow, which a loss scaler skips, is not judged.
    for bad in (math.inf, math.nan):
        assert not guard.Figures.of([bad] * 5).past(Limits(residual=0.1, cosine=0.9))
        # One that the form has made is.
        assert guard.Figures.of([0.0, 1.0, bad, bad, 1.0]).past(Limits(cosine=0.9))
    # Nothing came, although there was something.
    lost = guard.Figures.of([0.0, 1.0, 0.0, 0.0, 1.0])
    assert lost.cosine == 0 and lost.past(Limits())


@pytest.mark.parametrize("name", wires.names())
def test_limits_by_optimizer_and_the_users(name: str) -> None:
    form = wires.get(name)
    loose, strict = (guard.limits(Options(), form, linear) for linear in (True, False))
    assert loose == form.limits
    assert strict == (form.strict or form.limits)
    assert strict.residual <= loose.residual
    assert strict.residual == 0.25 or not form.late, "those that send late"
    mine = Options(guard_residual=7.0, guard_cosine=0.5)
    assert (
        guard.limits(mine, form, False)
        == guard.limits(mine, form, True)
        == Limits(7.0, 0.5, form.limits.each)
    )


class Own(SGD):
    """As a front door makes one."""


def test_which_optimizer_steps_the_parameters() -> None:
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    for parameter in (*model.parameters(), *other.parameters()):
        parameter.grad = torch.ones_like(parameter)
    found = guard.Optimizers(model.parameters())
    ADAMW(model.parameters()).step()  # nobody looks yet
    assert not found.known and not found.linear and "not seen" in str(found)
    found.watch()
    found.watch()
    ADAMW(other.parameters()).step()
    assert not found.known
    Own([model.weight], lr=0.1).step()
    assert found.known and found.linear and str(found) == "Own"
    torch.optim.RMSprop([model.bias]).step()
    assert not found.linear and str(found) == "Own and RMSprop"
    found.settle()
    found.settle()
    seen = str(found)
    torch.optim.Adagrad(model.parameters()).step()
    assert str(found) == seen


def fallen(rank: int, size: int, kinds: list[type[Any]], given: bool, form: str) -> list[str]:
    """The weights' form after each of 16 steps; rank r's optimizer is of `kinds[r]`."""
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 8))
    model = DistributedDataParallel(net)
    optimizer = kinds[rank](model.parameters(), lr=1e-3)
    accelerate(model, optimizer if given else None, mode=form, ratio=0.01)
    generator = torch.Generator().manual_seed(rank)
    forms = []
    for _ in range(16):
        x = torch.randn(32, 64, generator=generator)
        optimizer.zero_grad()
        (model(x) - x[:, :8].sin()).square().mean().backward()
        optimizer.step()
        found = {e.wire.name for e in model.evener.exchanges if not e.bucket.dense}
        forms.append(",".join(sorted(found)))
    linear = model.evener.optimizers.linear
    model.evener_steps.finish("the test's end")
    model.evener.close()
    assert linear == issubclass(kinds[rank], SGD)
    return forms


# Checked in steps 6 and 16; the first step is exact.
ENVIRONMENT = {"EVENER_GUARD_STEPS": "16", "LIGHT_TOPK_THRESHOLD": "0"}


@pytest.mark.parametrize("given", [True, False], ids=["given", "seen"])
@pytest.mark.parametrize("form", ["topk", "topk-chunk"])
def test_top_k_goes_under_adam_and_stays_under_sgd(form: str, given: bool) -> None:
    stays = worlds.run([1, 1], fallen, [SGD, SGD], given, form, env=ENVIRONMENT)
    assert stays == [[form] * 16] * 2
    goes = worlds.run([1, 1], fallen, [ADAMW, ADAMW], given, form, env=ENVIRONMENT)
    assert goes[0] == goes[1]
    assert goes[0] == [*[form] * 5, *["int8"] * 11]


def test_int8_stays_under_adam() -> None:
    found = worlds.run([1, 1], fallen, [ADAMW, ADAMW], True, "int8", env=ENVIRONMENT)
    assert found == [["int8"] * 16] * 2


def test_ranks_agree_where_their_optimizers_do_not() -> None:
    """The guard's answer is one for all: the stricter."""
    found = worlds.run([1, 1], fallen, [SGD, ADAMW], False, "topk", env=ENVIRONMENT)
    assert found[0] == found[1] and found[0][-1] == "int8"
