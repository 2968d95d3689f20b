"""`plan` and `initialize`: the two doors of the package."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from evener.base import budget as budgets
from evener.base.given import given
from evener.errors import UsageError
from evener.zero import device as devices
from evener.zero import groups as given_groups
from evener.zero import joining, packed, schedule, shapes, ssd
from evener.zero.activations import Offload
from evener.zero.config import Config, read
from evener.zero.engine import Engine
from evener.zero.groups import Optimizers
from evener.zero.host import HostMemory
from evener.zero.in_backward import refuse as refuse_in_backward
from evener.zero.inputs import Call, call_of, guess, positions
from evener.zero.nearest import nearest
from evener.zero.optimizer import ZeroOptimizer, take_over
from evener.zero.planner import Fit, Machine, Plan
from evener.zero.planning import (
    NoFitError,
    Ways,
    budget_of,
    cut_and_trace,
    formats_of,
    plan_units,
)
from evener.zero.pretrained import given_with, leave_meta, source_for
from evener.zero.probe import STEP, probe
from evener.zero.profile import Profile
from evener.zero.ranks import Ranks, layout, meet, world_size
from evener.zero.rehearsal import rehearse
from evener.zero.scaler import LossScaler
from evener.zero.sequence import tiles_of
from evener.zero.spans import Spans
from evener.zero.split import MuonAdamW
from evener.zero.store import Source, build
from evener.zero.transformers import fill_buffers, without_cache
from evener.zero.ulysses import Split, refuse_ranks
from evener.zero.units import Unit, cut
from evener.zero.untouched import random_kept
from evener.zero.values import show
from evener.zero.vocabulary import Head
from evener.zero.vocabulary import find as find_head
from evener.zero.weight import Weight

Batch = tuple[int, int] | int
"""Size of a micro-batch: (sequences, tokens of each), or tokens."""

logger = logging.getLogger("evener.zero")


@given
def plan(
    model: nn.Module | Mapping[str, Any],
    *,
    config: str | Path | Mapping[str, Any] | Config | None = None,
    budget: str | Mapping[str, str | int] = "auto",
    batch: Batch | None = None,
    ranks: int = 1,
    machine: Machine | None = None,
    example: Any = None,
    nodes: int = 1,
    optimizer: Optimizers | None = None,
) -> Plan:
    """Whether a model fits, where each chunk will live and how long a step takes. Allocates nothing
    of the model's size.

    model: a module (best made in `empty_weights`), or a dict with the keys of Hugging Face's
    config.json of a Llama. batch: (sequences, tokens a sequence) of a micro-batch, or tokens.
    example: what the model is called with (a mapping of keywords, or positions). Its shapes
    count, and its values where the model asks for them; guessed from `batch` where it is None.
    machine: measured here where it is None. nodes: with `ranks` each and a copy of the states;
    `machine.between`: the rate between them. optimizer: as `initialize` takes it; else `config`'s.
    """
    settings = replace(read(config, ranks))
    settings.budget = budget if budget != "auto" else settings.budget
    given = [(nodes, settings.crossing)]
    numbers = given_groups.planned(optimizer, settings)
    return plans(
        model, settings, given, batch=batch, ranks=ranks, machine=machine, example=example,
        numbers=numbers,
    )[0]  # fmt: skip


def plans(
    model: nn.Module | Mapping[str, Any],
    settings: Config,
    ways: Sequence[tuple[int, str]],
    *,
    batch: Batch | None = None,
    ranks: int = 1,
    machine: Machine | None = None,
    example: Any = None,
    tell: Callable[[str], None] = lambda _: None,
    numbers: Callable[[nn.Module], Mapping[nn.Parameter, int]] = lambda _: {},
) -> list[Plan]:
    """As `plan`, of a model that is traced once: a plan for each of `ways`, which are (nodes, form
    in which gradients cross between them). Where the first does not fit, it says what would.
    `tell`: hears what is done now, as that may take a while. `numbers`: gives the number of each
    parameter's group; default: all are in group 0."""
    refuse_ranks(settings.sequence, ranks)
    refuse_in_backward(settings, max(ranks * nodes for nodes, _ in ways) if ways else ranks)
    module = model if isinstance(model, nn.Module) else shapes.llama(model)
    device = devices.pick(settings.device).device
    measured = machine or probe(device, settings.dtype, settings.moments).machine
    tokens = _tokens(settings, batch)
    profile = None
    if isinstance(model, nn.Module):
        tell("a step of the model runs without memory")
        with _ready(model, settings) as head:
            call = _call(model, settings, batch, example)
            units, profile = cut_and_trace(
                model, numbers(model), settings, device, call, head, measured.cores
            )
            profile = _rehearsed(profile, units, settings, device, measured, head)
            measured = _loaded(measured, profile)
    else:
        units = cut(
            module, numbers(module), settings.small,
            bytes=settings.moments == torch.int8, rule_of=given_groups.rule_of(settings),
        )  # fmt: skip
    limit = budget_of(settings, device, ranks)
    tell("planning")
    found: list[Plan] = []
    for nodes, form in ways:
        mine, without = replace(settings, crossing=form), replace(limit, ssd=0)
        made = plan_units(units, mine, measured, without, tokens, ranks, profile, nodes)
        if not made.fits and limit.ssd:
            if not measured.ssd:
                measured = replace(measured, ssd=ssd.measure(limit.folder).both)
            made = plan_units(units, mine, measured, limit, tokens, ranks, profile, nodes)
        if not made.fits and not found:
            tell("it does not fit; looking for what would")
            others = nearest(units, mine, measured, limit, tokens, ranks, profile, nodes)
            if isinstance(model, nn.Module) and profile is not None and not settings.tiles:
                tell("it does not fit; a step of the model runs in tiles")
                tiled = replace(mine, tiles=True)
                with _ready(model, tiled) as head:
                    again = cut_and_trace(
                        model, numbers(model), tiled, device, call, head, measured.cores
                    )
                ways_then = Ways.of(again[0], tiled, measured, tokens, ranks, again[1], nodes)
                if then := ways_then.best(limit):
                    words = "evener.tiles = true", "the sequence in tiles (--tiles)"
                    speed = then.step_seconds, then.tokens_per_second
                    others = [Fit(*words, *speed), *others]
            made = replace(made, nearest=others)
        found.append(made)
    return found


