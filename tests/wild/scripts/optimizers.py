"""Optimizers and loops that are not one `step()` per backward pass of all ranks: one function each,
named by argument.

redundancy: ZeroRedundancyOptimizer, whose ranks update a part of the weights each. uneven: Join of
a model and of such an optimizer, with unused parameters. muon: orthogonal steps, shared among ranks
by the optimizer's own collectives, beside AdamW. free: a schedule-free optimizer, which trains at
other weights than it evaluates. hooked: each weight is updated as soon as its gradient is there.
replay: PPO, with epochs over what was collected and an end that all ranks agree on.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.wild import harness as wild

STEPS = range(wild.STEPS)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.GELU(),
        nn.Linear(32, 4),
    )  # fmt: skip


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return functional.cross_entropy(model(wild.data(step, 8, 16)), wild.tokens(step, 4, 8))


def redundancy() -> None:
    module = network()
    wild.watch(module)
    model = DistributedDataParallel(module)
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=3e-3
    )
    wild.line(model, optimizer)
    for step in STEPS:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        wild.step(loss)
        if step == wild.STEPS // 2:
            optimizer.consolidate_state_dict(to=0)
            if wild.RANK == 0:
                torch.save(optimizer.state_dict(), wild.OUT / "optimizer.pt")


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.root, self.branches = nn.Linear(16, 32), nn.ModuleList(network() for _ in range(3))
        self.back = nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        return self.branches[which](x + self.back(self.root(x).relu()))


def uneven() -> None:
    module = Branches()
    wild.watch(module)
    model = DistributedDataParallel(module, find_unused_parameters=True)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=3e-3)
    wild.line(model, optimizer)
    half, more = wild.STEPS // 2, 7 * wild.RANK  # a door may come in before the inputs are uneven
    for epoch in (range(half), range(half, wild.STEPS + more)):
        with Join([model, optimizer], enable=epoch.start > 0):
            for step in epoch:
                which = int(wild.tokens(step, 3, 1))
                loss = functional.cross_entropy(
                    model(wild.data(step, 8, 16), which), wild.tokens(step, 4, 8)
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                wild.step(loss)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    x = matrix.bfloat16() / (matrix.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for a, b, c in 5 * [(3.4445, -4.7750, 2.0315)]:
        product = x @ x.T
        x = a * x + (b * product + c * product @ product) @ x
    return (x.T if tall else x).to(matrix.dtype)


class Muon(torch.optim.Optimizer):
    """Each rank makes the steps of its share of the matrices, and all take them from there."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        for group in self.param_groups:
            params = group["params"]
            flat = torch.zeros(sum(p.numel() for p in params))
            parts = flat.split([p.numel() for p in params])
            for at, p in enumerate(params):
                if at % ranks != rank:
                    continue
                state = self.state[p]
                moment = state.setdefault("momentum", torch.zeros_like(p))
                moment.lerp_(p.grad, 1 - group["momentum"])
                step = orthogonal(p.grad.lerp(moment, group["momentum"]))
                parts[at].copy_(step.flatten())
            dist.all_reduce(flat)
            for part, p in zip(parts, params, strict=True):
                p.add_(part.view_as(p), alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def muon() -> None:
    module = network()
    wild.watch(module)
    model = DistributedDataParallel(module)
    matrices = Muon([p for p in module.parameters() if p.ndim == 2])
    vectors = torch.optim.AdamW([p for p in module.parameters() if p.ndim < 2], lr=3e-3, fused=True)
    wild.line(model, matrices, vectors)
    for step in STEPS:
        for part in range(2):
            model.require_backward_grad_sync = part == 1
            loss = loss_of(model, 2 * step + part)
            (loss / 2).backward()
        matrices.param_groups[0]["momentum"] = min(0.95, 0.85 + step / 100)
        for optimizer in (matrices, vectors):
            optimizer.step()
        model.zero_grad(set_to_none=True)
        wild.step(loss)


class Free(torch.optim.Optimizer):
    """SGD at y, between the average x, which is evaluated, and z, which takes the steps."""

    def __init__(self, params: Any, lr: float = 0.5, between: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "between": between, "steps": 0, "training": True})

    @torch.no_grad()
    def _turn(self, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                far = 1 - group["between"] if training else 1 - 1 / group["between"]
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], far)
                group["training"] = training

    def train(self) -> None:
        self._turn(True)

    def eval(self) -> None:
        self._turn(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            share, between, lr = 1 / group["steps"], group["between"], group["lr"]
            for p in group["params"]:
                if p.grad is not None:
                    z = self.state[p].setdefault("z", p.clone(memory_format=torch.preserve_format))
                    p.lerp_(z, share)
                    p.add_(p.grad, alpha=lr * (between * (1 - share) - 1))
                    z.sub_(p.grad, alpha=lr)


def free() -> None:
    module = network()
    wild.watch(module)
    model = DistributedDataParallel(module)
    optimizer = Free(module.parameters())
    wild.line(model, optimizer)
    for step in STEPS:
        if step % 5 == 4:
            model.eval()
            optimizer.eval()
            with torch.no_grad():
                wild.step(loss_of(model, step + 7000))
            optimizer.train()
            model.train()
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wild.step(loss)
    optimizer.eval()


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.Tanh())
        self.actions, self.value = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.body(x)
        return self.actions(y), self.value(y).squeeze(-1)


def replay() -> None:
    module = Actor()
    wild.watch(module)
    model = DistributedDataParallel(module)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2, eps=1e-5)
    wild.line(model, optimizer)
    done = 0
    while done < wild.STEPS:
        states = wild.data(done, 32, 6)
        with torch.no_grad():
            logits, values = model(states)
            chosen = torch.distributions.Categorical(logits=logits)
            actions = wild.tokens(done, 3, 32)
            old = chosen.log_prob(actions)
            gains = (actions == states.argmax(-1) % 3).float() - values
            wanted = gains + values
        for epoch in range(4):
            order = wild.data(done + epoch + 5000, 32).argsort()
            apart = torch.zeros(())
            for part in order.split(8):
                logits, values = model(states[part])
                now = torch.distributions.Categorical(logits=logits)
                ratio = (now.log_prob(actions[part]) - old[part]).exp()
                clipped = ratio.clamp(0.8, 1.2)
                loss = -torch.minimum(ratio * gains[part], clipped * gains[part]).mean()
                loss = loss + 0.5 * (values - wanted[part]).square().mean()
                loss = loss - 0.01 * now.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
                apart = apart + (ratio - 1 - ratio.log()).mean().detach() / 4
                done += 1
                wild.step(loss)
            dist.all_reduce(apart)
            if float(apart) / dist.get_world_size() > 0.01:
                break


KINDS = {f.__name__: f for f in (redundancy, uneven, muon, free, replay)}

if __name__ == "__main__":
    wild.begin(group=True)
    KINDS[sys.argv[1]]()
    wild.end()
