"""The plan of a model: its units cut, its step traced, and of all ways that the configuration
leaves open the fastest that fits. Where none fits: `nearest`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from evener.base import budget as budgets
from evener.errors import EvenerError
from evener.zero import shapes
from evener.zero.config import Config
from evener.zero.form import Form
from evener.zero.host import pages
from evener.zero.inputs import Call
from evener.zero.planner import Machine, Plan, Work
from evener.zero.planner import plan as pure_plan
from evener.zero.profile import Profile
from evener.zero.scratch import scratch_of
from evener.zero.store import Formats
from evener.zero.trace import timed_trace
from evener.zero.units import Unit, cut
from evener.zero.vocabulary import Head

logger = logging.getLogger("evener.zero")


class NoFitError(EvenerError):
    """The model does not fit the budget; `plan` says by how much, `nearest` what would fit."""

    def __init__(self, plan: Plan, nearest: Sequence[str] = ()) -> None:
        fix = "raise the budget, use moments=bf16 or int8, a smaller micro-batch, or more GPUs"
        if nearest:
            fix = "this would fit: " + "; or ".join(nearest)
        super().__init__(plan.problem, fix)
        self.plan = plan
        self.nearest = list(nearest)


def formats_of(config: Config) -> Formats:
    """A gradient that is summed over micro-batches is summed in float32, unless asked otherwise."""
    default = torch.float32 if config.accumulation > 1 else config.dtype
    return Formats(config.dtype, config.moments, config.gradient or default, config.master)


def plan_units(
    units: list[Unit],
    config: Config,
    machine: Machine,
    budget: budgets.Budget,
    tokens: int,
    ranks: int,
    profile: Profile | None = None,
    replicas: int = 1,
) -> Plan:
    """The plan of units that were cut: of all ways that the configuration leaves open the fastest
    that fits, or the one that is nearest to fitting. `profile`: of the traced step; without it
    activations are estimated from shapes. The SSD is used where nothing fits without it."""
    if budget.ssd:
        without = replace(budget, ssd=0)
        made = plan_units(units, config, machine, without, tokens, ranks, profile, replicas)
        if made.fits:
            return made
    gains = machine.balanced > 1.05 * machine.host_adam
    lanes = [False, True] if config.balance == "auto" and gains else [config.balance is True]
    parts = shapes.parts_of(units)
    base = Work(
        tokens=tokens,
        activations=0,
        accumulation=config.accumulation,
        ranks=ranks,
        replicas=replicas,
        crossing=Form(config.crossing),
        depth=config.depth,
        moments=len(config.rule.moments),
        scratch=scratch_of(config.rule, formats_of(config), cuda=machine.slack > 0),
        profile=profile,
    )
    ways = _estimated(units, config, base) if profile is None else _traced(config, base, profile)
    ways = [replace(work, streaming=streaming) for work in ways for streaming in lanes]
    found = [pure_plan(parts, formats_of(config), work, machine, budget) for work in ways]
    fitting = [plan for plan in found if plan.fits]
    if fitting:
        return min(fitting, key=lambda plan: plan.step_seconds)
    if machine.slack and profile is not None:
        # Only what does not fit without any hole is refused: an allocator at its limit closes them.
        tight = [replace(work, pools=False) for work in ways]
        found = [pure_plan(parts, formats_of(config), work, machine, budget) for work in tight]
        fitting = [plan for plan in found if plan.fits]
        if fitting:
            best = min(fitting, key=lambda plan: plan.step_seconds)
            return replace(best, gpu_bytes=budget.gpu)  # it takes what there is
    return min(found, key=lambda plan: plan.gpu_bytes)


_MODES: dict[bool | str, list[str]] = {
    False: ["none"],
    True: ["recompute"],
    "offload": ["offload"],
    "auto": ["none", "recompute", "offload"],
}


def _estimated(units: list[Unit], config: Config, base: Work) -> list[Work]:
    ways = []
    for mode in _MODES[config.checkpointing]:
        chunked = config.loss in ("chunked", "fused")
        here, away = shapes.activations(units, base.tokens, config.dtype, mode, chunked)
        ways.append(replace(base, activations=here, offloaded=away, checkpointing=mode != "none"))
    return ways


def _traced(config: Config, base: Work, profile: Profile) -> list[Work]:
    ways = []
    blocks = sorted(profile.repeated)
    for mode in _MODES[config.checkpointing]:
        counts = {len(blocks) if mode != "none" else 0}
        if config.checkpointing == "auto" and mode == "recompute" and profile.mixes:
            counts |= {len(blocks) * part // 8 for part in range(1, 8)}
        for count in sorted(counts):
            chosen = frozenset(blocks[:count])
            away = 0
            if mode == "offload":
                away = sum(pages(profile.inputs.get(unit, 0), 1) for unit in chosen)
                if not away:
                    continue
            ways.append(replace(base, recompute=chosen, offloaded=away, checkpointing=bool(chosen)))
    return ways or [base]


def cut_and_trace(
    model: nn.Module,
    numbers: Mapping[nn.Parameter, int],
    config: Config,
    device: torch.device,
    call: Call,
    head: Head | None,
    cores: int = 0,
    agree: Callable[[Profile | None], Profile | None] = lambda profile: profile,
) -> tuple[list[Unit], Profile | None]:
    """The units, and the profile of a step with the inputs `call`, where it can be traced. `agree`:
    of several ranks' profiles gives one, as each looks at values of its own batch."""
    stay: frozenset[str] = frozenset()
    for _ in range(3):
        units = cut(model, numbers, config.small, stay, config.moments == torch.int8)
        profile, said = timed_trace(
            model,
            units,
            *call,
            device=device,
            dtype=config.dtype,
            chunked=config.loss == "chunked",
            head=head,
            cores=cores,
        )
        profile = agree(profile)
        if profile is None or not profile.strays - stay:
            break
        stay |= profile.strays
        logger.info("always on the accelerator, as others read them: %s", ", ".join(sorted(stay)))
    logger.info("a step of this model: %s", said)
    return units, profile
