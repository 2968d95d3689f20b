"""The plan of a model: its units cut, its step traced, and of all ways that the configuration
leaves open the fastest that fits. Where none fits: `nearest`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from evener.base import budget as budgets
from evener.errors import EvenerError
from evener.zero import shapes
from evener.zero.config import Config
from evener.zero.form import Form
from evener.zero.groups import rule_of
from evener.zero.host import pages
from evener.zero.inputs import Call
from evener.zero.planner import Machine, Part, Plan, Work, least_gpu
from evener.zero.planner import plan as pure_plan
from evener.zero.profile import Profile
from evener.zero.rules import Rule
from evener.zero.scratch import halves_of, scratch_of
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
        problem = plan.problem
        if plan.gpu_held >= 10 << 20:
            held = plan.gpu_held / 1e9
            problem += f"; {held:.2f} GB of the accelerator are other tensors of this process"
        super().__init__(problem, fix)
        self.plan = plan
        self.nearest = list(nearest)


def formats_of(config: Config) -> Formats:
    """A gradient that is summed over micro-batches is summed in float32, unless asked otherwise."""
    default = torch.float32 if config.accumulation > 1 else config.dtype
    pool = config.depth + 1 if config.optimizer_in_backward else 0
    return Formats(config.dtype, config.moments, config.gradient or default, config.master, pool)


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
    ways = Ways.of(units, config, machine, tokens, ranks, profile, replicas)
    return ways.best(budget) or ways.closest(budget)


def budget_of(config: Config, device: torch.device, ranks_here: int) -> budgets.Budget:
    """What the configuration gives each of the ranks that are on this host."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        return budgets.resolve(config.budget, gpu_free=free, ranks_here=ranks_here)
    # The simulated accelerator is host memory: half of it each.
    shares = 2 * ranks_here
    half = int(budgets.host_free() * budgets.KEEP) // shares
    return budgets.resolve(config.budget, gpu_free=half, ranks_here=shares)


@dataclass(frozen=True)
class Ways:
    """All ways that a configuration leaves open, as `planner` takes them. `tight`: the same by an
    allocator without holes; empty where it has none anyway."""

    parts: list[Part]
    formats: Formats
    machine: Machine
    works: list[Work]
    tight: list[Work]

    @classmethod
    def of(
        cls,
        units: list[Unit],
        config: Config,
        machine: Machine,
        tokens: int,
        ranks: int,
        profile: Profile | None = None,
        replicas: int = 1,
    ) -> Ways:
        """See `plan_units`."""
        gains = machine.balanced > 1.05 * machine.host_adam
        lanes = [False, True] if config.balance == "auto" and gains else [config.balance is True]
        base = Work(
            tokens=tokens,
            activations=0,
            accumulation=config.accumulation,
            ranks=ranks,
            replicas=replicas,
            crossing=Form(config.crossing),
            depth=config.depth,
            profile=profile,
        )
        made = (
            _estimated(units, config, base) if profile is None else _traced(config, base, profile)
        )
        works = [replace(work, streaming=streaming) for work in made for streaming in lanes]
        holes = machine.slack > 0 and profile is not None
        tight = [replace(work, pools=False) for work in works] if holes else []
        known: dict[str, int] = {}
        halved: dict[str, tuple[int, int]] = {}

        def scratch(rule: Rule) -> int:
            if rule.name not in known:
                known[rule.name] = scratch_of(rule, formats_of(config), cuda=machine.slack > 0)
            return known[rule.name]

        def halves(rule: Rule) -> tuple[int, int]:
            if rule.name not in halved:
                halved[rule.name] = halves_of(rule, formats_of(config))
            return halved[rule.name]

        parts = shapes.parts_of(units, scratch, halves)
        return cls(parts, formats_of(config), machine, works, tight)

    def best(self, budget: budgets.Budget) -> Plan | None:
        """The fastest that fits; None: nothing does.

        Only what does not fit without any hole is refused: an allocator at its limit closes them.
        """
        if budget.ssd and (made := self.best(replace(budget, ssd=0))) is not None:
            return made
        for works in (self.works, self.tight):
            able = [work for work in works if self._least(work, budget, budget.gpu) is not None]
            found = [self._plan(work, budget) for work in able]
            if fitting := [plan for plan in found if plan.fits]:
                made = min(fitting, key=lambda plan: plan.step_seconds)
                # Without holes, it takes what there is.
                return replace(made, gpu_bytes=budget.gpu) if works is self.tight else made
        return None

    def closest(self, budget: budgets.Budget) -> Plan:
        """Where nothing fits: the plan that asks for the least accelerator memory; of those for
        which that is enough, the least host memory."""
        found = [self._plan(work, budget) for work in self.tight or self.works]
        return min(found, key=lambda plan: (max(plan.gpu_bytes, budget.gpu), plan.host_bytes))

    def least_gpu(self, budget: budgets.Budget) -> int | None:
        """Bytes of accelerator memory from which on something fits; None: nothing ever does."""
        found = [self._least(work, budget) for work in self.tight or self.works]
        return min((size for size in found if size is not None), default=None)

    def least_host(self, budget: budgets.Budget) -> int | None:
        """The same of host memory."""
        found = [
            self._plan(work, replace(limit, host=0))
            for work in self.tight or self.works
            for limit in ([budget, replace(budget, ssd=0)] if budget.ssd else [budget])
        ]
        return min(
            (made.host_bytes for made in found if made.gpu_bytes <= budget.gpu), default=None
        )

    def _least(self, work: Work, budget: budgets.Budget, most: int | None = None) -> int | None:
        return least_gpu(self.parts, self.formats, work, self.machine, budget, most)

    def _plan(self, work: Work, budget: budgets.Budget) -> Plan:
        return pure_plan(self.parts, self.formats, work, self.machine, budget)


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
        units = cut(
            model, numbers, config.small, stay, config.moments == torch.int8, rule_of(config)
        )
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
    for number, unit in enumerate(units):
        unit.once = unit.repeated and profile is not None and number not in profile.repeated
    if config.checkpointing and any(unit.once for unit in units):
        logger.log(
            logging.INFO if config.checkpointing == "auto" else logging.WARNING,
            "evener.checkpointing = %r: no block is recomputed, as something is written in place "
            "to what it is given",
            config.checkpointing,
        )
    return units, profile