@contextlib.contextmanager
def _ready(model: nn.Module, config: Config) -> Iterator[Head | None]:
    """The model as the engine has it, for a trace: without a cache, with stand-ins for 4-bit
    weights, in tiles where that is asked for, and with the head whose logits are lazy."""
    with contextlib.ExitStack() as stack:
        stack.callback(without_cache(model))
        stack.callback(packed.take(model, config.dtype))
        if config.tiles:
            stack.callback(tiles_of(model, config).close)
        if config.sequence > 1:
            stack.callback(Split(model, config.sequence).close)
        head = _head(model, config)
        if head is not None:
            stack.callback(head.close)
        yield head


def _rehearsed(
    profile: Profile | None,
    units: list[Unit],
    config: Config,
    device: torch.device,
    machine: Machine,
    head: Head | None,
) -> Profile | None:
    """With what the units take on this GPU. Among several ranks all run them where that is asked
    for, and the first one's times count, as all must plan the same. For a machine that is not here,
    and on a CPU, nothing is measured."""
    wanted = world_size() == 1 if config.rehearse == "auto" else config.rehearse
    if profile is None or not wanted or device.type != "cuda" or machine.cores:
        if config.rehearse is True:
            why = "the model was not traced" if profile is None else "there is no GPU of the plan's"
            logger.info("evener.rehearse = true: no unit is run before the plan: %s", why)
        return profile
    skip = head.linear if head is not None else None
    budget = budget_of(config, device, 1).gpu
    limit = max(1, budget - machine.reserve)
    found = [rehearse(units, profile.calls, device, config.dtype, skip, limit)]
    if world_size() > 1:
        dist.broadcast_object_list(found, src=0)
    return replace(profile, rehearsed=found[0])


