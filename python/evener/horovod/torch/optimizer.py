"""`hvd.DistributedOptimizer`: an optimizer whose step averages the gradients over all ranks first.

The result is of a class made on the fly, which has the wrapped optimizer's class as its base, and
its name, so that learning-rate schedulers, GradScaler and isinstance see what they know. It shares
the wrapped optimizer's parameter groups and state.

Gradients are reduced by `evener.comm.reducer`, which starts while backward still runs; LIGHT_* and
HOROVOD_FUSION_THRESHOLD decide how. `synchronize` waits for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from numbers import Real
from typing import Any

import torch

from evener.base import settings
from evener.base.given import ArgumentError
from evener.base.log import info0, say_idle
from evener.comm import forms
from evener.comm.errors import CommError
from evener.comm.options import Options
from evener.comm.planner.live import Planner
from evener.comm.planner.moments import look_at_moments
from evener.comm.reducer import Reducer
from evener.comm.steps import Steps
from evener.comm.world import rendezvous
from evener.errors import UsageError
from evener.horovod import steps
from evener.horovod.common.exceptions import HorovodInternalError
from evener.horovod.state import STATE
from evener.horovod.torch import bucket_trace
from evener.horovod.torch.adasum_optimizer import _DistributedAdasumOptimizer, adasum_optimizer
from evener.horovod.torch.compression import (
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
    check_compression,
)
from evener.horovod.torch.functions import check_optimizer, contents
from evener.horovod.torch.mpi_ops import (
    Adasum,
    Average,
    Sum,
    allreduce_async_,
    global_process_set,
    size,
    sparse_allreduce_async,
)
from evener.horovod.torch.user_compression import UserCompression

Named = Iterable[tuple[str, torch.nn.Parameter]]

_REDUCERS: weakref.WeakSet[Reducer | UserCompression] = weakref.WeakSet()


def DistributedOptimizer(  # noqa: N802 - upstream's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Named | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: Any = global_process_set,
    *,
    mode: str | None = None,
    floor: str | None = None,
    ratio: float | None = None,
    warmup_steps: int | None = None,
) -> Any:
    """`optimizer`, with gradients reduced over all ranks before each step.

    Not collective: ranks may make theirs one after the other. They meet in the first step, in which
    nothing overlaps with backward.

    named_parameters: the model's; every parameter of the optimizer must be among them. compression:
    Compression.none or fp16 (between nodes; inside a node nothing is lost), or a class
    of your own, through which each gradient goes by itself (`user_compression`).
    backward_passes_per_step: gradients of this many backward passes are summed before they are
    reduced. op: Average, Sum, or Adasum (which combines the ranks' updates; `adasum_optimizer`).
    gradient_predivide_factor f: divided by f before the sum, by size/f after it. groups: a hint for
    fusion, which Evener does by size and order; checked, not needed. Sparse gradients are gathered,
    or with sparse_as_dense reduced as dense ones. process_set: gradients are reduced over its
    ranks; the others' optimizers step by themselves.

    Evener's own, by name only: mode and floor, as of `evener.ddp.accelerate`: a form between nodes,
    or "auto", a planner that measures the network and the first steps and takes the mildest form
    that hides, down to floor ("fp16"); it decides once, in the fourth step, which all ranks must
    come to. Here nothing overlaps with the next forward. ratio and warmup_steps are of top-k.
    LIGHT_* win over all of them.

    Raises ValueError for what upstream refuses; the first step raises HorovodInternalError where
    the ranks' parameters differ.
    """
    check_optimizer(optimizer, "hvd.DistributedOptimizer()")
    numbers: Any = (backward_passes_per_step, gradient_predivide_factor)
    for name, value in zip(
        ("backward_passes_per_step", "gradient_predivide_factor"), numbers, strict=True
    ):
        if not isinstance(value, Real):
            raise ArgumentError(
                f"hvd.DistributedOptimizer() was given {value!r} as {name}", "give a number"
            )
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"DistributedOptimizer(op={op}): gradients are averaged, summed or Adasum")
    _check_mode(mode, floor, compression, op)
    if mode is None and settings.HOROVOD_AUTOTUNE.get():
        if compression is NoneCompressor and op != Adasum:
            info0("HOROVOD_AUTOTUNE: the planner chooses, among what loses nothing")
            mode, floor = "auto", "exact"
        else:
            info0("HOROVOD_AUTOTUNE: no planner, because the script says what crosses")
    if op == Adasum and size() > 1:
        say_idle(
            "Adasum's updates are sent whole, in one level",
            settings.LIGHT_TOPK_ALLREDUCE,
            settings.LIGHT_2D_ALLREDUCE,
        )
        return adasum_optimizer(
            optimizer,
            _named(optimizer, named_parameters),
            compression,
            backward_passes_per_step,
            process_set,
        )
    check_compression(compression)
    named = _named(optimizer, named_parameters)
    _check_groups(num_groups if groups is None else groups)

    base = type(optimizer)
    made: Any = object.__new__(type(base.__name__, (base,), dict(vars(_DistributedOptimizer))))
    made.__dict__.update(contents(optimizer))
    made._prepare(
        named,
        compression,
        backward_passes_per_step,
        op,
        gradient_predivide_factor,
        sparse_as_dense,
        process_set,
        partial(
            _options,
            compression,
            op,
            gradient_predivide_factor,
            mode,
            floor,
            ratio,
            warmup_steps,
        ),
        plans=mode == "auto",
    )
    return made


class _DistributedOptimizer(torch.optim.Optimizer):
    """The members of the class that `DistributedOptimizer` makes.

    By upstream's name, because libraries make such classes themselves, from a wrapped class and
    this one's members, and look at what upstream's keeps (`_requires_update`, `_handles`).
    """

    _reducer: Reducer | UserCompression | None
    _make_reducer: Callable[[], Reducer | UserCompression]
    _reduces: bool
    _bucketed: bool  # by the reducer, and not one by one
    _plans: bool
    _steps: Steps | None  # what conducts a planner
    _sparse: dict[int, Callable[[], torch.Tensor]]
    _number: int
    _arrivals: Arrivals | None  # until the reducer is made
    _came: list[torch.Tensor]  # in which order gradients came in the first backward
    sparse_as_dense: bool
    op: int
    process_set: Any
    _generation: int
    _synchronized: bool
    _should_synchronize: bool
    _parameter_names: dict[torch.Tensor, str]
    _requires_update: set[torch.Tensor]
    _compression: type[Compressor]
    gradient_predivide_factor: float
    backward_passes_per_step: int

    def __init__(
        self,
        params: Any,
        named_parameters: Named | None,
        compression: type[Compressor],
        backward_passes_per_step: int = 1,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        groups: Any = None,
        sparse_as_dense: bool = False,
        process_set: Any = global_process_set,
    ) -> None:
        """As upstream's; of a class that was made from a wrapped one and these members."""
        self._evener_base.__init__(self, params)
        named = _named(self, named_parameters)
        _check_groups(groups)
        self._prepare(
            named,
            compression,
            backward_passes_per_step,
            op,
            gradient_predivide_factor,
            sparse_as_dense,
            process_set,
            partial(_options, compression, op, gradient_predivide_factor, None, None, None, None),
            plans=False,
        )

    @property
    def _evener_base(self) -> Any:
        """The wrapped optimizer's class."""
        return type(self).__bases__[0]

    def _prepare(
        self,
        named: list[tuple[str, torch.nn.Parameter]],
        compression: type[Compressor],
        passes: int,
        op: int,
        predivide: float,
        sparse_as_dense: bool,
        process_set: Any,
        options: Callable[[], Options],
        plans: bool,
    ) -> None:
        """All that is this class's own."""
        mine = {id(p) for group in self.param_groups for p in group["params"]}
        reduced = [(n, p) for n, p in named if id(p) in mine and p.requires_grad]
        self._parameter_names = {parameter: name for name, parameter in named}
        self._requires_update = {parameter for _, parameter in reduced}
        self._synchronized, self._should_synchronize = False, True
        self._reducer, self._generation = None, -1
        self._compression, self.backward_passes_per_step = compression, passes
        self.op, self.gradient_predivide_factor = op, predivide
        self.process_set, self.sparse_as_dense = process_set, sparse_as_dense
        self._bucketed = compression in (NoneCompressor, FP16Compressor)
        self._make_reducer = (
            partial(_reducer, reduced, options(), process_set)
            if self._bucketed
            else partial(_user_compression, reduced, compression, op, predivide, process_set)
        )
        self._sparse = {}
        self._reduces = bool(reduced)
        self._plans, self._steps = plans, None
        self._number = steps.enlist(self)
        _replace_reducers(parameter for _, parameter in reduced)
        self._arrivals, self._came = Arrivals(reduced, self), []

    @property
    def evener(self) -> Reducer | UserCompression | None:
        """What reduces the gradients, from the first step on."""
        return self._reducer

    @property
    def _handles(self) -> dict[torch.Tensor, tuple[Any, Any]]:
        """Parameters whose gradients came in this step; upstream's keeps their handles there."""
        waits = self._reducer or self._arrivals
        return dict.fromkeys(waits.with_gradients(), (None, None)) if waits is not None else {}

    @property
    def _allreduce_delay(self) -> dict[torch.Tensor, int]:
        """Backward passes that a parameter's gradient is summed over."""
        return dict.fromkeys(self._requires_update, self.backward_passes_per_step)

    def _arm(self) -> bool:
        """Make the reducer of this world, if that is not done: whether it was. Collective.

        Which is in the first step: before it, ranks make their optimizers at different moments, and
        a newcomer of an elastic job makes its while the others are elsewhere.
        """
        if self._generation == rendezvous.generation():
            return False
        if self._arrivals is not None:
            self._arrivals.detach()
            self._came, self._arrivals = self._arrivals.with_gradients(), None
        self._generation, self._reducer = rendezvous.generation(), None
        self._steps = None
        if not self._reduces or not self.process_set.included() or self.process_set.size() == 1:
            return False
        self._reducer = reducer = self._make_reducer()
        reducer.set_passes(self.backward_passes_per_step)
        reducer.densifies = self.sparse_as_dense
        if isinstance(reducer, Reducer):
            planner = _planner(reducer) if self._plans else None
            look_at_moments(reducer, self, planner)
            self._steps = None if planner is None else _steps(reducer, planner)
            if self._steps is None:
                bucket_trace.watch(reducer, STATE.engine.timeline)
        # Ranks collect garbage at different moments: the groups are used again once all ranks have
        # dropped the optimizer.
        dropped = weakref.finalize(self, reducer.drop)
        this, whole = weakref.ref(self), weakref.ref(reducer)

        def on_sparse(index: int) -> None:
            if (optimizer := this()) is not None:
                optimizer._submit_sparse(index)

        reducer.on_sparse = on_sparse

        def disarm() -> None:
            # From here on nothing may hold the reducer: its groups end with their world.
            if dropped.detach() is not None and (left := whole()) is not None:
                left.detach()
            if (optimizer := this()) is not None:
                optimizer._reducer = optimizer._steps = None

        STATE.at_shutdown(self, disarm)
        return True

    def _allreduce_grad_async(self, p: torch.Tensor) -> tuple[int | None, Any]:
        """Start to reduce one gradient by itself, in place: (handle, what `decompress` needs).

        Upstream's hooks call this; here nothing does, and libraries look for it.
        """
        assert p.grad is not None
        name = f"allreduce.{self._parameter_names.get(p, 'gradient')}"
        compressed, context = self._compression.compress(p.grad)
        factor = self.gradient_predivide_factor
        divide = self.op == Average and factor != 1.0
        handle = allreduce_async_(
            compressed,
            name=name,
            op=Sum if divide else self.op,
            prescale_factor=1.0 / factor if divide else 1.0,
            postscale_factor=factor / size() if divide else 1.0,
            process_set=self.process_set,
        )
        return handle, context

    def _submit_sparse(self, index: int) -> None:
        assert self._reducer is not None
        parameter, name = self._reducer.parameters[index], self._reducer.names[index]
        gradient = parameter.grad
        if gradient is None:  # not used here in this step, but perhaps elsewhere
            gradient = torch.zeros_like(parameter, layout=torch.sparse_coo)
            gradient = gradient.detach().to_dense().to_sparse(1)
        self._sparse[index] = sparse_allreduce_async(
            gradient, f"gradient.{name}", self.op, self.process_set
        )

    def _finish_sparse(self) -> None:
        reducer = self._reducer
        assert reducer is not None
        for index in sorted(reducer.sparse - set(self._sparse)):
            self._submit_sparse(index)
        for index, wait in self._sparse.items():
            reducer.parameters[index].grad = wait()
        self._sparse.clear()
        for index in reducer.densified:
            gradient = reducer.parameters[index].grad
            if gradient is not None and gradient.layout == torch.strided:
                reducer.parameters[index].grad = gradient.to_sparse(1)

    def synchronize(self) -> None:
        """Wait until the gradients are reduced: `p.grad` is then the average (or sum).

        A parameter without a gradient counts as zeros, and has one afterwards.
        """
        self._begins()
        armed = self._arm()
        if self._reducer is not None:
            try:
                if armed:
                    self._reducer.catch_up(self._came)
                if self._steps is None:
                    self._reducer.flush()
                    self._apply()
                else:
                    self._steps.backward_ended()
                self._finish_sparse()
            except CommError as error:
                raise HorovodInternalError(error.problem, error.fix) from error
        self._synchronized = True

    def _begins(self) -> None:
        """A step begins, in which ranks that have joined take part: see evener.horovod.steps."""
        every = self.process_set is global_process_set and size() > 1
        if every and self._reduces and self._bucketed:
            STATE.engine.steps.begins(self._number)

    def step_for_others(self) -> None:
        """Take part in the other ranks' step with gradients of zeros: this rank has joined.

        Parameters, gradients and the wrapped optimizer's state stay as they are.
        """
        parameters = [p for group in self.param_groups for p in group["params"]]
        kept = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters]
        device = next((p.device for p in parameters if p.is_cuda), None)
        with torch.no_grad(), contextlib.ExitStack() as stack:
            if device is not None:
                stack.enter_context(torch.cuda.device(device))
            for parameter in parameters:
                parameter.grad = None
            self._arm()
            reducer = self._reducer
            assert isinstance(reducer, Reducer)
            reducer.flush()
            if self._steps is None:
                self._apply()
            else:
                self._steps.backward_ended()
                self._steps.forward_began(compiled=False)
            for parameter, gradient, values in kept:
                parameter.grad = gradient
                if gradient is not None and values is not None:
                    gradient.copy_(values)

    def _apply(self) -> None:
        reducer = self._reducer
        assert reducer is not None
        if not isinstance(reducer, Reducer):
            reducer.apply()
            return
        # The first step's end lays the buckets out anew.
        recorder, exchanges = reducer.recorder, reducer.exchanges
        reducer.apply()
        timeline = STATE.engine.timeline
        if recorder is not None and timeline.active:
            bucket_trace.write(timeline, recorder, exchanges)
        bucket_trace.watch(reducer, timeline)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """`step()` inside does not synchronize: for code that called `synchronize()` itself."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Synchronize, then the wrapped optimizer's step."""
        synchronizes, self._synchronized = self._should_synchronize, self._synchronized
        if synchronizes and self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after "
                "optimizer.synchronize(): the gradients are reduced a second time. Put `with "
                "optimizer.skip_synchronize():` around step()",
                stacklevel=2,
            )
        inner = closure
        if synchronizes and closure is None:
            self.synchronize()
        elif synchronizes and closure is not None:
            given = closure

            def inner() -> Any:
                # The closure's own backward makes the gradients that the step uses.
                loss = given()
                self.synchronize()
                return loss

        self._synchronized = False
        arguments = kwargs if inner is None else {"closure": inner, **kwargs}
        done = self._evener_base.step(self, **arguments)
        if self._steps is not None:
            try:
                # Nothing of forward is seen here: the next one begins where this step ends.
                self._steps.forward_began(compiled=False)
            except CommError as error:
                raise HorovodInternalError(error.problem, error.fix) from error
        return done

    # torch wraps `step` of each optimizer class with its hooks; the base's is wrapped already.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped optimizer's; refused while gradients are being reduced."""
        waits = self._reducer or self._arrivals
        if waits is not None and waits.pending:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(): the gradients are being reduced"
            )
        self._evener_base.zero_grad(self, *args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next step on, reduce after this many backward passes."""
        self.backward_passes_per_step = passes
        if self._reducer is not None:
            self._reducer.set_passes(passes)


class Arrivals:
    """Notes gradients before there is a reducer: backward has begun, and how often each came."""

    def __init__(self, named: list[tuple[str, torch.nn.Parameter]], optimizer: Any) -> None:
        self._named = dict(named)
        self._came: dict[str, int] = {}
        self._optimizer = weakref.ref(optimizer)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._arrived, name))
            for name, parameter in named
        ]

    @property
    def pending(self) -> bool:
        return bool(self.with_gradients())

    def with_gradients(self) -> list[torch.Tensor]:
        """The parameters whose gradients came, the first one first."""
        return [self._named[name] for name in self._came]

    def _arrived(self, name: str, _parameter: torch.Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        self._came[name] = self._came.get(name, 0) + 1
        if self._came[name] > optimizer.backward_passes_per_step:
            raise AssertionError(
                f"the gradient of {name} came more than {optimizer.backward_passes_per_step} times "
                "in a step: call optimizer.step() in between, or set backward_passes_per_step"
            )

    def detach(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _check_mode(
    mode: str | None, floor: str | None, compression: type[Compressor], op: int
) -> None:
    if floor is not None and mode != "auto":
        raise ValueError(f"floor={floor!r} says how far mode='auto' may go, and mode is {mode!r}")
    try:
        if floor is not None:
            forms.require(floor, "floor")
        if mode is None:
            return
        forms.require(mode, "mode", besides=("auto",))
    except UsageError as error:
        raise ValueError(f"{error.problem}: {error.fix}") from error
    if compression is not NoneCompressor or op == Adasum:
        name = getattr(compression, "__name__", compression)
        other = "op=Adasum" if op == Adasum else f"compression={name}"
        raise ValueError(f"mode={mode!r} and {other} both say what crosses: give one of them")


def _user_compression(
    named: list[tuple[str, torch.nn.Parameter]],
    compression: type[Compressor],
    op: int,
    predivide: float,
    process_set: Any,
) -> UserCompression:
    info0(
        "DistributedOptimizer(compression=%s): a class of the script's own, so gradients are "
        "reduced one by one, and LIGHT_* does not apply",
        getattr(compression, "__name__", compression),
    )
    _replace_reducers(parameter for _, parameter in named)
    own = UserCompression(named, compression, op, predivide, process_set)
    _REDUCERS.add(own)
    return own


def _options(
    compression: type[Compressor],
    op: int,
    predivide: float,
    mode: str | None,
    floor: str | None,
    ratio: float | None,
    warmup_steps: int | None,
) -> Options:
    half = compression is FP16Compressor
    topk = settings.LIGHT_TOPK_ALLREDUCE.get()
    auto = mode == "auto"
    options = Options.resolve(
        wire="fp16" if half and not topk else None if auto else mode,
        floor=(floor or "fp16") if auto else "exact",
        ratio=ratio,
        warmup_steps=warmup_steps,
        bucket_bytes=settings.HOROVOD_FUSION_THRESHOLD.get(),
        average=op == Average,
        predivide=predivide,
        default_algorithm="flat",  # Horovod's; LIGHT_2D_ALLREDUCE=1 asks for the other
    )
    options.say_idle({"ratio": ratio, "warmup_steps": warmup_steps})
    if half and topk:
        info0("LIGHT_TOPK_ALLREDUCE with Compression.fp16: top-k sends its values as FP16")
        options = dataclasses.replace(options, topk_fp16=True)
    return options


def _reducer(
    named: list[tuple[str, torch.nn.Parameter]], options: Options, process_set: Any
) -> Reducer:
    _replace_reducers(parameter for _, parameter in named)
    try:
        group = STATE.engine.set_of(process_set.process_set_id).cpu
        reducer = Reducer([(n, p) for n, p in named if p.requires_grad], options, group)
    except CommError as error:
        raise HorovodInternalError(error.problem, error.fix) from error
    _REDUCERS.add(reducer)
    return reducer


def _planner(reducer: Reducer) -> Planner | None:
    """A planner, where nothing else says what crosses."""
    if reducer.options.wire != "exact":
        info0("mode=auto: no planner, because %s was asked for", reducer.options.wire)
        return None
    # Decided once, and nothing is tried: a rank that has joined makes no steps, and would be waited
    # for.
    return Planner(reducer, overlap=False, watch_every=sys.maxsize, trial_steps=0)


def _steps(reducer: Reducer, planner: Planner) -> Steps:
    """What conducts it."""
    steps = Steps(reducer, None, planner)

    def forward_ended() -> None:
        with torch.enable_grad():  # autograd's thread has it off, as evaluation has
            steps.forward_ended()

    reducer.on_first = forward_ended
    if STATE.engine.timeline.active:
        info0("mode=auto: the gradients' buckets are not written to the timeline")
    return steps


def _replace_reducers(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Detach what an earlier DistributedOptimizer left on these parameters.

    It may live on in a reference cycle (a scheduler makes one), and would reduce a second time.
    """
    mine = {id(parameter) for parameter in parameters}
    for earlier in list(_REDUCERS):
        if any(id(parameter) in mine for parameter in earlier.parameters):
            earlier.detach()
            _REDUCERS.discard(earlier)


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Named | None
) -> list[tuple[str, torch.nn.Parameter]]:
    """Names for all parameters of `optimizer`, checked as upstream does."""
    if named_parameters is None:
        return [
            (f"allreduce.noname.{i}.{j}", parameter)
            for i, group in enumerate(optimizer.param_groups)
            for j, parameter in enumerate(group["params"])
        ]
    named = list(named_parameters) if isinstance(named_parameters, Iterable) else [named_parameters]
    if any(not isinstance(entry, tuple) for entry in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually "
            "produced by model.named_parameters()."
        )
    names = [name for name, _ in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"Parameter names in named_parameters must be unique: {', '.join(twice)}")
    known = {id(parameter) for _, parameter in named}
    for i, group in enumerate(optimizer.param_groups):
        for j, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ValueError(
                    f"named_parameters was specified, but parameter {j} of group {i}, of shape "
                    f"{list(parameter.shape)}, was not named."
                )
    return named


def _check_groups(groups: Any) -> None:
    if groups in (None, 0):
        return
    if not isinstance(groups, (list, tuple)):
        if not isinstance(groups, int) or groups < 0:
            raise ValueError(
                "groups should be a non-negative integer or a list of list of torch.Tensor."
            )
    else:
        seen: set[int] = set()
        for tensor in (tensor for group in groups for tensor in group):
            if not isinstance(tensor, torch.Tensor):
                raise ValueError("groups must consist of torch.Tensor.")
            if id(tensor) in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(id(tensor))
    info0("DistributedOptimizer(groups=...): buckets follow HOROVOD_FUSION_THRESHOLD instead")


__all__ = ["DistributedOptimizer", "_DistributedAdasumOptimizer", "_DistributedOptimizer"]
