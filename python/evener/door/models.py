"""One follower a DistributedDataParallel: from DDP's own steps to Evener's, or not at all.

    waiting   DDP's own first steps (EVENER_DDP_PLAIN), which show which optimizer steps the model,
              whether DDP itself is content with it, and how long its step takes
    vote      at the next forward after a step: may this model be accelerated, on every rank?
    Evener    `accelerate`, and a second vote on whether that went well everywhere; else plain again
    left      plain DDP, as if the door was not there

The switch is at the start of a differentiated forward, when no gradient is on its way: by then
communication hooks, static graph and join are known. Every path that is not Evener ends in `left`,
with one line that says why.
"""

from __future__ import annotations

import atexit
import collections
import hashlib
import logging
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel.distributed import DistributedDataParallel

import evener.base.log  # noqa: F401 - it prints what is said here
from evener.base import settings
from evener.comm import forms
from evener.door import optimizers
from evener.door.agree import agree
from evener.door.pace import Pace, compared
from evener.errors import EvenerError, UsageError

logger = logging.getLogger("evener.door")

# On the model: False while a follower waits, True when it has decided.
_MARK = "_evener_door"
_WARM = 3  # DDP's first steps lay out its buckets and allocate memory
_SETTLING = 16  # Evener's first steps measure and try

_forward: Callable[..., Any] = DistributedDataParallel.forward
_followers: weakref.WeakKeyDictionary[torch.nn.Module, Follower] = weakref.WeakKeyDictionary()
_scalers: weakref.WeakSet[GradScaler] = weakref.WeakSet()
_reports: collections.deque[Callable[[], str]] = collections.deque(maxlen=8)
_votes: collections.Counter[str] = collections.Counter()


def follow(kind: type[DistributedDataParallel]) -> None:
    """Follow every model of that class, from now on. Raises UsageError for a wrong variable."""
    global _forward
    settings.EVENER_DDP_PLAIN.get()
    settings.EVENER_EVERY.get()
    if settings.EVENER_DDP.get() == "auto":
        if floor := settings.EVENER_FLOOR.get():
            forms.require(floor, settings.EVENER_FLOOR.name)
        _watch_scalers()
    _forward = kind.forward
    kind.forward = _followed  # type: ignore[method-assign]
    atexit.register(_at_end, os.getpid())


