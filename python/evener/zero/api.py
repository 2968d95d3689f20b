"""`plan` and `initialize`: the two doors of the package."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evener.errors import EvenerError, UsageError
from evener.zero import budget as budgets
from evener.zero import device as devices
from evener.zero import moments, rules, schedule, shapes, tensors
from evener.zero.activations import Offload
from evener.zero.config import Config, read
from evener.zero.engine import Engine
from evener.zero.host import HostMemory
from evener.zero.planner import Machine, Plan, Work
from evener.zero.planner import plan as pure_plan
from evener.zero.probe import probe
from evener.zero.ranks import Ranks, join, meet, world_size
from evener.zero.scaler import LossScaler
from evener.zero.spans import Spans
from evener.zero.store import Formats, Source, build, group_numbers
from evener.zero.units import Unit, cut

logger = logging.getLogger("evener.zero")


class NoFitError(EvenerError):
    """The model does not fit the budget; `plan` says by how much."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(
            plan.problem,
            "raise the budget, use moments=bf16, a smaller micro-batch, or more GPUs",
        )
        self.plan = plan


def formats_of(config: Config) -> Formats:
    """A gradient that is summed over micro-batches is summed in float32, unless asked otherwise."""
    default = torch.float32 if config.accumulation > 1 else config.dtype
    return Formats(config.dtype, config.moments, config.gradient or default)


def plan_units(
    units: list[Unit],
    config: Config,
    machine: Machine,
    budget: budgets.Budget,
    tokens: int,
    ranks: int,
) -> Plan:
    """The plan of units that were cut: of all ways that the configuration leaves open the fastest
    that fits, or the one that is nearest to fitting."""
    modes = {
        False: ["none"],
        True: ["recompute"],
        "offload": ["offload"],
        "auto": ["none", "recompute", "offload"],
    }[config.checkpointing]
    gains = machine.balanced > 1.05 * machine.host_adam
    lanes = [False, True] if config.balance == "auto" and gains else [config.balance is True]
    found = []
    for mode in modes:
        here, away = shapes.activations(units, tokens, config.dtype, mode, config.chunked_loss)
        for streaming in lanes:
            work = Work(
                tokens=tokens,
                activations=here,
                accumulation=config.accumulation,
                checkpointing=mode != "none",
                ranks=ranks,
                depth=config.depth,
                moments=len(config.rule.moments),
                streaming=streaming,
                offloaded=away,
            )
            parts = shapes.parts_of(units)
            found.append(pure_plan(parts, formats_of(config), work, machine, budget))
    fitting = [plan for plan in found if plan.fits]
    if fitting:
        return min(fitting, key=lambda plan: plan.step_seconds)
    return min(found, key=lambda plan: plan.gpu_bytes)


def _budget(config: Config, device: torch.device, ranks_here: int) -> budgets.Budget:
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        return budgets.resolve(config.budget, gpu_free=free, ranks_here=ranks_here)
    # The simulated accelerator is host memory: half of it each.
    shares = 2 * ranks_here
    half = int(budgets.host_free() * budgets.KEEP) // shares
    return budgets.resolve(config.budget, gpu_free=half, ranks_here=shares)


def plan(
    model: nn.Module | Mapping[str, Any],
    *,
    config: str | Path | Mapping[str, Any] | Config | None = None,
    budget: str | Mapping[str, str | int] = "auto",
    batch: tuple[int, int] | int = (1, 1024),
    ranks: int = 1,
    machine: Machine | None = None,
) -> Plan:
    """Whether a model fits, where each chunk will live and how long a step takes. Allocates nothing
    of the model's size.

    model: a module (best on the meta device), or a dict with the keys of Hugging Face's
    config.json of a Llama. batch: (sequences, tokens a sequence) of a micro-batch, or tokens.
    machine: measured here where it is None.
    """
    settings = read(config, ranks)
    module = model if isinstance(model, nn.Module) else shapes.llama(model)
    units = cut(module, small=settings.small)
    device = devices.pick(settings.device).device
    measured = machine or probe(device, settings.dtype, settings.moments).machine
    settings.budget = budget if budget != "auto" else settings.budget
    tokens = batch if isinstance(batch, int) else batch[0] * batch[1]
    return plan_units(units, settings, measured, _budget(settings, device, ranks), tokens, ranks)


