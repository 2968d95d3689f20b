"""Small models with what makes a reducer stumble, and gradients to compare with."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


class Awkward(nn.Module):
    """channels_last convolution, tied weights, a parameter that nobody uses, odd sizes."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 7, 3, padding=1)
        self.scale = nn.Parameter(torch.ones(7, 1, 1))
        self.embed = nn.Linear(7 * 16, 33, bias=False)
        self.mix = nn.Linear(33, 33)
        self.head = nn.Linear(7 * 16, 33, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.randn(5))
        self.sometimes = nn.Linear(33, 33)
        self.to(dtype=dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor, use_all: bool = True) -> torch.Tensor:
        y = (self.conv(x) * self.scale).relu().flatten(1)
        z = self.mix(self.embed(y)) + self.head(y)
        return self.sometimes(z) if use_all else z


def device() -> torch.device:
    """Where this rank trains: its GPU in a world that has them."""
    if dist.get_backend() != "gloo":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def seeded(dtype: torch.dtype = torch.float32) -> Awkward:
    torch.manual_seed(7)
    return Awkward(dtype).to(device())


def batch(rank: int, step: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(6, 3, 4, 4, generator=generator)
    return x.to(dtype).to(memory_format=torch.channels_last)


def backward(model: nn.Module, x: torch.Tensor, use_all: bool = True) -> None:
    """A loss whose gradients are neither tiny nor huge."""
    (model(x, use_all).float() ** 2).mean().backward()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    module = getattr(model, "module", model)
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def mean_over_ranks(local: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """The float64 reference: every rank's own gradients, gathered and averaged. Collective."""
    everyone: list[dict[str, torch.Tensor | None]] = [{} for _ in range(dist.get_world_size())]
    on_cpu = {name: None if g is None else g.cpu() for name, g in local.items()}
    dist.all_gather_object(everyone, on_cpu)
    means = {}
    for name in local:
        found = [g[name] for g in everyone]
        present = [g.double() for g in found if g is not None]
        if present:
            means[name] = torch.stack(present).sum(0) / len(found)
    return means


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def same_on_all_ranks(model: nn.Module) -> bool:
    """Whether every rank holds the same gradients, bit by bit. Collective."""
    mine = b"".join(
        name.encode() + (b"" if g is None else raw(g)) for name, g in gradients(model).items()
    )
    everyone: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return all(other == mine for other in everyone)