def _followed(self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
    """Instead of DistributedDataParallel.forward."""
    waits = self.__dict__.get(_MARK) is not True and "evener_steps" not in self.__dict__
    if waits and torch.is_grad_enabled() and _now(self):
        from evener.ddp import AcceleratedDataParallel, LocalDataParallel, NodeDataParallel

        # Not the model's own forward: a subclass of DDP may have called this one from there.
        kinds: list[Any] = [NodeDataParallel, LocalDataParallel, AcceleratedDataParallel]
        kind = next(one for one in kinds if isinstance(self, one))
        return kind.forward(self, *inputs, **kwargs)
    return _forward(self, *inputs, **kwargs)


@_disable_dynamo
def _now(model: DistributedDataParallel) -> bool:
    """A differentiated forward of `model` begins; whether it was accelerated just now."""
    if "evener_steps" in model.__dict__:
        # Dynamo asks what it saw of the model before the switch: here is what it is now.
        return False
    try:
        follower = _followers.get(model)
        if follower is None:
            follower = _followers[model] = Follower(model)
        return follower.forward_begins(model)
    except Exception as error:  # noqa: BLE001 - what is not accelerated must train on
        model.__dict__[_MARK] = True
        if (left := _followers.get(model)) is not None:
            left.decided = True
        logger.warning("EVENER_DDP: %s is left as it is: %s", _name(model), _one_line(error))
        return False


class Follower:
    """What is known of one model, while it is waited for and after."""

    def __init__(self, model: DistributedDataParallel) -> None:
        model.__dict__[_MARK] = False
        self.name = _name(model)
        self.group = model.process_group
        self.rank = dist.get_rank(self.group)
        self.mine = {id(p) for p in model.parameters()}
        self.optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.steps = self.forwards = 0
        self.apart = False  # whether the last differentiated forward was followed by a step
        self.per_step = 1
        self._since = 0
        self.device = next(iter(model.parameters())).device
        self.before: Pace | None = None
        self.after: Pace | None = None
        self.used = ""
        self.decided = False
        self._model = weakref.ref(model)
        _reports.append(self.report)
        stepped = weakref.WeakMethod(self.stepped)
        self._call = lambda optimizer: None if (call := stepped()) is None else call(optimizer)
        optimizers.listen(self._call)
        weakref.finalize(self, optimizers.leave, self._call)

    # --- DDP's own steps ---

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer, anybody's, took a step."""
        if not self.mine & optimizers.parameters(optimizer):
            return
        self.optimizers.add(optimizer)
        if not self._since:
            return  # the second optimizer of a step
        self.per_step, self._since = self._since, 0
        self.steps += 1
        self.apart = True

    def forward_begins(self, model: DistributedDataParallel) -> bool:
        """Whether the model is Evener's from this forward on."""
        wanted = _plain_steps()
        between = self.apart or not any(p.grad is not None for p in model.parameters())
        # Whose optimizer is not torch's is never seen to step: then gradients say where a step is.
        many = self.forwards >= 4 * wanted and not self.steps and not settings.EVENER_EVERY.get()
        if between and (self.steps >= wanted or many):
            return self._decide(model)
        if self.before is None and self.steps >= min(_WARM, wanted - 1):
            self.before = Pace(self.device, 0)
        if self.before is not None:
            self.before.mark()
        self.apart = False
        self._since += 1
        self.forwards += 1
        return False

    # --- the decision ---

    def _decide(self, model: DistributedDataParallel) -> bool:
        optimizers.leave(self._call)
        model.__dict__[_MARK] = self.decided = True
        if self.before is not None:
            self.before.mark()
        # Counted by what all ranks of this group have in common: others may be in other groups too.
        key = f"evener/door/{self._group_name()}/{_digest(model)}"
        _votes[key] += 1
        key += f"/{_votes[key]}"
        seconds = settings.EVENER_TIMEOUT.get()
        why = agree(key, _refusal(model), self.group, seconds)
        if why:
            self._left(why)
            return False
        error = self._accelerate(model)
        why = agree(f"{key}/made", error, self.group, seconds)
        if why:
            from evener.ddp import AcceleratedDataParallel, restore

            if isinstance(model, AcceleratedDataParallel):
                restore(model)
            self._left(why)
            return False
        self.after = Pace(self.device, _SETTLING * self.per_step)
        model.evener_steps.on_forward = self._mark_after  # type: ignore[union-attr]
        self._say_used(model)
        return True

    def _accelerate(self, model: DistributedDataParallel) -> str:
        """What went wrong, or nothing."""
        from evener.ddp import accelerate

        wish = settings.EVENER_DDP.get()
        scalers = list(_scalers)
        if len(scalers) > 1 and wish == "auto":  # none says which model's loss it scales
            wish = "exact"
            if self.rank == 0:
                logger.warning(
                    "EVENER_DDP=auto: %s goes exact: the job has %d GradScalers, and residuals "
                    "must follow the right one (evener.ddp.accelerate(scaler=) says which)",
                    self.name,
                    len(scalers),
                )
        floor = settings.EVENER_FLOOR.get() or None
        if floor is not None and wish != "auto":
            floor = None
            if self.rank == 0:
                logger.info("EVENER_FLOOR has no effect: %s goes %s", self.name, wish)
        scaler = scalers[0] if len(scalers) == 1 else None
        optimizer: Any = self._optimizer()
        if settings.EVENER_EVERY.get():
            optimizer = list(self.optimizers)
        try:
            accelerate(model, optimizer, mode=wish, floor=floor, scaler=scaler)
        except Exception as error:  # noqa: BLE001 - then it stays plain DDP, everywhere
            return _one_line(error)
        return ""

    def _optimizer(self) -> torch.optim.Optimizer | None:
        """The one whose steps may be deferred: the only one, and of this model alone."""
        if len(self.optimizers) != 1:
            return None
        (optimizer,) = self.optimizers
        return optimizer if optimizers.parameters(optimizer) <= self.mine else None

    def _left(self, why: str) -> None:
        if self.rank == 0:
            logger.info("EVENER_DDP: %s is left as it is: %s", self.name, why)

    def _group_name(self) -> str:
        group = self.group
        return str(getattr(group, "group_name", "") or dist.get_world_size(group))

    # --- what is said ---

    def _mark_after(self) -> None:
        assert self.after is not None
        self.after.mark()

    def _say_used(self, model: DistributedDataParallel) -> None:
        if self.rank != 0:
            return
        kinds = ", ".join(sorted(type(o).__name__ for o in self.optimizers)) or "not seen"
        if not settings.EVENER_EVERY.get() and self._optimizer() is None:
            kinds += ", so steps do not overlap (that takes one, of this model's parameters alone)"
        logger.info(
            "EVENER_DDP=%s: %s goes on with Evener after %d steps of DDP's own; optimizer: %s",
            settings.EVENER_DDP.get(),
            self.name,
            self.steps,
            kinds,
        )
        reducer = weakref.ref(model.evener)

        def describe() -> str:
            there: Any = reducer()
            return there.describe() if there is not None else self.used

        self.used = describe()
        self._describe = describe

    def report(self) -> str:
        """One line: what was used and how it compares with DDP, or that it never took over."""
        if self.rank != 0 or (self.decided and self.after is None):
            return ""  # why not was said when it was decided
        if "evener_steps" in getattr(self._model(), "__dict__", ()) and not self.decided:
            return ""  # the script accelerated it itself
        if not self.decided:
            wanted = _plain_steps()
            return (
                f"{self.name}: plain DDP to the end: it took {self.steps} steps, and Evener takes "
                f"over after {wanted} (EVENER_DDP_PLAIN)"
            )
        own = [] if self.before is None else self.before.laps_ms(self.per_step)
        assert self.after is not None
        return (
            f"{self.name}: {self._describe()}; {compared(own, self.after.laps_ms(self.per_step))}"
        )


def _refusal(model: DistributedDataParallel) -> str:
    """Why this rank would rather leave the model as it is; or nothing."""
    from evener.ddp import refuse_unsupported

    if model._join_config.enable:
        return "join() is in use"
    try:
        refuse_unsupported(model)
    except UsageError as error:
        return error.problem
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and parameter.is_meta:
            return f"{name} is on the meta device"
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            return f"the gradient of {name} is sparse"
    if any(getattr(module, "sparse", False) is True for module in model.modules()):
        return "it has an embedding with sparse gradients"
    return ""


def _plain_steps() -> int:
    """How many steps DDP takes first: local steps need one, which shows the optimizers."""
    setting = settings.EVENER_DDP_PLAIN
    return 1 if settings.EVENER_EVERY.get() and not setting.is_set() else setting.get()


def _watch_scalers() -> None:
    """Know the GradScalers that are used: residuals of lossy forms must follow their scale."""
    inner = GradScaler.scale

    def scale(self: GradScaler, outputs: Any) -> Any:
        if self._enabled:
            _scalers.add(self)
        return inner(self, outputs)

    GradScaler.scale = scale  # type: ignore[method-assign]


def _digest(model: DistributedDataParallel) -> str:
    text = ";".join(f"{n}{tuple(p.shape)}" for n, p in model.module.named_parameters())
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _name(model: DistributedDataParallel) -> str:
    return type(getattr(model.module, "_orig_mod", model.module)).__name__


def _one_line(error: BaseException) -> str:
    text = error.problem if isinstance(error, EvenerError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]


def _at_end(process: int) -> None:
    """The job's last lines. Not in what was forked from it."""
    if os.getpid() != process:
        return
    for report in _reports:
        try:
            text = report()
        except Exception as error:  # noqa: BLE001 - a device that is gone must not spoil the end
            logger.info("EVENER_DDP: no comparison with DDP's own steps: %s", _one_line(error))
            continue
        if text:
            logger.info("EVENER_DDP=%s: %s", settings.EVENER_DDP.get(), text)