PASSES = 32
"""Most passes of Python's collector: it ends with the first that finds nothing. A closed engine
takes one or two; a graph that hooks hold together takes one per layer."""


def _beside(
    machine: Machine, device: devices.Device, model: nn.Module, call: Call, budget: int
) -> Machine:
    """With what the process has on the accelerator and is none of this model's or its example's
    (what a call takes is in the plan): the limit is on all of it. An engine that was closed is a
    cycle, so it is collected first: what autograd's nodes hold is garbage only when the nodes are
    gone."""
    for _ in range(PASSES):
        if not gc.collect():
            break
    given = [x for x in tree_leaves(call) if isinstance(x, torch.Tensor)]
    tensors = [*model.parameters(), *model.buffers(), *given]
    mine = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in tensors if t.device == device.device}  # fmt: skip
    others = device.allocated() - sum(mine.values())
    if others > 10 << 20:
        logger.log(
            logging.WARNING if others > budget // 4 else logging.INFO,
            "%.2f of the budget's %.2f GB of %s are held by something else in this process",
            others / 1e9,
            budget / 1e9,
            device.device,
        )
    return replace(machine, held=max(0, others))


def _loaded(machine: Machine, profile: Profile | None) -> Machine:
    """With the host memory that this process has now, where its units have run: kernels and threads
    of a first step are then there but for `STEP`. Not of several ranks: all must plan the same."""
    if profile is None or not profile.rehearsed or world_size() > 1:
        return machine
    return replace(machine, host_reserve=max(machine.host_reserve, budgets.resident_now() + STEP))


def _agreed(profile: Profile | None) -> Profile | None:
    """The first rank's. Plans must be the same on all ranks. Collective."""
    if world_size() == 1:
        return profile
    # What units are called with may hold anything, and is looked at on the rank itself.
    found = [None if profile is None else replace(profile, calls={})]
    dist.broadcast_object_list(found, src=0)
    first = found[0]
    return first and replace(first, calls=profile.calls if profile is not None else {})


def _head(model: nn.Module, config: Config) -> Head | None:
    if config.loss not in ("auto", "fused"):
        return None
    linear = find_head(model, force=config.loss == "fused")
    if linear is None and config.loss == "fused":
        logger.warning(
            "evener.loss = 'fused': %s has no linear layer that makes logits, and its loss is "
            "computed as it is",
            type(model).__name__,
        )
    return None if linear is None else Head(linear)


def _call(model: nn.Module, config: Config, batch: Batch | None, example: Any) -> Call:
    if example is not None:
        return call_of(example)
    rows, length = _shape(config, batch)
    most = positions(model)
    if batch is not None and most is not None and length > most:
        logger.warning(
            "the plan is of sequences of %d tokens, not %d: %s has no more positions "
            "(max_position_embeddings)", most, length, type(model).__name__,
        )  # fmt: skip
    return guess(model, rows, length)


def _shape(config: Config, batch: Batch | None) -> tuple[int, int]:
    """(rows, tokens of each); where nobody says, the configuration's rows of 1024."""
    if batch is None:
        return config.micro_batch or 1, 1024
    return (1, batch) if isinstance(batch, int) else batch


def _tokens(config: Config, batch: Batch | None) -> int:
    """The tokens that a rank has of them."""
    rows, length = _shape(config, batch)
    return rows * length // config.sequence


def _able(model: nn.Module) -> None:
    """Refuse what chunks of one floating-point dtype cannot hold, and what is held already."""
    four_bits = packed.able(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, Weight):
            raise UsageError(
                f"parameter {name} belongs to an engine already",
                "take the model's weights back first: zero.give_back(engine)",
            )
        if id(parameter) in four_bits:
            continue
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UsageError(
                f"parameter {name} is {parameter.dtype}: evener.zero holds float32, bfloat16 and "
                "float16, and would change it",
                "keep what is not trained in buffers, or train this model without evener.zero",
            )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise UsageError(
                f"{name or 'the model'} has sparse gradients", "give sparse=False to the embedding"
            )


