"""Training loops as others write them, for the door: each trains and gives what must be equal.

None is changed for Evener, and none calls it. Each takes the rank and the number of steps.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

Result = dict[str, torch.Tensor]


def data(step: int, rank: int, width: int = 16, rows: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, width, generator=generator)


def layers(width: int = 16, depth: int = 3, out: int = 16) -> nn.Sequential:
    inner = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*inner, nn.Linear(width, out))


def weights(*modules: nn.Module, **more: Any) -> Result:
    found = {
        f"{place} {name}": value.detach().clone()
        for place, module in enumerate(modules)
        for name, value in module.state_dict().items()
    }
    return found | {name: torch.as_tensor(value).clone() for name, value in more.items()}


def recipe(rank: int, steps: int) -> Result:
    """Losses are sums over tokens; gradients are divided by their number on all ranks, in place."""
    model = DistributedDataParallel(layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    norms = []
    for step in range(steps):
        tokens = torch.tensor(0.0)
        for part in range(3):
            batch = data(3 * step + part, rank, rows=4 + (step + part + rank) % 3)
            tokens += batch.shape[0]
            with model.no_sync() if part < 2 else contextlib.nullcontext():
                (model(batch).square().mean(1).sum() * dist.get_world_size()).backward()
        dist.all_reduce(tokens)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1 / tokens)
        norms.append(clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
    return weights(model.module, norms=torch.stack(norms))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layers(depth=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x


def static_graph(rank: int, steps: int) -> Result:
    """DDP's static graph, with checkpointing."""
    model = DistributedDataParallel(Checkpointed(), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(data(step, rank)).square().mean().backward()
        optimizer.step()
    return weights(model.module)


def hook_later(rank: int, steps: int) -> Result:
    """Gradients are views of DDP's buckets; a communication hook comes in the middle."""
    model = DistributedDataParallel(layers(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        if step == steps // 2:
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        optimizer.zero_grad(set_to_none=False)
        model(data(step, rank)).square().mean().backward()
        optimizer.step()
    return weights(model.module)


def functional(rank: int, steps: int) -> Result:
    """The model is called with its own parameters given, as torch.func's examples do."""
    model = DistributedDataParallel(layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        given: dict[str, torch.Tensor] = dict(model.named_parameters())
        functional_call(model, given, (data(step, rank),)).square().mean().backward()
        optimizer.step()
    return weights(model.module)


def averaged(rank: int, steps: int) -> Result:
    """torch's own moving average, of the wrapped model and of the module, after each step."""
    net = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16))
    model = DistributedDataParallel(net)
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    swa = AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        model(data(step, rank)).square().mean().backward()
        optimizer.step()
        ema.update_parameters(net)
        if step % 3 == 2:
            swa.update_parameters(model)
    update_bn([data(step, 0) for step in range(3)], ema)
    return weights(net, ema.module, swa.module)


def looks_between(rank: int, steps: int) -> Result:
    """After each step: the module without its wrapper is evaluated, copied, saved, flattened."""
    model = DistributedDataParallel(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        model(data(step, rank)).square().mean().backward()
        optimizer.step()
        if step % 4 == 0:
            with torch.no_grad():
                seen.append(model.module(data(step, 0)).sum())
        elif step % 4 == 1:
            seen.append(copy.deepcopy(model.module)(data(step, 0)).sum().detach())
        elif step % 4 == 2:
            seen.append(parameters_to_vector(model.parameters()).detach().sum())
    return weights(model.module, seen=torch.stack(seen))


def sharpness_aware(rank: int, steps: int) -> Result:
    """Two backward passes per step, the second at weights that were moved in place (SAM)."""
    model = DistributedDataParallel(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        batch = data(step, rank)
        model(batch).square().mean().backward()
        moved = []
        with torch.no_grad():
            found = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.stack([grad.norm() for grad in found]).norm()
            for parameter in model.parameters():
                assert parameter.grad is not None
                away = parameter.grad * (0.05 / (norm + 1e-12))
                parameter.add_(away)
                moved.append(away)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        with torch.no_grad():
            for parameter, away in zip(model.parameters(), moved, strict=True):
                parameter.sub_(away)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model.module)


def critic(rank: int, steps: int) -> Result:
    """Two models that train in turn, the critic twice as often, with a penalty on its gradient."""
    maker, judge = DistributedDataParallel(layers()), DistributedDataParallel(layers(out=1))
    makes = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.9))
    judges = torch.optim.Adam(judge.parameters(), lr=1e-3, betas=(0.5, 0.9))
    for step in range(steps):
        real, noise = data(step, rank), data(10_000 + step, rank)
        judges.zero_grad()
        fake = maker(noise).detach()
        between = (0.5 * real + 0.5 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(judge.module(between).sum(), between, create_graph=True)
        loss = judge(torch.cat([fake, real])).view(2, -1).mean(1)
        (loss[0] - loss[1] + (slope.norm(dim=1) - 1).square().mean()).backward()
        judges.step()
        if step % 2:
            for parameter in judge.parameters():
                parameter.requires_grad_(False)
            makes.zero_grad()
            (-judge.module(maker(noise)).mean()).backward()
            makes.step()
            for parameter in judge.parameters():
                parameter.requires_grad_(True)
    return weights(maker.module, judge.module)


class Mixture(nn.Module):
    """Experts of their own parameters; a rank uses those that its tokens choose."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.experts = nn.ModuleList(layers(depth=1) for _ in range(6))

    def forward(self, x: torch.Tensor, chosen: Iterable[int]) -> torch.Tensor:
        x = self.embed(x)
        return torch.stack([self.experts[expert](x) for expert in chosen]).sum(0)


def experts(rank: int, steps: int) -> Result:
    """Each rank leaves out other experts in each step; one comes late, one never."""
    model = DistributedDataParallel(Mixture(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        chosen = {(step + rank) % 3, (step * 7 + rank) % 4, 4 if step > steps // 2 else 0}
        model(data(step, rank), sorted(chosen)).square().mean().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return weights(model.module)


def parametrized(rank: int, steps: int) -> Result:
    """Weights that are made of others in each forward; parameters join the optimizer later."""
    net = nn.Sequential(
        weight_norm(nn.Linear(16, 16)), nn.Tanh(), spectral_norm(nn.Linear(16, 16)), layers()
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net[:3].parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        if step == steps // 3:
            optimizer.add_param_group({"params": list(net[3].parameters()), "lr": 0.01})
        model.zero_grad()
        model(data(step, rank)).square().mean().backward()
        optimizer.step()
    return weights(net)


class Lookahead:
    """A wrapper that is no Optimizer: every five steps weights go halfway back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0
        self.slow = [[p.detach().clone() for p in g["params"]] for g in optimizer.param_groups]

    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1
        if self.steps % 5:
            return
        for group, slow in zip(self.optimizer.param_groups, self.slow, strict=True):
            for parameter, behind in zip(group["params"], slow, strict=True):
                behind.add_(parameter.data - behind, alpha=0.5)
                parameter.data.copy_(behind)


def lookahead(rank: int, steps: int) -> Result:
    """Weights are written through `.data`, behind autograd's back."""
    model = DistributedDataParallel(layers())
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = Lookahead(inner)
    for step in range(steps):
        inner.zero_grad()
        model(data(step, rank)).square().mean().backward()
        optimizer.step()
    return weights(model.module)


def compiled(rank: int, steps: int) -> Result:
    """torch.compile round DDP, in the backend that compiles nothing."""
    model = DistributedDataParallel(layers())
    whole = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        whole(data(step, rank)).square().mean().backward()
        optimizer.step()
    return weights(model.module)


def distilled(rank: int, steps: int) -> Result:
    """A teacher, also wrapped, gives the targets; the student evaluates now and then, and its
    teacher takes its weights."""
    student, teacher = DistributedDataParallel(layers()), DistributedDataParallel(layers())
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        with torch.no_grad():
            target = teacher(data(step, rank))
        nn.functional.mse_loss(student(data(step, rank)), target).backward()
        optimizer.step()
        if step % 7 == 6:
            student.eval()
            with torch.inference_mode():
                seen.append(student(data(step, 0)).sum().item())
            student.train()
            with torch.no_grad():
                for mine, its in zip(teacher.parameters(), student.parameters(), strict=True):
                    mine.lerp_(its, 0.1)
    return weights(student.module, teacher.module, seen=torch.tensor(seen))


PROGRAMS: tuple[Callable[[int, int], Result], ...] = (
    recipe, static_graph, hook_later, functional, averaged, looks_between, sharpness_aware, critic,
    experts, parametrized, lookahead, compiled, distilled,
)  # fmt: skip
