"""DDP's own reducer, given back to a model: the same bits, memory and hooks as plain DDP."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from evener.comm.planner.choose import LIBRARY, Choice, Decision
from evener.comm.planner.trial import Way
from evener.ddp import accelerate
from evener.ddp.model import AcceleratedDataParallel, restore
from tests import worlds


def made(scale: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(scale)
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def wait_with_own(model: Any, form: str) -> None:
    """Have the planner take the model's own reducer in this form with the next step."""
    planner, reducer = model.evener_steps.planner, model.evener
    choices = tuple(Choice(LIBRARY, form, (0.0, 1.0, 0.0)) for _ in reducer.exchanges)
    decision = Decision(choices, tuple(reducer.sequence), False, 1.0, 1.0, 1.0)
    planner._trial = None
    planner.decision = decision
    planner._take(Way("own", decision))


def trained(
    rank: int, form: str, own: bool, begin: int, end: int, accumulate: int, none: bool
) -> list[torch.Tensor]:
    """Weights after 20 steps; from `begin` to `end` on DDP's own reducer, or as plain DDP."""
    net, optimizer = made()
    model: Any = DistributedDataParallel(net)
    if own:
        model = accelerate(model, optimizer, mode="exact")
        model.evener_steps.planner._trial_steps = 0
    torch.manual_seed(7 + rank)
    for step in range(20):
        if own and step == begin:
            wait_with_own(model, form)
            assert all(b.buffer.untyped_storage().nbytes() == 0 for b in model.evener.buckets)
            assert not isinstance(model.reducer, type(model._evener_own._stand_in))
        elif own and step == end:
            model._evener_own.leave()
        elif not own and step == begin and form != "exact":
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        optimizer.zero_grad(set_to_none=none)
        for part in range(accumulate):
            last = part == accumulate - 1
            with contextlib.nullcontext() if last else model.no_sync():
                model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
    if own:
        assert model._evener_own.takes() == (end > 20)
        model.evener_steps.finish("")
        plain = restore(model)
        assert not isinstance(plain, AcceleratedDataParallel)
        plain(torch.randn(4, 32)).sum().backward()  # goes on as plain DDP
    return [p.detach().clone() for p in net.parameters()]


def as_plain(rank: int, size: int) -> None:
    for form, begin, end, accumulate, none in (
        ("exact", 6, 30, 1, True),
        ("exact", 6, 12, 2, True),
        ("exact", 6, 12, 1, False),
        ("bf16", 6, 30, 1, True),
        ("bf16", 6, 30, 2, False),
    ):
        case = (form, begin, end, accumulate, none)
        expected = trained(rank, form, False, begin, end, accumulate, none)
        found = trained(rank, form, True, begin, end, accumulate, none)
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a, b), case


def test_it_gives_ddps_bits() -> None:
    worlds.run([1, 1], as_plain)


def odd(rank: int, size: int) -> None:
    """Copies, evaluation, join and static graphs, while it is on."""
    net, optimizer = made()
    model: Any = accelerate(DistributedDataParallel(net), optimizer, mode="exact")

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()

    for _ in range(6):
        step()
    wait_with_own(model, "exact")
    step()
    assert type(copy.deepcopy(model)) is DistributedDataParallel
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, 32))
    model.train()
    step()
    assert model._evener_own.takes()
    with model.join():
        for _ in range(3 + rank):
            step()
    assert not model._evener_own.takes() and model._evener_own.refusal() == "join() is in use"
    weights = [p.detach().clone() for p in net.parameters()]
    theirs = [torch.empty_like(w) for w in weights]
    for mine, other in zip(weights, theirs, strict=True):
        both = [torch.empty_like(mine), torch.empty_like(mine)]
        torch.distributed.all_gather(both, mine)
        other.copy_(both[1 - rank])
        assert torch.equal(mine, other)


def test_what_else_programs_do_while_it_is_on() -> None:
    worlds.run([1, 1], odd)
