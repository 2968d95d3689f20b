"""Ranks that use different parameters in each step, under find_unused_parameters=True: DDP's bits.

A rank that used all waits for nobody's answer; the others must get the right one all the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evener.ddp import accelerate
from tests import worlds

# By step what each of two ranks uses.
USED = [
    ("bcd", "bcd"), ("bd", "cd"), ("b", "b"), ("bcd", "b"), ("", "bcd"), ("d", "d"),
    ("bcd", "bcd"), ("c", "c"), ("bcd", ""), ("b", "c"), ("bcd", "bcd"), ("", ""),
]  # fmt: skip


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.others = nn.ModuleDict({name: nn.Linear(4, 4) for name in "bcd"})

    def forward(self, x: torch.Tensor, used: str) -> torch.Tensor:
        y = self.a(x)
        for name in used:
            y = y + self.others[name](x)
        return y


def trained(rank: int, size: int) -> list[bytes]:
    """Weights after plain DDP, accelerate(model), accelerate(model, optimizer)."""
    found = []
    for kind in ("plain", "model", "optimizer"):
        torch.manual_seed(0)
        net = Branches()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        model = DistributedDataParallel(net, find_unused_parameters=True)
        if kind != "plain":
            model = accelerate(model, optimizer if kind == "optimizer" else None)
        for step, used in enumerate(2 * USED):
            torch.manual_seed(10 * step + rank)
            optimizer.zero_grad()
            model(torch.randn(3, 4), used[rank]).square().mean().backward()
            optimizer.step()
        if kind != "plain":
            model.evener_steps.finish("")  # type: ignore[attr-defined]
        weights = torch.cat([p.detach().flatten() for p in net.parameters()])
        found.append(weights.numpy().tobytes())
    return found


def test_ranks_that_use_different_parameters_stay_ddps() -> None:
    one, other = worlds.run([1, 1], trained)
    assert one == other and len(set(one)) == 1


# Forms with error feedback, and what they are given besides.
FEEDBACK = {"int8": {}, "int4": {}, "lowrank1": {}, "topk": {"ratio": 0.02}, "topk-chunk": {}}


def lost(rank: int, size: int) -> dict[str, float]:
    """By form, the share of all gradients of a branch that was neither applied nor kept back.

    No rank uses the branch in every second step, nor zeroes its gradient in the last of these.
    """
    found = {}
    for form, options in FEEDBACK.items():
        torch.manual_seed(0)
        net = Branches()
        net.others["b"] = nn.Linear(128, 128, bias=False)
        net.others["c"] = net.others["d"] = nn.Identity()
        net.a = nn.Linear(128, 128, bias=False)
        wrapped = DistributedDataParallel(net, find_unused_parameters=True)
        model = accelerate(wrapped, mode=form, **options)  # type: ignore[arg-type]
        weight = net.others["b"].weight
        given, got = torch.zeros(128, 128), torch.zeros(128, 128)
        for step in range(9):
            generator = torch.Generator().manual_seed(100 * step + rank)
            x = torch.randn(8, 128, generator=generator)
            if step != 7:
                model.zero_grad()
            before = None if weight.grad is None else weight.grad.clone()
            model(x, "b" if step % 2 == 0 else "").sum().backward()
            if step % 2 == 0:
                mine = torch.ones(8, 128).T @ x / size
                dist.all_reduce(mine)
                given += mine
                got += weight.grad
            elif step == 7:
                assert before is not None and torch.equal(weight.grad, before)
            else:
                assert weight.grad is None
        owed = model.evener.state_dict()["residual"].get("others.b.weight", torch.zeros(128, 128))  # type: ignore[union-attr, operator]
        found[form] = float((given - got - owed).norm() / given.norm())
    return found


def test_nothing_is_lost_of_what_is_not_always_used() -> None:
    for found in worlds.run([1, 1], lost, env={"LIGHT_TOPK_THRESHOLD": "1024"}):
        assert all(share < 1e-5 for share in found.values()), found
