"""The optimizer's step, taken bucket by bucket while the next forward runs.

    idle       nothing is on its way
    tracing    a forward is observed once: which buckets it needs, and in what order
    reducing   backward has ended, reductions are on their way, `step()` has not been called
    deferred   `step()` was called: buckets are updated as they land
    watched    everything has landed; whether something looks at it before `step()` is noticed

Where a planner found that deferring is no faster (`wanted` is False), `step()` waits for all. Until
then, or until something looks, nothing does: a script that reads its loss after backward
(transformers' Trainer, in every step) waits for backward alone, and prepares what follows while the
network still works.

While reducing, whatever looks at a gradient or a parameter (clipping, GradScaler, a norm that is
logged) makes the step an ordinary one: everything is waited for. While deferred, the first use of a
parameter waits for its bucket only, see `guard`. On a GPU updates run on a stream of their own,
each after its reduction, and a use makes the user's stream wait for the bucket's event; nothing
blocks the host. On a CPU a use waits for the reduction and takes the update there.

Before a parameter's gradient is accumulated again, everything must have landed: hooks on the
parameters see to that, for scripts that call backward twice, or without this model's forward.

All of it holds only while nobody can see it. Uses of parameters are noticed (`guard`), and so are
those of the optimizer's state (`state`) and torch's calls that go round Python (`interpose`). What
a program has kept cannot be noticed: tensors in the memory of parameters, gradients or state
(`evener.comm.holders`). While there is such a thing, a step ends where plain DDP's does.
"""

from __future__ import annotations

import logging
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evener.comm import holders
from evener.comm.lookups import compiled
from evener.comm.overlap import guard, interpose, optimizers
from evener.comm.overlap.guard import Pending
from evener.comm.overlap.state import StateWatch
from evener.comm.profile import Recorder
from evener.comm.reducer import Reducer

logger = logging.getLogger("evener.comm")


class State(Enum):
    """See the module."""

    IDLE = 0
    TRACING = 1
    REDUCING = 2
    DEFERRED = 3
    WATCHED = 4