class ZeroOptimizer(torch.optim.Optimizer):
    """The engine's optimizer with torch's face: groups, `step`, `zero_grad`, schedulers.

    `state_dict` and `load_state_dict` hold what torch's optimizer of that name holds, so one
    process may hand its states to torch.optim.AdamW and back (`evener.zero.moments`). They copy all
    moments at once: `save_checkpoint` is what needs no room, and keeps the float32 weights too.
    """

    def __init__(self, engine: Engine, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, engine.rule.values)
        self.engine = engine
        engine.param_groups = self.param_groups
        # Schedulers look for it, to warn of a loop that never steps; here engine.step() does.
        self._opt_called = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights from the gradients of the backward passes since the last step."""
        if closure is not None:
            raise UsageError("a closure was given", "call backward() before step()")
        self.engine.update()

    def state_dict(self) -> dict[str, Any]:
        """Groups, and each parameter's step and moments: copies on the CPU, in their own dtype.
        With several ranks the part that this rank holds, flat, with its `range`."""
        self.engine.drain()
        state = super().state_dict()
        state["state"] = moments.collect(self.engine, self.param_groups)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave, into the groups that exist: schedulers keep theirs.
        Raises UsageError, with nothing changed, where it is of another model or number of ranks."""
        self.engine.drain()
        moments.install(self.engine, self.param_groups, state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients leave the parameters as they come: there is nothing to clear after a step."""
        self.engine.zero_grad()


def _groups(
    model: nn.Module, parameters: Iterable[Any] | None, optimizer: torch.optim.Optimizer | None
) -> list[dict[str, Any]]:
    if optimizer is not None:
        return [dict(group) for group in optimizer.param_groups]
    given: list[Any] = list(parameters if parameters is not None else model.parameters())
    if not given or not isinstance(given[0], dict):
        given = [{"params": given}]
    groups = []
    for group in given:
        members = group["params"]
        members = [members] if isinstance(members, nn.Parameter) else list(members)
        groups.append({**group, "params": [p for p in members if p.requires_grad]})
    return groups


def initialize(
    *,
    model: nn.Module,
    config: str | Path | Mapping[str, Any] | Config | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    model_parameters: Iterable[Any] | None = None,
    lr_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    batch: tuple[int, int] | int = (1, 1024),
    machine: Machine | None = None,
    weights: Source | str | Path | None = None,
    resident: set[str] | None = None,
    streaming: bool = False,
) -> tuple[Engine, ZeroOptimizer, None, Any]:
    """Move `model` under the engine; returns (engine, optimizer, None, scheduler).

    The model's own parameters are taken over: afterwards they hold values only while their unit
    runs. Uses the default process group where there is one. `batch`: of a micro-batch, for the
    plan. `weights`: a folder of safetensors, or a function (name, parameter) -> value: `model` may
    then be on the meta device, and its weights are read chunk by chunk. `resident` (names of the
    chunks on the accelerator) and `streaming` (of states through it): in place of what is
    planned. A GPU budget in bytes limits torch's allocator from here until the engine is closed.
    Raises NoFitError before anything is moved, ConfigError for what the configuration cannot be.
    """
    settings = read(config, world_size())
    if optimizer is not None:
        settings.rule = rules.of(optimizer)
    device = devices.pick(settings.device)
    if any(p.is_meta for p in model.parameters()):
        if weights is None:
            raise UsageError(
                "the model is on the meta device and has no values",
                "give `weights=` (a safetensors directory), or make it on the CPU",
            )
        _leave_meta(model)
    groups = _groups(model, model_parameters, optimizer)
    listed = {id(p) for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in listed:
            raise UsageError(
                f"parameter {name} is trained and in no optimizer group",
                "give it to model_parameters, or set requires_grad=False",
            )
    numbers = group_numbers([group["params"] for group in groups])
    units = cut(model, numbers, small=settings.small)
    if resident is None and machine is None:
        machine = probe(device.device, settings.dtype, settings.moments, meet=meet).machine
    ranks = join(device.device)  # after the probe: what it found beside the allocator is without it
    made = None
    if resident is None:
        assert machine is not None
        tokens = batch if isinstance(batch, int) else batch[0] * batch[1]
        made = _planned(units, settings, machine, device, tokens, ranks)
        resident, streaming = made.resident, made.streaming
    if settings.ignored:
        logger.info("taken and not needed: %s", ", ".join(settings.ignored))
    store = build(
        model,
        units,
        formats_of(settings),
        settings.rule,
        device,
        resident=resident,
        stage=settings.stage,
        ranks=ranks,
        source=tensors.source(weights) if isinstance(weights, str | Path) else weights,
    )
    offload = None
    mode = made.checkpointing if made else settings.checkpointing
    if mode == "offload":
        size = made.offloaded if made else 0
        offload = Offload(device, Spans(device), HostMemory(size, pin=device.device.type == "cuda"))
    engine = Engine(
        model,
        store,
        settings.rule,
        device,
        accumulation=settings.accumulation,
        clipping=settings.clipping,
        checkpointing=mode not in (False, "none"),
        depth=settings.depth,
        stage=settings.stage,
        scaler=_scaler(settings),
        ranks=ranks,
        seed=settings.seed,
        streaming=streaming,
        stale_updates=settings.stale_updates,
        offload=offload,
        compiler=settings.compile,
        plan=made,
    )
    front = ZeroOptimizer(engine, groups)
    scheduler = lr_scheduler(front) if lr_scheduler is not None else None
    if scheduler is None and settings.scheduler is not None:
        scheduler = schedule.make(front, *settings.scheduler)
    engine.scheduler = scheduler
    return engine, front, None, scheduler


def _planned(
    units: list[Unit],
    config: Config,
    machine: Machine,
    device: devices.Device,
    tokens: int,
    ranks: Ranks,
) -> Plan:
    """A plan that fits, the same on all ranks, and a limit on the allocator by it."""
    budget = _budget(config, device.device, ranks.world)
    if ranks.world > 1:
        # Ranks that recompute or gather otherwise would wait for ever.
        reserve = ranks.largest(machine.reserve + ranks.bytes, device.device)
        machine = replace(machine, reserve=reserve, network=ranks.network)
        machine, budget = ranks.agree((machine, budget))
    made = plan_units(units, config, machine, budget, tokens, ranks.world)
    if not made.fits:
        raise NoFitError(made)
    logger.info(
        "%.2f GB on %s, %.2f GB on the host; activations: %s; optimizer: %s; bound by %s",
        made.gpu_bytes / 1e9,
        device.device,
        made.host_bytes / 1e9,
        made.checkpointing,
        "the cores and the streaming lane" if made.streaming else "the cores",
        made.bound,
    )
    if isinstance(config.budget, Mapping) and "gpu" in config.budget:
        device.limit(budget.gpu - made.gpu_reserve)
    return made


def _leave_meta(model: nn.Module) -> None:
    """Parameters on the meta device become views of one NaN: no memory, until they are filled."""
    nothing = torch.full((1,), torch.nan)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module._parameters.items()):
            if old is not None and old.is_meta:
                if old not in made:
                    made[old] = nn.Parameter(nothing.expand(old.shape), old.requires_grad)
                module._parameters[name] = made[old]


def _scaler(config: Config) -> LossScaler | None:
    if config.dtype != torch.float16:
        return None
    if config.loss_scale > 0:
        return LossScaler(config.loss_scale, 0)
    return LossScaler(
        config.initial_scale, config.scale_window, config.smallest_scale, config.hysteresis
    )
