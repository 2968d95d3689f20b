"""A step's profile for a model that does not run here, from its shapes alone.

The model is built without memory (torch's meta device) and its forward is traced: every leaf
module's share of the time is its arithmetic plus the memory that its outputs touch, weighed by
`BALANCE`. Backward takes twice as long as forward and runs the other way round. That fixes when
each parameter is needed and when its gradient is complete, in shares of a step; how long a step
takes has to be said (or be measured, which `evener plan --profile` reads).

Embeddings may be taken apart (`evener.comm.parts`), with as many rows as there are symbols in a
batch: the most that there can be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from evener.base import settings
from evener.comm import lookups, parts
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
    traced = Traced.of(build, inputs)
    return traced.profile(compute_ms, bucket_bytes, partition_bytes, {})


@dataclass(frozen=True)
class Traced:
    """A model's forward. `shares`: parameters and weight of each call, in order; `symbols`: looked
    up in a step, by the id of the embedding's weight."""

    model: nn.Module
    shares: list[tuple[list[nn.Parameter], float]]
    symbols: dict[int, int]

    @classmethod
    def of(cls, build: Callable[[], nn.Module], inputs: Callable[[], tuple[Any, ...]]) -> Traced:
        """Build it on meta, and run it once."""
        with torch.device("meta"):
            model = build().train()
            given = inputs()
        return cls(model, *_shares(model, given))

    def rows(self, ranks: int, *, shared: bool) -> dict[int, int]:
        """Parameters worth taking apart among this many ranks, by id: rows per step, at most.

        `shared`: also those that a layer uses too.
        """
        least = settings.EVENER_ROWS_THRESHOLD.get()
        large = {
            id(p): index
            for index, p in enumerate(self.model.parameters())
            if p.requires_grad and p.dim() == 2 and 0 < least <= p.numel() * p.element_size()
        }
        known = lookups.candidates(self.model, large)
        return {
            id(p): rows
            for p in self.model.parameters()
            if (rows := self.symbols.get(id(p), 0))
            and known.get(large.get(id(p), -1)) in ((True, False) if shared else (False,))
            and parts.worth(rows, ranks, p.shape[0])
        }

    def profile(
        self,
        compute_ms: float,
        bucket_bytes: int = 25 << 20,
        partition_bytes: int = 32 << 20,
        rows: Mapping[int, int] | None = None,
    ) -> StepProfile:
        """See `profile_of`. `rows`: what is taken apart, as the method of that name gives it."""
        rows = rows or {}
        total = sum(weight for _, weight in self.shares) or 1.0
        forward = compute_ms / (1 + BACKWARD)
        backward = compute_ms - forward
        need: dict[int, float] = {}
        ready: dict[int, float] = {}
        early: dict[int, float] = {}
        before = 0.0
        for used, weight in self.shares:
            for parameter in used:
                need.setdefault(id(parameter), forward * before / total)
                # Backward ends with the first use, so the first one decides.
                ready.setdefault(id(parameter), backward * (1 - before / total))
                early[id(parameter)] = backward * (1 - before / total)
            before += weight
        trained = [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]
        parameters = [p for _, p in trained]

        def complete(index: int) -> float:
            key = id(parameters[index])
            return (early if key in rows else ready).get(key, backward)

        order = sorted(range(len(trained)), key=lambda i: (complete(i), -i))
        buckets = []
        dense = frozenset(i for i, p in enumerate(parameters) if p.dim() <= 1)
        alone = frozenset(i for i, p in enumerate(parameters) if id(p) in rows)
        for group in group_by_size(parameters, order, bucket_bytes, dense, alone):
            first, numel = parameters[group[0]], sum(parameters[i].numel() for i in group)
            last = max(complete(i) for i in group)
            use = min(need.get(id(parameters[i]), forward) for i in group)
            name, key, itemsize = trained[group[0]][0], id(first), first.element_size()
            cut = [numel]
            if len(group) == 1:
                cut = partitions(numel, itemsize, partition_bytes, ALIGN)
            if key in rows and early[key] == ready[key]:
                cut = []  # a lookup is its only use
            for part, size in enumerate(cut):
                said = f"{name}, {part + 1} of {len(cut)}" if len(cut) > 1 else name
                buckets.append(BucketProfile(said, size, itemsize, last, use))
            if key in rows:
                size = rows[key] * first.shape[1]
                late = ready[key]
                buckets.append(
                    BucketProfile(f"{name}, rows", size, itemsize, late, use, by_rows=True)
                )
        return StepProfile(forward, backward, 0.0, tuple(buckets))


def _shares(
    model: nn.Module, inputs: tuple[Any, ...]
) -> tuple[list[tuple[list[nn.Parameter], float]], dict[int, int]]:
    """Parameters and weight of every call of a module that has parameters or no children; and how
    many symbols embeddings look up."""
    found: list[tuple[list[nn.Parameter], float]] = []
    symbols: dict[int, int] = {}
    counter = FlopCounterMode(display=False)
    began: list[float] = []

    def enters(module: nn.Module, args: Any) -> None:
        if type(module) is nn.Embedding and args:
            key = id(module.weight)
            symbols[key] = min(symbols.get(key, 0) + args[0].numel(), module.num_embeddings)
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
    return found, symbols


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
