"""Ranks that use different parameters in each step, under find_unused_parameters=True: DDP's bits.

A rank that used all waits for nobody's answer; the others must get the right one all the same.
"""

from __future__ import annotations

import torch
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
