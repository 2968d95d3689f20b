"""A DistributedDataParallel that takes local steps: no gradient is reduced, weights are averaged.

    model = evener.ddp.accelerate(DistributedDataParallel(model), optimizer, every=16)

`evener.comm.rounds` says what an exchange does. Here is when: after the step in which the N-th step
of the program ends. A step is one call of `optimizer.step()`, whatever lies before it (several
backwards, clipping, a closure), and also one that a GradScaler left out, so that ranks whose losses
scale apart stay together. Of several optimizers of one model each steps once per step.

Everything else is one rank's own: its gradients, its optimizer's state, its learning rate. Buffers
follow DDP: where it broadcasts rank 0's before every forward, they come with every exchange.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.join import JoinHook
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.distributed import DistributedDataParallel

from evener.comm.options import Options
from evener.comm.overlap import innermost
from evener.comm.rounds import Rounds
from evener.comm.scalers import Skips
from evener.ddp.model import AcceleratedDataParallel, become, replace_older, take_kept, taken
from evener.errors import UsageError

logger = logging.getLogger("evener.ddp")

# Keep weights of their own in their state, or gradients that belong to the weights as they were:
# both are wrong once an exchange has moved the weights.
_KEEPS_WEIGHTS = ("ScheduleFree", "Lookahead", "PostLocalSGD")


class LocalDataParallel(AcceleratedDataParallel):
    """See the module. Made by `evener.ddp.accelerate(every=N)`, never by its constructor."""

    evener: Rounds  # type: ignore[assignment]
    evener_steps: LocalSteps  # type: ignore[assignment]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Move inputs as DDP does, and call the module: nothing is sent."""
        if self._evener_ended:
            return self._forward_as_before(*inputs, **kwargs)
        self.evener_steps.forward_began()
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            moved = _to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)
            inputs, kwargs = moved[0][0], moved[1][0]
        return self._run_ddp_forward(*inputs, **kwargs)

    def expect_gradients(self) -> None:
        """Gradients are this rank's own."""

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """`join()` meets the other ranks in every forward, which local steps do not."""
        raise UsageError(
            "join() and every= do not go together",
            "leave join() out: ranks meet every N steps only, and need as many steps in all",
        )

    def _set_static_graph(self) -> None:
        self.static_graph = True

    def _leaves(self) -> None:
        self.evener.end_round()

    def share_buffers(self) -> None:
        """Rank 0's buffers for all, where DDP would do so before a forward. Collective."""
        self.require_forward_param_sync = True
        if self.will_sync_module_buffers():
            self._sync_buffers()


class LocalSteps:
    """Counts the steps of a model's `optimizers`, and tells `rounds` of each."""

    overlap = planner = None  # what others look for where gradients are reduced

    def __init__(self, rounds: Rounds, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.on_forward: Callable[[], None] | None = None
        self._rounds = rounds
        self._optimizers = list(optimizers)
        self._taken = [0] * len(self._optimizers)
        # An optimizer outlives its model: its hooks must not keep what they call.
        before, after = weakref.WeakMethod(self._begins), weakref.WeakMethod(self._ends)
        self._handles = []
        for optimizer in self._optimizers:
            self._handles += [
                optimizer.register_step_pre_hook(functools.partial(_call, before)),
                optimizer.register_step_post_hook(functools.partial(_call, after)),
            ]
        self._skips = Skips(self._count, self._ends)

    def forward_began(self) -> None:
        """A forward of the model begins."""
        if self.on_forward is not None and torch.is_grad_enabled():
            self.on_forward()

    def _place(self, optimizer: torch.optim.Optimizer) -> int | None:
        mine = innermost(optimizer)
        return next((i for i, one in enumerate(self._optimizers) if one is mine), None)

    def _count(self, optimizer: torch.optim.Optimizer) -> int | None:
        place = self._place(optimizer)
        return None if place is None else self._taken[place]

    def _begins(self, _: torch.optim.Optimizer) -> None:
        self._rounds.settle()

    @_disable_dynamo
    def _ends(self, optimizer: torch.optim.Optimizer) -> None:
        place = self._place(optimizer)
        assert place is not None
        self._taken[place] += 1
        if self._taken[place] > min(self._taken) + 1:
            late = self._optimizers[self._taken.index(min(self._taken))]
            raise UsageError(
                f"{type(optimizer).__name__} took a second step before {type(late).__name__} took "
                "its own: with every= a step is one of each optimizer",
                "step all optimizers given to accelerate() once per step",
            )
        if min(self._taken) == max(self._taken):
            self._rounds.stepped()

    def finish(self, reason: str) -> None:
        """Nothing is on its way between steps; see `evener.comm.steps`."""

    def close(self) -> None:
        """Count no more. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._skips.close()


def _call(method: weakref.WeakMethod[Any], optimizer: Any, *_: Any) -> None:
    if (call := method()) is not None:
        call(optimizer)


def start(
    model: DistributedDataParallel,
    optimizers: Sequence[torch.optim.Optimizer],
    options: Options,
) -> LocalDataParallel:
    """Make `model` take local steps, as `options` say. Collective, between steps.

    `optimizers`: all that step it. Raises UsageError for what cannot be, CommError where ranks
    differ.
    """
    optimizers = [innermost(optimizer) for optimizer in optimizers]
    named = taken(model)
    if why := refusal(named, optimizers):
        every = "auto" if options.auto else options.every
        raise UsageError(f"every={every}: {why}", "leave every= out, or change that")
    replace_older([parameter for _, parameter in named])
    rounds = Rounds(named, model.module, options, model.process_group)
    steps = LocalSteps(rounds, optimizers)
    made = become(
        model,
        LocalDataParallel,
        functools.partial(_release, rounds, steps),
        evener=rounds,
        evener_steps=steps,
    )
    assert isinstance(made, LocalDataParallel)
    this = weakref.ref(made)

    def exchanged() -> None:
        if (live := this()) is not None:
            live.share_buffers()

    rounds.exchanged = exchanged
    take_kept(made)
    if any(isinstance(m, torch.nn.SyncBatchNorm) for m in model.module.modules()):
        logger.warning("SyncBatchNorm meets the other ranks in every forward, every= or not")
    return made


def refusal(
    named: Sequence[tuple[str, torch.nn.Parameter]], optimizers: Sequence[torch.optim.Optimizer]
) -> str:
    """Why these optimizers cannot take local steps with these parameters; or nothing."""
    # It compiles 66 functions when it is imported, and jobs without rounds do without.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if not optimizers:
        return "no optimizer was given, whose steps are counted"
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            return f"{kind} updates a part of the weights on each rank in every step"
        if isinstance(optimizer, torch.optim.LBFGS) or any(word in kind for word in _KEEPS_WEIGHTS):
            return f"{kind} keeps weights, or what belongs to them, that an exchange does not move"
    stepped = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    left = [name for name, p in named if p.requires_grad and id(p) not in stepped]
    if left:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        return f"{left[0]}{more} are trained, and {kinds} does not step them"
    return ""


def _release(rounds: Rounds, steps: LocalSteps) -> None:
    """The model is gone, or reduced by another reducer."""
    steps.close()
    rounds.drop()