@given
def initialize(
    *,
    model: nn.Module,
    config: str | Path | Mapping[str, Any] | Config | None = None,
    optimizer: Optimizers | None = None,
    model_parameters: Iterable[Any] | None = None,
    lr_scheduler: Any = None,
    batch: Batch | None = None,
    machine: Machine | None = None,
    weights: Source | str | Path | None = None,
    resident: set[str] | None = None,
    away: set[str] | None = None,
    streaming: bool = False,
    example: Any = None,
) -> tuple[Engine, ZeroOptimizer, None, Any]:
    """Move `model` under the engine; returns (engine, optimizer, None, scheduler).

    The model's own parameters are taken over: afterwards they hold values only while their unit
    runs. Uses the default process group where there is one. `optimizer`: of torch, or several that
    step together, as [torch.optim.Muon(matrices), torch.optim.AdamW(others)]. `batch`: of a
    micro-batch, for the plan (the configuration's, of 1024 tokens), or `example`: what the model is
    called with, of which shapes count, and values where the model asks for them. Its step is traced
    with these; other inputs later are traced when they come. `weights`: a folder of safetensors, or
    a function (name, parameter) -> value: `model` may then be on the meta device, and its weights
    are read chunk by chunk. `resident` (names of the chunks on the accelerator), `away` (of those
    with states on the SSD, in the budget's folder) and `streaming` (of states through the
    accelerator): instead of what is planned. A GPU budget in bytes limits torch's allocator from
    here until the engine is closed.
    Raises NoFitError before anything is moved, ConfigError for what the configuration cannot be.
    """
    settings = read(config, world_size())
    if resident is None and (away is not None or streaming):
        raise UsageError(
            "`away` and `streaming` say where states go, and with no `resident` that is planned",
            "give `resident` too, or leave them out",
        )
    of_plan = {"machine": machine, "batch": batch, "example": example}
    unneeded = _unneeded(settings, of_plan, resident, optimizer, model_parameters, lr_scheduler)
    settings = replace(settings, ignored=[*settings.ignored, *unneeded])
    optimizers = given_groups.made(optimizer, settings, model, model_parameters)
    given_groups.with_rules(settings, optimizers)
    refuse_in_backward(settings, world_size())
    refuse_ranks(settings.sequence)
    device = devices.pick(settings.device)
    fill_buffers(model)
    if any(p.is_meta for p in model.parameters()):
        weights = given_with(model) if weights is None else weights
        if weights is None:
            raise UsageError(
                "the model is on the meta device and has no values",
                "give `weights=` (a safetensors directory), or make it on the CPU",
            )
        if isinstance(weights, str | Path):
            weights = source_for(weights, model)
        leave_meta(model)
    elif isinstance(weights, str | Path):
        weights = source_for(weights, model)
    steered = getattr(lr_scheduler, "optimizer", None)
    if hasattr(lr_scheduler, "step") and not any(one is steered for one in optimizers):
        raise UsageError(
            "lr_scheduler was made on another optimizer",
            "make it on the one that is given, or give a function of an optimizer",
        )
    _able(model)
    groups = given_groups.of(model, model_parameters, optimizers)
    listed = {id(p) for group in groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in listed:
            raise UsageError(
                f"parameter {name} is trained and in no optimizer group",
                "give it to model_parameters, or set requires_grad=False",
            )
    numbers = given_groups.numbers(groups)
    stack = contextlib.ExitStack()
    stack.callback(without_cache(model))
    head = _head(model, settings)
    unpack = packed.take(model, settings.dtype)
    split = None
    try:
        if settings.sequence > 1:
            split = Split(model, settings.sequence)
            stack.callback(split.close)
        if settings.tiles:
            tiles = tiles_of(model, settings)
            stack.callback(tiles.close)
            if not tiles.parts:
                logger.warning(
                    "evener.tiles = true: no block of %s has a part that does the same to each "
                    "token, and sequences run as they are",
                    type(model).__name__,
                )
        engine = _engine(
            model, settings, device, numbers, machine, weights, resident, away, streaming, batch,
            example, head, stack.close, split,
        )  # fmt: skip
    except BaseException:
        if head is not None:
            head.close()
        stack.close()
        unpack()
        device.unlimit()
        raise
    show(model, engine)
    front = ZeroOptimizer(engine, groups, {} if settings.rules else settings.rule.values)
    take_over(optimizers, front)
    scheduler = lr_scheduler
    if callable(lr_scheduler) and not hasattr(lr_scheduler, "step"):
        scheduler = lr_scheduler(front)
    if scheduler is None and settings.scheduler is not None:
        scheduler = schedule.make(front, *settings.scheduler)
    engine.scheduler = scheduler
    return engine, front, None, scheduler


def _unneeded(
    config: Config,
    of_plan: Mapping[str, Any],
    resident: set[str] | None,
    optimizer: Any,
    parameters: Any,
    scheduler: Any,
) -> list[str]:
    """What was asked for, and something else that was given takes the place of."""
    found = []
    asked = config.has_optimizer and not (config.muon and isinstance(optimizer, MuonAdamW))
    if optimizer is not None and asked:
        found.append("optimizer of the configuration (one was given)")
    if optimizer is not None and parameters is not None:
        found.append("model_parameters (the optimizer has its own)")
    if scheduler is not None and config.scheduler is not None:
        found.append("scheduler of the configuration (one was given)")
    if resident is not None:
        names = [name for name, value in of_plan.items() if value is not None]
        sizes = config.budget if isinstance(config.budget, Mapping) else ()
        names += [f"evener.budget.{name}" for name in ("gpu", "host", "spare") if name in sizes]
        found += [f"{name} (there is no plan: resident= was given)" for name in names]
    return found


def _engine(
    model: nn.Module,
    settings: Config,
    device: devices.Device,
    numbers: Mapping[nn.Parameter, int],
    machine: Machine | None,
    weights: Source | None,
    resident: set[str] | None,
    away: set[str] | None,
    streaming: bool,
    batch: Batch | None,
    example: Any,
    head: Head | None,
    undo: Callable[[], None],
    split: Split | None,
) -> Engine:
    call, made, folder = None, None, ""
    if resident is None:
        call = _call(model, settings, batch, example)
        units, profile = cut_and_trace(
            model, numbers, settings, device.device, call, head, agree=_agreed
        )
        if machine is None:
            with random_kept():
                found = probe(device.device, settings.dtype, settings.moments, meet=meet)
            machine = found.machine
        profile = _rehearsed(profile, units, settings, device.device, machine, head)
        limit = budget_of(settings, device.device, 1).gpu
        machine = _beside(_loaded(machine, profile), device, model, call, limit)
        # After the probe: what it found beside the allocator is without the communicators.
        tokens = _tokens(settings, batch)
        ranks, rate = joining.planned(units, settings, machine, device, tokens, profile)
        if split is not None:
            ranks = replace(ranks, bytes=ranks.bytes + split.join(device.device))
        machine = replace(machine, between=rate)
        made = _planned(units, settings, machine, device, tokens, ranks, profile)
        resident, streaming = made.resident, made.streaming
        away, folder = made.away, made.budget.folder
    else:
        if away:
            folder = budget_of(settings, device.device, world_size()).folder
        units = cut(
            model, numbers, settings.small,
            bytes=settings.moments == torch.int8, rule_of=given_groups.rule_of(settings),
        )  # fmt: skip
        profile = None
        ranks = joining.forced(settings, device, layout())
        if split is not None:
            split.join(device.device)
    if settings.ignored:
        logger.info("taken and not needed: %s", ", ".join(settings.ignored))
    if settings.crossing != "exact" and ranks.replicas == 1:
        logger.info(
            "evener.crossing = %r: there is one copy of the states, and gradients go as they are",
            settings.crossing,
        )
    store = build(
        model,
        units,
        formats_of(settings),
        device,
        resident=resident,
        stage=settings.stage,
        ranks=ranks,
        source=weights,
        away=away,
        folder=folder,
    )
    offload = None
    mode = made.checkpointing if made else settings.checkpointing
    if mode == "offload":
        size = made.offloaded if made else 0
        offload = Offload(device, Spans(device), HostMemory(size, pin=device.device.type == "cuda"))
    blocks = {number for number, unit in enumerate(units) if unit.repeated}
    if made is not None and made.traced:
        blocks = set(made.recomputed)
    elif mode in (False, "none"):
        blocks = set()
    return Engine(
        model,
        store,
        device,
        accumulation=settings.accumulation,
        clipping=settings.clipping,
        recompute=blocks,
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
        head=head,
        chunked=settings.loss == "chunked",
        slack=machine.slack if machine else 0.0,
        traced=call if profile is not None else None,
        undo=undo,
    )


def _planned(
    units: list[Unit],
    config: Config,
    machine: Machine,
    device: devices.Device,
    tokens: int,
    ranks: Ranks,
    profile: Profile | None,
) -> Plan:
    """A plan that fits, the same on all ranks, and a limit on the allocator by it."""
    budget = budget_of(config, device.device, ranks.world)
    if ranks.size > 1:
        # Ranks that recompute or gather otherwise would wait for ever.
        reserve = ranks.largest(machine.reserve + ranks.bytes, device.device)
        held = ranks.largest(machine.held, device.device)
        machine = replace(machine, reserve=reserve, held=held, network=ranks.network)
        machine, budget = ranks.agree((machine, budget))
    world = ranks.world
    copies = ranks.replicas
    without = replace(budget, ssd=0)
    made = plan_units(units, config, machine, without, tokens, world, profile, copies)
    if not made.fits and budget.ssd:
        machine = _with_ssd(machine, budget, ranks)
        made = plan_units(units, config, machine, budget, tokens, world, profile, copies)
    if not made.fits:
        others = nearest(units, config, machine, budget, tokens, world, profile, copies)
        raise NoFitError(made, [fit.setting for fit in others])
    logger.info(
        "%.2f GB on %s, %.2f GB on the host; activations (%s): %s; optimizer: %s; bound by %s",
        made.gpu_bytes / 1e9,
        device.device,
        made.host_bytes / 1e9,
        "traced" if made.traced else "estimated from shapes",
        made.checkpointing,
        "the cores and the streaming lane" if made.streaming else "the cores",
        made.bound,
    )
    if made.ssd_bytes:
        logger.info(
            "%.2f GB of states on the SSD in %s: at most so much is written per step",
            made.ssd_bytes / 1e9,
            budget.folder,
        )
    if isinstance(config.budget, Mapping) and "gpu" in config.budget:
        device.limit(budget.gpu + budget.spare - made.gpu_reserve)
    return made


def _with_ssd(machine: Machine, budget: budgets.Budget, ranks: Ranks) -> Machine:
    """With the rate of the SSD, measured by all ranks at once: each gets its part."""
    if machine.ssd:
        return machine
    meet()
    found = ssd.measure(budget.folder)
    logger.info(
        "SSD in %s: %.2f GB/s read, %.2f written, %.2f both at once (%s)",
        budget.folder,
        found.read / 1e9,
        found.write / 1e9,
        found.both / 1e9,
        found.way,
    )
    rate = ranks.agree(found.both) if ranks.size > 1 else found.both
    return replace(machine, ssd=rate)


def _scaler(config: Config) -> LossScaler | None:
    if config.dtype != torch.float16:
        return None
    if config.loss_scale > 0:
        return LossScaler(config.loss_scale, 0)
    return LossScaler(
        config.initial_scale, config.scale_window, config.smallest_scale, config.hysteresis
    )
