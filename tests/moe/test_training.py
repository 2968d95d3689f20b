"""300 steps with our experts and with a dense loop over them: the same losses, nothing dropped."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from evener import moe
from tests import worlds
from tests.moe import dense

STEPS = 300


class Looped(moe.Experts):
    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
                ) -> torch.Tensor:  # fmt: skip
        return dense.dense(x, experts, weights, self)


def model(loop: bool, experts: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    layer = moe.MoE(16, 16, experts, 2, shared=16, score="sigmoid")
    if loop:
        layer.experts.__class__ = Looped
    made = nn.Sequential(nn.Embedding(32, 16), layer, nn.RMSNorm(16), nn.Linear(16, 32))
    return made.double()


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, 32, (24, 1), generator=generator)
    return (start + torch.arange(5) * (1 + start % 3)) % 32


def losses(net: nn.Sequential, steps: int, rank: int = 0, size: int = 1) -> list[float]:
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    device, found = next(net.parameters()).device, []
    for step in range(steps):
        tokens = batch(step)[rank::size].to(device)
        out = net(tokens[:, :-1])
        loss = functional.cross_entropy(out.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        if size > 1:
            for name, parameter in net.named_parameters():
                if ".experts." not in name:
                    torch.distributed.all_reduce(parameter.grad)
                    parameter.grad /= size
        optimizer.step()
        loss = loss.detach()
        if size > 1:
            torch.distributed.all_reduce(loss)
        found.append(float(loss) / size)
    return found


def test_losses_are_those_of_a_dense_loop_for_300_steps() -> None:
    net = model(False)
    ours, theirs = losses(net, STEPS), losses(model(True), STEPS)
    assert ours[-1] < 0.5 * ours[0]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-7, atol=1e-9)
    # Dropless: every choice of every token was taken.
    assert int(net[1].experts.load.sum()) == STEPS * 24 * 4 * 2


def over_ranks(rank: int, size: int) -> list[float]:
    return losses(moe.spread(model(False), size, chunks=2), 40, rank, size)


def test_over_ranks_they_are_the_same() -> None:
    one = losses(model(True), 40)
    for found in worlds.run([1, 1], over_ranks):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(one), rtol=1e-7, atol=1e-9)
