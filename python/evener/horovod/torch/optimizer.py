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
from typing import Any

import torch

from evener import settings
from evener.comm import elastic, forms, rendezvous
from evener.comm.errors import CommError
from evener.comm.options import Options
from evener.comm.planner.live import Planner
from evener.comm.planner.moments import look_at_moments
from evener.comm.reducer import Reducer
from evener.comm.steps import Steps
from evener.errors import UsageError
from evener.horovod.common.exceptions import HorovodInternalError
from evener.horovod.state import STATE
from evener.horovod.torch import bucket_trace
from evener.horovod.torch.adasum_optimizer import adasum_optimizer
from evener.horovod.torch.compression import (
    Compression,
    Compressor,
    FP16Compressor,
    NoneCompressor,
)
from evener.horovod.torch.mpi_ops import (
    Adasum,
    Average,
    Sum,
    global_process_set,
    size,
    sparse_allreduce_async,
)
from evener.horovod.torch.own_compression import OwnCompression
from evener.log import info0

Named = Iterable[tuple[str, torch.nn.Parameter]]

_REDUCERS: weakref.WeakSet[Reducer | OwnCompression] = weakref.WeakSet()


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
    """`optimizer`, with gradients reduced over all ranks before each step. Collective.

    named_parameters: the model's; every parameter of the optimizer must be among them. compression:
    Compression.none or fp16 (on the wire between nodes; inside a node nothing is lost), or a class
    of your own, through which each gradient goes by itself (`own_compression`).
    backward_passes_per_step: gradients of so many backward passes are summed before they are
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

    Raises ValueError for what upstream refuses, HorovodInternalError where the ranks' parameters
    differ.
    """
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
        return adasum_optimizer(
            optimizer,
            _named(optimizer, named_parameters),
            compression,
            backward_passes_per_step,
            process_set,
        )
    if not all(callable(getattr(compression, m, None)) for m in ("compress", "decompress")):
        raise ValueError(
            f"compression={compression!r} has no compress and decompress: give a class as "
            "hvd.Compression.fp16"
        )
    named = _named(optimizer, named_parameters)
    _check_groups(num_groups if groups is None else groups)

    base = type(optimizer)
    members = {k: v for k, v in vars(_Distributed).items() if k not in ("__dict__", "__weakref__")}
    members["_evener_base"] = base
    made: Any = object.__new__(type(base.__name__, (base,), members))
    # A scheduler that knows the wrapped optimizer has replaced its `step`, which must not be ours.
    made.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    made._parameter_names = {parameter: name for name, parameter in named}
    made._synchronized, made._should_synchronize = False, True
    made._reducer = None
    made.backward_passes_per_step = backward_passes_per_step
    made.op, made.gradient_predivide_factor = op, gradient_predivide_factor
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    reduced = [(n, p) for n, p in named if id(p) in mine and p.requires_grad]
    made.process_set, made.sparse_as_dense = process_set, sparse_as_dense
    made._make_reducer = (
        partial(
            _reducer,
            reduced,
            _options(compression, op, gradient_predivide_factor, mode, floor, ratio, warmup_steps),
            process_set,
        )
        if compression in (NoneCompressor, FP16Compressor)
        else partial(
            _own_compression, reduced, compression, op, gradient_predivide_factor, process_set
        )
    )
    made._sparse = {}
    made._plans, made._steps = mode == "auto", None
    made._reduces, made._generation = bool(reduced), -1
    if not elastic.active():
        made._arm()
    return made


class _Distributed:
    """The members of the class that `DistributedOptimizer` makes. `self` is an Optimizer too."""

    _evener_base: Any  # the wrapped optimizer's class
    _reducer: Reducer | OwnCompression | None
    _make_reducer: Callable[[], Reducer | OwnCompression]
    _reduces: bool
    _plans: bool
    _steps: Steps | None  # what conducts a planner
    _sparse: dict[int, Callable[[], torch.Tensor]]
    sparse_as_dense: bool
    op: int
    process_set: Any
    _generation: int
    _synchronized: bool
    _should_synchronize: bool
    backward_passes_per_step: int
    param_groups: list[dict[str, Any]]

    def _arm(self) -> bool:
        """Make the reducer of this world, if that is not done: whether it was. Collective.

        In an elastic job that is in the first step after each change: a newcomer makes its
        optimizer while the others are elsewhere. In that step nothing overlaps with backward.
        """
        if self._generation == rendezvous.generation():
            return False
        self._generation, self._reducer = rendezvous.generation(), None
        self._steps = None
        if not self._reduces or not self.process_set.included() or self.process_set.size() == 1:
            return False
        self._reducer = reducer = self._make_reducer()
        reducer.set_passes(self.backward_passes_per_step)
        reducer.densifies = self.sparse_as_dense
        if isinstance(reducer, Reducer):
            planner = _planner(reducer) if self._plans else None
            look_at_moments(reducer, self, planner)  # type: ignore[arg-type]
            self._steps = None if planner is None else _steps(reducer, planner)
            if self._steps is None:
                bucket_trace.watch(reducer, STATE.engine.timeline)
        # Ranks collect garbage at different moments, so neither may give groups back: the next
        # reducer could get another one on another rank. They go with the default group.
        detach = weakref.finalize(self, reducer.detach)
        this = weakref.ref(self)

        def on_sparse(index: int) -> None:
            if (optimizer := this()) is not None:
                optimizer._submit_sparse(index)

        reducer.on_sparse = on_sparse

        def disarm() -> None:
            detach()  # and no longer holds the reducer, or its groups would outlive the default one
            if (optimizer := this()) is not None:
                optimizer._reducer = optimizer._steps = None

        STATE.at_shutdown(self, disarm)
        return True

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
        armed = self._arm()
        if self._reducer is not None:
            try:
                if armed:
                    self._reducer.catch_up()
                if self._steps is None:
                    self._reducer.flush()
                    self._apply()
                else:
                    self._steps.backward_ended()
                self._finish_sparse()
            except CommError as error:
                raise HorovodInternalError(error.problem, error.fix) from error
        self._synchronized = True

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
                # Of forward nothing is seen here: the next one begins where this step ends.
                self._steps.forward_began(compiled=False)
            except CommError as error:
                raise HorovodInternalError(error.problem, error.fix) from error
        return done

    # torch wraps `step` of each optimizer class with its hooks; the base's is wrapped already.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped optimizer's; refused while gradients are being reduced."""
        if self._reducer is not None and self._reducer.pending:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before "
                "optimizer.step() or optimizer.synchronize(): the gradients are being reduced"
            )
        self._evener_base.zero_grad(self, *args, **kwargs)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next step on, reduce after so many backward passes."""
        self.backward_passes_per_step = passes
        if self._reducer is not None:
            self._reducer.set_passes(passes)


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


def _own_compression(
    named: list[tuple[str, torch.nn.Parameter]],
    compression: type[Compressor],
    op: int,
    predivide: float,
    process_set: Any,
) -> OwnCompression:
    info0(
        "DistributedOptimizer(compression=%s): a class of the script's own, so gradients are "
        "reduced one by one, and LIGHT_* does not apply",
        getattr(compression, "__name__", compression),
    )
    _replace_reducers(parameter for _, parameter in named)
    own = OwnCompression(named, compression, op, predivide, process_set)
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
        reducer = Reducer(named, options, None if process_set is global_process_set else group)
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
    named = list(named_parameters)
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
