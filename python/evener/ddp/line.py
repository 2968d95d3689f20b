"""The DDP door: one line for a script that wraps its model in DistributedDataParallel.

    model = DistributedDataParallel(model)
    model = evener.ddp.accelerate(model, optimizer)

The model stays a DistributedDataParallel (`no_sync`, `module`, `state_dict`, buffer broadcasts work
as before); only its gradient reduction is replaced by `evener.comm`'s, and the memory of DDP's own
buckets is given back.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel.distributed import DistributedDataParallel

from evener.base import log, settings, torch_names
from evener.base.given import given
from evener.base.log import info0, say_idle
from evener.comm import forms, pace, wires
from evener.comm.agree import everyones
from evener.comm.errors import CommError
from evener.comm.options import Options
from evener.comm.overlap import StepOverlap, innermost, refusal, refuse_model
from evener.comm.planner.live import Planner
from evener.comm.planner.moments import look_at_moments
from evener.comm.reducer import Reducer
from evener.comm.steps import Steps
from evener.comm.world.topology import Algorithm
from evener.ddp import nodes
from evener.ddp.local import start
from evener.ddp.model import AcceleratedDataParallel, replace_older, taken, wrap
from evener.errors import UsageError

logger = logging.getLogger("evener.ddp")

MODES = forms.names()
# Each bucket costs the thread that computes gradients some 0.3 ms on a GPU's host.
_BUCKET_BYTES = 64 << 20


@given
def accelerate(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    every: int | Literal["auto"] | None = None,
    overlap: int | None = None,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    mode: str | None = None,
    floor: str | None = None,
    wire: str | None = None,
    algorithm: Algorithm | None = None,
    ratio: float | None = None,
    warmup_steps: int | None = None,
    momentum: float = 0.0,
    scaler: GradScaler | None = None,
    bucket_bytes: int | None = None,
    partition_bytes: int | None = None,
) -> DistributedDataParallel:
    """Replace the gradient reduction of a DistributedDataParallel `model`; returns the model.

    Collective: call it on every rank, with equal arguments, before the first backward. A LIGHT_*
    variable that is set wins over the argument, which wins over the default; the default is
    lossless.

    `mode`: "exact" or "auto" let a planner measure this network and one step of this model, and
    choose for every bucket the algorithm and the mildest form behind which the network hides: with
    "exact" lossless ones only, with "auto" down to `floor` ("bf16"; "topk" takes in "topk-chunk").
    One of `MODES` but "exact" forces that form: "fp16", "bf16", "int8", "topk" (the share `ratio`
    of largest magnitude) or "topk-chunk" (the same share of every 4,096); from int8 on with error
    feedback, norms and biases exact; where `optimizer` is given, the planner chooses the order in
    which buckets leave. None: no planner; `wire` names the form, `algorithm` "2d"
    (reduce inside the node first), "flat", or "auto": 2-D where there are several nodes with
    several ranks each; docs/guide/planning.md.
    `bucket_bytes`: size up to which gradients are fused; default: DDP's `bucket_cap_mb` where that
    was given, else 64 MiB.
    `partition_bytes`: what is larger is reduced in parts; default: EVENER_PARTITION_BYTES, and for
    a forced top-k 0, which is never.

    `optimizer`: the model's, made before. Then its `step()` returns at once, and each bucket is
    updated when its reduction lands, while the next forward runs (docs/guide/ddp.md); the numbers
    are the same. Only for optimizers that are known to update each entry on its own; for others,
    and for models whose use of parameters cannot be noticed, the log says why it is not done.

    `every`: each rank trains by itself for this many steps; then the changes of the weights are
    averaged, in the form of `mode` (with "auto": `floor`), and all go on from there. No gradient is
    reduced: this is another algorithm than DDP's (docs/guide/slow-networks.md). Needs `optimizer`:
    the model's, or a list of all that step it. EVENER_EVERY wins over it. `overlap`: the exchange
    runs behind this many of the next steps, below `every`, and its average is applied after them;
    0: the ranks wait for it. EVENER_OVERLAP wins over it. every="auto" chooses both, from what a
    step and an exchange take (`evener.comm.pace`), and rank 0 says what. `outer_lr`,
    `outer_momentum`: of the step that the average makes; default 0.7 and 0.9, with Muon 0.9 and
    0.6, with top-k and low rank 1 and 0. Then `model.evener` is an `evener.comm.rounds.Rounds`.
    Where EVENER_HUB is set (`evener launch --join`), this job is one node of several, which average
    through a hub, and `model.evener` an `evener.comm.hub.rounds.NodeRounds`: `steps` says how far
    all are.

    For top-k: `warmup_steps`: come down to `ratio` from 25% within this many steps. `momentum`: of
    an SGD, applied by the reducer before it selects (DGC's momentum correction); `p.grad` is then
    the velocity, so build the SGD without momentum, which is checked where `optimizer` is given.
    `scaler`: the GradScaler of FP16 training, whose changes of scale and skipped steps the
    residuals must follow.

    `model.evener.state_dict()` is what a checkpoint needs to go on with error feedback, or in the
    middle of local steps.

    Raises UsageError for a model that cannot be accelerated, CommError where ranks disagree.
    """
    given = model
    if isinstance(compiled := getattr(model, "_orig_mod", None), DistributedDataParallel):
        model = compiled  # of torch.compile(DistributedDataParallel(...)), which goes on calling it
    if isinstance(model, AcceleratedDataParallel):
        raise UsageError("the model is accelerated already", "call accelerate() once")
    if not isinstance(model, DistributedDataParallel):
        raise UsageError(
            f"accelerate() was given a {type(model).__name__}",
            "wrap the model first: DistributedDataParallel(model)",
        )
    refuse_unsupported(model)
    log.begin(dist.get_rank())
    if dist.get_rank() == 0:
        torch_names.say_untried(logger)
    local = _of_rounds("every", every, settings.EVENER_EVERY)
    if not local:
        of_rounds = {"overlap": overlap, "outer_lr": outer_lr, "outer_momentum": outer_momentum}
        for name, value in of_rounds.items():
            if value is not None:
                raise UsageError(f"{name}={value:g} is of local steps", "give every= too")
        if isinstance(optimizer, Sequence):
            raise UsageError(
                f"accelerate() was given {len(optimizer)} optimizers", "give one, or give every="
            )
        idle = (settings.EVENER_OVERLAP, settings.EVENER_HUB)
        say_idle("it is of local steps: set EVENER_EVERY too", *idle)
    else:
        if mode == "auto":
            mode, floor = floor or "bf16", None
        behind = _of_rounds("overlap", overlap, settings.EVENER_OVERLAP)
        if local == settings.AUTO and behind is not None:
            raise UsageError(f"overlap={behind}: every='auto' chooses it", "leave it out")
        if momentum or warmup_steps or partition_bytes:
            raise UsageError(
                "momentum=, warmup_steps= and partition_bytes= are of gradients", "leave them out"
            )
        options = Options.of_mode(
            mode,
            floor,
            wire,
            algorithm=algorithm,
            ratio=ratio,
            bucket_bytes=_BUCKET_BYTES if bucket_bytes is None else bucket_bytes,
        )
        say_idle("local steps have no profile", settings.EVENER_PROFILE)
        several = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        optimizers = [one for one in several if one is not None]
        lr, inertia = _outer_step(options.wire, optimizers)
        options = dataclasses.replace(
            options,
            every=pace.LEAST if local == settings.AUTO else int(local),
            overlap=int(behind or 0),
            auto=local == settings.AUTO,
            outer_lr=lr if outer_lr is None else outer_lr,
            outer_momentum=inertia if outer_momentum is None else outer_momentum,
        )
        begin = nodes.start if settings.EVENER_HUB.is_set() else start
        moved = begin(model, optimizers, options)
        return moved if given is model else given  # type: ignore[return-value]
    if optimizer is not None:
        optimizer = innermost(optimizer)
    options = Options.of_mode(
        mode,
        floor,
        wire,
        algorithm=algorithm,
        ratio=ratio,
        warmup_steps=warmup_steps,
        momentum=momentum,
        bucket_bytes=_bucket_bytes(model) if bucket_bytes is None else bucket_bytes,
        partition_bytes=partition_bytes,
    )
    _check_momentum(optimizer, options)
    named = taken(model)
    replace_older([parameter for _, parameter in named])
    may_be_unused = bool(model.find_unused_parameters or model.static_graph)
    reducer = Reducer(
        named,
        options,
        model.process_group,
        track_unused=may_be_unused,
        repeats=bool(model.static_graph),
    )
    reducer.unused.needs_all = not may_be_unused
    if scaler is not None:
        reducer.follow(scaler)
    if wires.get(options.wire).feedback or wires.get(options.floor).feedback:
        info0(
            "what compression has not sent yet is in model.evener.state_dict(), not in the model's "
            "own state_dict()"
        )
    try:
        across = _overlap(reducer, optimizer, model.module, mode)
        planner = _planner(reducer, mode, options, across)
        # A layer's part beside the rows is more bytes: to be hidden, compressed, or found worth it.
        apart = across is not None and (planner is not None or options.wire != "exact")
        reducer.parts.watch(model.module, layers=apart)
        look_at_moments(reducer, optimizer, planner)
        if planner is not None:
            allowed = everyones(reducer.communicators, planner.forms)
            planner.forms = tuple(f for f in planner.forms if all(f in other for other in allowed))
        if planner is not None and planner.forced is None:
            reducer.parts.forms = planner.forms
        wrapped = wrap(model, reducer, Steps(reducer, across, planner))
    except BaseException:
        reducer.drop()
        raise
    return wrapped if given is model else given  # type: ignore[return-value]


def _of_rounds(
    name: str, argument: int | str | None, setting: settings.Setting[Any]
) -> int | str | None:
    """What the variable says, or else the argument."""
    if isinstance(argument, int) and argument < 0:
        raise UsageError(f"{name}={argument}", "give a number of steps, or 0 for none")
    if setting.is_set():
        found: int | str = setting.get()
        if argument is not None and argument != found:
            info0("%s=%s is overruled by %s: %s", name, argument, setting.name, found)
        return found
    return argument


def _outer_step(form: str, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[float, float]:
    """Learning rate and momentum of the step that an average makes, where the user gives none.

    0.7 and 0.9 are DiLoCo's. What comes over many rounds is a momentum already
    (`evener.comm.rounds`). The ranks' ways in a round agree less under Muon, and less momentum is
    better there (docs/benchmarks/accuracy.md#local-steps).
    """
    if forms.described(form).late:
        return 1.0, 0.0
    if any("muon" in type(innermost(one)).__name__.lower() for one in optimizers):
        return 0.9, 0.6
    return 0.7, 0.9


def _bucket_bytes(model: DistributedDataParallel) -> int:
    """What was said, or more than DDP's own: here the first and the last buckets are smaller."""
    given = not getattr(model, "bucket_bytes_cap_default", False)
    return int(model.bucket_bytes_cap) if given else _BUCKET_BYTES


def _planner(
    reducer: Reducer, mode: str | None, options: Options, overlap: StepOverlap | None
) -> Planner | None:
    if options.wire != "exact":
        if mode in ("exact", "auto") and reducer.communicators.rank == 0:
            logger.info("mode=%s: no form is chosen, because %s was asked for", mode, options.wire)
        # What is left to decide is an order, of what crosses a network behind the next forward.
        crosses = reducer.communicators.route.levels.nodes > 1
        return Planner(reducer, overlap=True) if overlap is not None and crosses else None
    return Planner(reducer, overlap=overlap is not None) if mode in ("exact", "auto") else None


def _check_momentum(optimizer: torch.optim.Optimizer | None, options: Options) -> None:
    """Momentum must be applied once."""
    if optimizer is None or not options.momentum:
        return
    for group in optimizer.param_groups:
        if group.get("momentum") or "betas" in group:
            raise UsageError(
                f"momentum={options.momentum:g} is applied by the reducer, and "
                f"{type(optimizer).__name__} applies its own",
                "build torch.optim.SGD(momentum=0), or leave accelerate's momentum out",
            )


def _overlap(
    reducer: Reducer,
    optimizer: torch.optim.Optimizer | None,
    module: torch.nn.Module,
    mode: str | None,
) -> StepOverlap | None:
    """What defers steps, on all ranks or on none. Collective.

    Raises CommError where ranks disagree on what is planned.
    """
    why = ""
    if optimizer is not None:
        why = refusal(optimizer) or refuse_model(reducer, module)
    kind = "" if optimizer is None else type(optimizer).__name__
    mine = {"mode": mode, "EVENER_TRIAL_STEPS": settings.EVENER_TRIAL_STEPS.get()}
    everyone = everyones(reducer.communicators, (mine, kind, why))
    for rank, (theirs, _, _) in enumerate(everyone):
        for name, value in everyone[0][0].items():
            if theirs[name] != value:
                raise CommError(
                    f"the ranks do not agree: rank 0 has {name} = {value!r}, rank {rank} has "
                    f"{theirs[name]!r}",
                    "give the same on every rank",
                )
    first = next((rank for rank, (_, _, why) in enumerate(everyone) if why), None)
    if first is not None:
        why = everyone[first][2] + (f" (rank {first})" if first else "")
    elif len({kind for _, kind, _ in everyone}) > 1:
        why = "the ranks have different optimizers"
    if reducer.communicators.rank == 0 and any(kind for _, kind, _ in everyone):
        said = f"no, {why}" if why else f"yes, {kind} bucket by bucket"
        logger.log(logging.INFO if why else logging.DEBUG, "overlap across the step: %s", said)
    return None if why or optimizer is None else StepOverlap(reducer, optimizer, module)


@given
def refuse_unsupported(model: DistributedDataParallel) -> None:
    unsupported = {
        "mixed_precision": getattr(model, "mixed_precision", None) is not None,
        "delay_all_reduce_named_params": bool(getattr(model, "_delay_all_reduce_params", None)),
        "a communication hook": bool(getattr(model, "_comm_hooks", None)),
        "optimizers in backward": any(
            hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters()
        ),
        "the Python reducer of torch.compile": bool(getattr(model, "_use_python_reducer", False)),
    }
    for what, present in unsupported.items():
        if present:
            raise UsageError(
                f"this DistributedDataParallel uses {what}, which accelerate() does not support",
                "build it without, or leave accelerate out",
            )