class StepOverlap:
    """Defers `optimizer`'s updates of what `reducer` reduces.

    Its owner (a front door) calls `trace` and `forward_ended` around a forward and
    `backward_ended` instead of the reducer's `flush` and `apply`. `finish` may be called at any
    time, by anybody.
    """

    def __init__(
        self, reducer: Reducer, optimizer: torch.optim.Optimizer, model: nn.Module
    ) -> None:
        self.reducer, self.optimizer = reducer, optimizer
        self.device = reducer.device
        self._state = State.IDLE
        self.off = ""  # why steps are not deferred any more, where they are not
        self.wanted = True  # False: not for now, because a planner found it slower
        # Steps that could not be deferred, because something looked at their results before
        # `step()`; what did so in the last one.
        self.interrupted = 0
        self.looked_at = ""
        self._lock = threading.RLock()
        self._recorder: Recorder | None = None
        self._layout: Any = None
        self._members: dict[int, list[nn.Parameter]] = {}
        self._last: dict[int, int] = {}
        self._place: dict[int, int] = {}
        self._waiting: set[int] = set()  # units, see `_look_at_layout`
        self._groups: dict[int, list[optimizers.Group]] = {}
        self._dropped: set[int] = set()
        self._events: dict[int, torch.cuda.Event] = {}
        self._updated: torch.cuda.Event | None = None  # the last step's last update
        self._told: set[str] = set()
        gpu = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(self.device, priority=-1) if gpu else None
        self._step_stream: Any = None
        self._inner_step = optimizer.step
        self._inner_zero_grad = optimizer.zero_grad
        optimizer.step = types.MethodType(self._step_method(), optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = types.MethodType(  # type: ignore[method-assign]
            lambda _, set_to_none=True: self._zero_all(set_to_none), optimizer
        )
        self._watched: list[Any] = []  # hooks on gradients, for a backward that may write them
        self._optimizer_state = StateWatch(optimizer, self._state_used)
        self._handles = [
            *guard.hook_modules(model, self),
            optimizer.register_state_dict_pre_hook(lambda _: self._gives_state()),
            optimizer.register_load_state_dict_pre_hook(
                lambda _, __: self.finish("optimizer.load_state_dict()")
            ),
        ]
        interpose.watch(self)
        own, still = weakref.WeakMethod(self.finish), weakref.WeakMethod(self._is_pending)
        reducer.finish = lambda why: None if (call := own()) is None else call(why)
        reducer.is_pending = lambda: False if (call := still()) is None else call()

    @property
    def state(self) -> State:
        """See the module."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state
        if state is State.IDLE and self._watched:
            watched, self._watched = self._watched, []
            self.reducer.own_hooks = 0
            for handle in watched:
                handle.remove()

    def _step_method(self) -> Callable[..., Any]:
        def step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
            del optimizer
            return self.step(closure)

        if hasattr(self._inner_step, "_wrapped_by_lr_sched"):
            step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return step

    # --- the course of a step ---

    def trace(self, recorder: Recorder) -> None:
        """Observe the forward that begins now."""
        with self._lock:
            self.finish("")
            # A compiled forward must not meet parameters of another class, nor torch.func.
            if self.off or interpose.within():
                return
            self._look_at_layout()
            self._recorder, self.state = recorder, State.TRACING
            self._arm(self._members)

    def forward_begins(self) -> None:
        """A forward that will be differentiated begins."""
        if self.state in (State.REDUCING, State.WATCHED):
            self.finish("forward between backward and step")

    def forward_ended(self) -> None:
        """Bring in what this forward did not use: backward may write any gradient."""
        self.finish("")
        self._recorder = None

    def backward_ended(self, at_once: bool) -> None:
        """All gradients came and were submitted. `at_once`: take an ordinary step."""
        with self._lock:
            capturing = self._stream is not None and torch.cuda.is_current_stream_capturing()
            seen = self.reducer.gradients_seen or interpose.within()
            if at_once or self.off or self.reducer.ends_together or capturing or seen:
                self.reducer.apply()
                if seen and not (at_once or self.off or capturing):
                    self._tell("the program keeps gradients")
                    return
                if at_once and not (self.off or capturing):
                    self._look_at_layout()
                    self.state = State.WATCHED
                    self._arm(self._members)
                return
            self.reducer.defer()
            if self._stream is not None:
                self._step_stream = torch.cuda.current_stream(self.device)
            self._look_at_layout()
            self.state = State.REDUCING
            self._arm(self._members)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The optimizer's step: deferred where it may be."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        loss = None
        if closure is not None:
            if not optimizers.closure_first(self.optimizer):
                self.finish("step(closure)")
                with self._optimizer_state.own():
                    return self._inner_step(closure)
            if self.state in (State.REDUCING, State.WATCHED):
                self.finish("step(closure) after a backward")
            # Without the lock: backward may run in any thread.
            with torch.enable_grad():
                loss = closure()
        with self._lock:
            if self.state is State.REDUCING and not self.wanted:
                self.finish("")
            waits = self.state in (State.REDUCING, State.WATCHED)
            if waits and (why := optimizers.at_once(self.optimizer)):
                self.finish(why)
            if self.state is State.WATCHED:  # nothing has looked
                self._disarm(self._members)
                self.state = State.IDLE
            if self.state is State.REDUCING and (why := self._seen()):
                self.finish(why)
            if self.state is State.REDUCING:
                optimizers.observe(self.optimizer)
                self._defer()
                return loss
        self.finish("optimizer.step() twice")
        with self._optimizer_state.own():
            result = self._inner_step()
        return result if closure is None else loss

    def _seen(self) -> str:
        """Who could see this step while it is on its way; or nothing."""
        with torch._C.DisableTorchFunctionSubclass():
            if holders.share_memory(self.reducer.parameters):
                return "other tensors lie in the memory of parameters"
            return self._optimizer_state.seen()

    def _state_used(self) -> None:
        self.finish("optimizer.state is used")

    def _gives_state(self) -> None:
        self.finish("optimizer.state_dict()")
        self._optimizer_state.given()

    def _defer(self) -> None:
        self._groups = optimizers.split(self.optimizer, self._place)
        if self._stream is not None:  # torch's fused and foreach updates are for plain parameters
            self._disarm(self._members)
        self._update(self._groups.pop(optimizers.NOWHERE, []))
        self._waiting = set(self._members)
        self._dropped.clear()
        if self._stream is not None:
            self._step_stream = torch.cuda.current_stream(self.device)
            self._stream.wait_stream(self._step_stream)
            with torch.cuda.stream(self._stream):
                for bucket in self.reducer.sequence:
                    self.reducer.wait(bucket)
                    if bucket in self._last:
                        unit = self._last[bucket]
                        self._update(self._groups.get(unit, []))
                        self._events[unit] = self._stream.record_event()
                self._updated = self._stream.record_event()
                # Here, on the stream that waits for all of them: it may look at what they measured.
                self.reducer.end_step()
            self._groups.clear()
            self._arm(self._waiting)
        self.state = State.DEFERRED

    def _update(self, groups: list[optimizers.Group]) -> None:
        with self._optimizer_state.of_the_step():
            optimizers.update(self.optimizer, groups)

    def _land(self, unit: int) -> None:
        """The unit's parameters as they are after the step, from here on the current stream."""
        if unit not in self._waiting:
            return
        members = self._members[unit]
        if self._stream is not None:
            self._wait_on_stream(self._events[unit])
            self._disarm([unit])
        else:
            for bucket in self.reducer.buckets[unit].parts:
                self.reducer.wait(bucket)
            self._disarm([unit])
            self._update(self._groups.pop(unit, []))
            for parameter in members:
                if id(parameter) in self._dropped:
                    parameter.grad = None
        self._waiting.discard(unit)
        if not self._waiting:
            self.state = State.IDLE
            if self._stream is None:
                self.reducer.end_step()

    def _wait_on_stream(self, event: torch.cuda.Event) -> None:
        assert self._step_stream is not None
        self._step_stream.wait_event(event)
        if torch.cuda.current_stream(self.device) != self._step_stream:
            # This stream may hand on to others that did not wait: only the host orders them all.
            self._tell("a parameter is used on another stream than optimizer.step() was called on")
            event.synchronize()

    def zero_grad(self, set_to_none: bool, parameters: Iterable[torch.Tensor]) -> None:
        """As a module's or an optimizer's, over `parameters`.

        Gradients that a deferred update still needs are dropped once they were used.
        """
        with self._lock:
            if self.state is State.DEFERRED and not set_to_none:
                self.finish("zero_grad(set_to_none=False)")
            elif self.state in (State.REDUCING, State.WATCHED):
                self.finish("zero_grad() between backward and step")
            if self.state is State.DEFERRED:
                parameters = self._drop(parameters)
        for parameter in parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                if parameter.grad.grad_fn is not None:  # a graph of gradients ends here
                    parameter.grad = parameter.grad.detach()
                parameter.grad.requires_grad_(False).zero_()

    def _drop(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Drop the gradients of those that are pending, in time; returns the others."""
        left = []
        with torch._C.DisableTorchFunctionSubclass():
            for parameter in parameters:
                if type(parameter) is not Pending or id(parameter) not in self._place:
                    left.append(parameter)
                elif self._stream is None:
                    self._dropped.add(id(parameter))
                else:  # all that reads it was enqueued by step()
                    parameter.grad = None
        return left

    def _zero_all(self, set_to_none: bool) -> None:
        groups = self.optimizer.param_groups
        if self.state is State.IDLE:
            self._inner_zero_grad(set_to_none)
        else:
            self.zero_grad(set_to_none, [p for group in groups for p in group["params"]])

    def finish(self, reason: str, *, on_host: bool = False) -> None:
        """Bring in all that is on its way. `reason` is logged, once; empty: as it is meant to be.

        `on_host`: also wait for it on a GPU. Raises CommError where a reduction failed.
        """
        with self._lock:
            if on_host and self._updated is not None:
                self._updated.synchronize()
                self._updated = None
            if self.state is State.IDLE:
                return
            watched = self.state is State.WATCHED
            ordinary = self.state is State.REDUCING and not self.wanted
            if reason and not ordinary and (watched or self.state is State.REDUCING):
                self.interrupted += 1
                self.looked_at = reason
            if reason and not (watched or ordinary or self.state is State.TRACING):
                self._tell(reason)
            if watched or self.state is State.TRACING:
                self._disarm(self._members)
                self.state = State.IDLE
            elif self.state is State.REDUCING:
                self._wait_for_all()
                self._disarm(self._members)
                self.state = State.IDLE
                self.reducer.end_step()
            else:
                for bucket in self.reducer.sequence:
                    self._land(self.reducer.buckets[bucket].parts[0])
            if on_host and self._stream is not None:
                torch.cuda.current_stream(self.device).synchronize()

    def _wait_for_all(self) -> None:
        """All reductions: for whoever asks, and for the stream that step() will be called on."""
        for bucket in self.reducer.sequence:
            self.reducer.wait(bucket)
        if self._stream is not None and (
            torch.cuda.current_stream(self.device) != self._step_stream
        ):
            with torch.cuda.stream(self._step_stream):
                for bucket in self.reducer.sequence:
                    self.reducer.wait(bucket)

    def updated_for(self, stream: Any) -> torch.cuda.Event | None:
        """What `stream` (None: the current one) must wait for where it waits for something else.

        None for the streams that know: step()'s, which waits bucket by bucket, and the updates'.
        """
        updated = self._updated
        if updated is None:
            return None
        if stream is None:
            stream = torch.cuda.current_stream(self.device)
        knows = stream in (self._step_stream, self._stream) or stream.device != self.device
        return None if knows else updated

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            if self.reducer.communicators.rank == 0:
                logger.info(
                    "overlap across the step is interrupted, Evener waits for all of it: %s", reason
                )

    def detach(self) -> None:
        """Finish, and leave optimizer and model as they were."""
        self.finish("", on_host=True)
        for handle in self._handles:
            handle.remove()
        self._optimizer_state.close()
        self.optimizer.__dict__.pop("step", None)
        self.optimizer.__dict__.pop("zero_grad", None)
        if "_wrapped_by_lr_sched" in getattr(self._inner_step, "__dict__", {}):
            self.optimizer.step = self._inner_step  # type: ignore[method-assign]

    # --- guard.Owner ---

    def used(self, parameters: Sequence[Pending], function: Callable[..., Any]) -> None:
        """A pending parameter is used."""
        with self._lock:
            if self.state in (State.REDUCING, State.WATCHED):
                self.finish(f"between backward and step, {_name(function)} in {_caller()}")
            for parameter in parameters:
                unit = self._place[id(parameter)]
                if self.state is State.DEFERRED:
                    self._land(unit)
                elif self.state is State.TRACING and self._recorder is not None:
                    for bucket in self.reducer.buckets[unit].parts:
                        self._recorder.needed(bucket)
                    self._disarm([unit])
            guard.disarm(parameters)

    def dropped(self, parameter: Pending) -> bool:
        """`parameter.grad = None`."""
        with self._lock:
            if self.state is not State.DEFERRED:
                return False
            if self._stream is None:
                self._dropped.add(id(parameter))
            else:  # all that reads it was enqueued by step()
                with torch._C.DisableTorchFunctionSubclass():
                    parameter.grad = None
            return True

    def backward_begins(self) -> None:
        """Some backward begins, in this process: it may write gradients that are on their way.

        This model's own does not come here so: its forward has brought in everything.
        """
        with self._lock:
            if self.state is State.DEFERRED:  # its graph may hold parameters as they were
                self.finish("a backward before the next forward")
            if self.state is State.IDLE or self._watched:
                return
            with torch._C.DisableTorchFunctionSubclass():
                self.reducer.own_hooks = 1
                self._watched = [
                    p.register_hook(self._before_accumulation)
                    for p in self.reducer.parameters
                    if p.requires_grad
                ]

    def _is_pending(self) -> bool:
        return self.state is not State.IDLE

    def _before_accumulation(self, gradient: torch.Tensor) -> None:
        del gradient
        if self.state is not State.IDLE:
            self.finish("backward while gradients or updates were on their way")

    # --- bookkeeping ---

    def _look_at_layout(self) -> None:
        """What is updated at once is a unit: a bucket, or those over which a tensor is spread.

        It has the number of its first bucket.
        """
        if self._layout is not self.reducer.buckets:
            self._layout = self.reducer.buckets
            self._members = {
                bucket.index: [self.reducer.parameters[slot.index] for slot in bucket.slots]
                for bucket in self.reducer.buckets
                if bucket.index == bucket.parts[0]
            }
            self._place = {id(p): u for u, members in self._members.items() for p in members}
        # The bucket with which each unit is complete.
        last = {self.reducer.buckets[b].parts[0]: b for b in self.reducer.sequence}
        self._last = {bucket: unit for unit, bucket in last.items()}

    def _arm(self, units: Iterable[int]) -> None:
        for unit in units:
            guard.arm(self._members[unit], self)

    def _disarm(self, units: Iterable[int]) -> None:
        for unit in units:
            guard.disarm(self._members[unit])


def refuse_model(reducer: Reducer, model: nn.Module) -> str:
    """Why uses of this model's parameters cannot be noticed; empty where they can."""
    if why := interpose.refusal():
        return why
    for name, parameter in zip(reducer.names, reducer.parameters, strict=True):
        if not guard.can_guard(parameter):
            return f"{name} is a {type(parameter).__name__}"
        if holders.is_foreign(parameter):
            return f"the memory of {name} is not torch's alone"
    if (found := compiled(model)) is not None:
        return f"{found or 'the model'} is compiled: it reads parameters out of Python's sight"
    return ""


def _name(function: Callable[..., Any]) -> str:
    owner = getattr(function, "__self__", None)
    name = getattr(function, "__name__", repr(function))
    if name in ("__get__", "__set__") and owner is not None:
        return f".{getattr(owner, '__name__', name)}"
    return str(name)


def _caller() -> str:
    """The innermost file and line outside of this package."""
    here = Path(__file__).parent
    frame = sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).parent == here:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
