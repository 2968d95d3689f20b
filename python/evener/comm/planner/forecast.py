"""A step's profile for a model that does not run here, from its shapes alone.

The model is built without memory (torch's meta device) and its forward is traced: every leaf
module's share of the time is its arithmetic plus the memory that its outputs touch, weighed by
`BALANCE`. Backward takes twice as long as forward and runs the other way round. That fixes when
each parameter is needed and when its gradient is complete, in shares of a step; how long a step
takes has to be said (or be measured, which `evener plan --profile` reads).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from evener.comm.buckets import ALIGN, group_by_size, partitions
from evener.comm.profile import BucketProfile, StepProfile

# Operations that a GPU of today does in the time in which it moves one byte.
BALANCE = 100.0
BACKWARD = 2.0


def profile_of(
    build: Callable[[], nn.Module],
    inputs: Callable[[], tuple[Any, ...]],
    compute_ms: float,
    bucket_bytes: int = 25 << 20,
    partition_bytes: int = 32 << 20,
) -> StepProfile:
    """The profile of a step that computes for `compute_ms`. `build` and `inputs` run on meta.

    Buckets are laid out as in training with lossy forms, on nodes of one rank.
    """
    with torch.device("meta"):
        model = build().train()
        given = inputs()
    shares = _shares(model, given)
    total = sum(weight for _, weight in shares) or 1.0
    forward = compute_ms / (1 + BACKWARD)
    backward = compute_ms - forward
    need: dict[int, float] = {}
    ready: dict[int, float] = {}
    before = 0.0
    for parameters, weight in shares:
        for parameter in parameters:
            need.setdefault(id(parameter), forward * before / total)
            # Backward ends with the first use, so the first one decides.
            ready.setdefault(id(parameter), backward * (1 - before / total))
        before += weight
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    parameters = [p for _, p in trained]
    order = sorted(range(len(trained)), key=lambda i: (ready.get(id(parameters[i]), backward), -i))
    buckets = []
    dense = frozenset(i for i, p in enumerate(parameters) if p.dim() <= 1)
    for group in group_by_size(parameters, order, bucket_bytes, dense):
        first, numel = parameters[group[0]], sum(parameters[i].numel() for i in group)
        last = max(ready.get(id(parameters[i]), backward) for i in group)
        use = min(need.get(id(parameters[i]), forward) for i in group)
        cut = [numel]
        if len(group) == 1:
            cut = partitions(numel, first.element_size(), partition_bytes, ALIGN)
        name = trained[group[0]][0]
        for part, size in enumerate(cut):
            said = f"{name}, {part + 1} of {len(cut)}" if len(cut) > 1 else name
            buckets.append(BucketProfile(said, size, first.element_size(), last, use))
    return StepProfile(forward, backward, 0.0, tuple(buckets))


def _shares(model: nn.Module, inputs: tuple[Any, ...]) -> list[tuple[list[nn.Parameter], float]]:
    """Parameters and weight of every call of a module that has parameters or no children."""
    found: list[tuple[list[nn.Parameter], float]] = []
    counter = FlopCounterMode(display=False)
    began: list[float] = []

    def enters(module: nn.Module, args: Any) -> None:
        del module, args
        began.append(counter.get_total_flops())

    def leaves(module: nn.Module, args: Any, output: Any) -> None:
        del args
        flops = counter.get_total_flops() - began.pop()
        moved = 2 * sum(t.numel() * t.element_size() for t in _tensors(output))
        own = list(module.parameters())
        found.append((own, flops + BALANCE * moved))

    handles = []
    for module in _units(model):
        handles += [module.register_forward_pre_hook(enters), module.register_forward_hook(leaves)]
    try:
        with counter:
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _units(module: nn.Module) -> Iterable[nn.Module]:
    """Modules that are looked at as one: leaves, and those with parameters of their own."""
    if not list(module.children()) or list(module.parameters(recurse=False)):
        yield module
        return
    for child in module.children():
        yield from _units(child)


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
