"""A DistributedDataParallel whose gradients go through `evener.comm`.

What is around the reduction stays DDP's own (`no_sync`, buffer broadcasts, moving inputs), and so
does what others look for on a DDP: `reducer` and `logger` are stand-ins with the calls that
frameworks make (Lightning's manual optimization, Accelerate's `trigger_sync_in_backward`, MMCV's
`train_step`). A subclass of DDP keeps its own methods: then the class is made on the spot, with
this one between the subclass and DDP. Copies, by `deepcopy` or `pickle`, are plain DDPs.

When gradients are expected follows DDP: a forward that is to be synchronised says so, and the end
of the backward that follows takes it back. Any other backward is the program's own, on its rank
alone: through `model.module`, for a saliency map or a penalty, it adds to `p.grad` and no more.
"""

from __future__ import annotations

import copy
import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.distributed.algorithms.join import Join, JoinHook
from torch.distributed.utils import _to_kwargs
from torch.nn.parallel.distributed import DistributedDataParallel, _find_tensors

from evener.base.given import given
from evener.comm import lookups
from evener.comm.reducer import Reducer
from evener.comm.steps import Steps
from evener.ddp.torch_reducer import TorchReducer, make_reducer
from evener.errors import UsageError

logger = logging.getLogger("evener.ddp")

# Those that are accelerated now.
_LIVE: weakref.WeakSet[AcceleratedDataParallel] = weakref.WeakSet()
# By model what its checkpoint held, where it is not accelerated yet; see `integrations.keep`.
_KEPT: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, Any]] = weakref.WeakKeyDictionary()
# What an accelerated model has besides DDP's own.
_OWN = (
    "evener",
    "evener_steps",
    "_evener_modules",
    "_evener_own",
    "_evener_plain",
    "_evener_release",
    "_evener_ended",
    "_evener_expects",
    "_evener_share",
    "_evener_logged",
)


class AcceleratedDataParallel(DistributedDataParallel):
    """See the module. Made by `evener.ddp.accelerate` from a DDP, never by its constructor."""

    evener: Reducer
    evener_steps: Steps
    _evener_modules: tuple[torch.nn.Module, ...]  # walking the tree takes longer, in every step
    _evener_own: TorchReducer  # DDP's, for as long as a planner finds it the fastest
    _evener_plain: type[DistributedDataParallel]  # what it was
    _evener_release: Any  # detaches the reducer; it does so too when the model is dropped
    _evener_ended: bool  # another wrapper of its parameters was accelerated
    _evener_expects: bool  # a forward was to be synchronised, and its backward is to come
    _evener_share: float  # of an average over all ranks, for one over those with inputs
    _evener_logged: dict[str, Any]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """As DDP: broadcast buffers, move inputs, call the module; then expect gradients."""
        if self._evener_ended:
            return self._forward_as_before(*inputs, **kwargs)
        if self._evener_own.takes():
            self.evener_steps.own_forward_began()
            output = DistributedDataParallel.forward(self, *inputs, **kwargs)
            if torch.is_grad_enabled() and self.require_backward_grad_sync:
                self._evener_own.expects = True
            return output
        self._forward_began()
        if self._check_sync_bufs_pre_fwd():
            self._sync_buffers()
        if self._join_config.enable:
            self._check_global_requires_backward_grad_sync(is_joined_rank=False)
        self.evener_steps.forward_began(compiled=torch.compiler.is_compiling() or self._compiled())
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            moved = _to_kwargs(inputs, kwargs, device, self.use_side_stream_for_tensor_copies)
            inputs, kwargs = moved[0][0], moved[1][0]
        try:
            output = self._run_ddp_forward(*inputs, **kwargs)
        except BaseException:
            self._forward_failed()
            raise
        if self._check_sync_bufs_post_fwd():
            self._sync_buffers()
        self.evener_steps.forward_ended()
        self._forward_ended(output)
        return output

    @_disable_dynamo
    def _forward_began(self) -> None:
        # First of all: a rank that has joined waits for this before it takes part in anything.
        work = Join.notify_join_context(self)
        self._evener_share = 1.0
        if work is not None and not self._divide_by_initial_world_size:
            with_input = float(work.get_future().wait()[0].item())
            self._evener_share = self.evener.communicators.size / with_input
        if torch.is_grad_enabled() and not self._evener_expects:
            self.evener.arrivals.active = self.require_backward_grad_sync

    @_disable_dynamo
    def _forward_ended(self, output: Any) -> None:
        # Asked again: Lightning changes it while the forward runs.
        syncs = torch.is_grad_enabled() and self.require_backward_grad_sync
        self.require_forward_param_sync = syncs
        if syncs:
            self.expect_gradients()
        elif torch.is_grad_enabled() and not self._evener_expects:
            self.evener.arrivals.active = False
        if torch.is_grad_enabled():
            # Know the whole backward from one of a checkpointed part of the model.
            begins = _Begins(self.evener)
            for tensor in _find_tensors(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(begins)

    @_disable_dynamo
    def _forward_failed(self) -> None:
        self.evener_steps.forward_ended()
        self.evener.arrivals.active = self._evener_expects

    def expect_gradients(self) -> None:
        """The next backward is reduced."""
        self._evener_expects = self.evener.arrivals.active = True

    def backward_ended(self) -> None:
        """A backward that brought gradients has ended."""
        self._evener_expects = False
        alone = self.evener_steps.backward_ended(at_once=self._evener_share != 1.0)
        if self._evener_share != 1.0:
            for index, parameter in enumerate(self.evener.parameters):
                if parameter.grad is not None and index not in alone:
                    parameter.grad.mul_(self._evener_share)
        # A backward that goes round the model's forward is the program's own, on this rank alone.
        self.evener.arrivals.active = False

    @_disable_dynamo
    def _forward_as_before(self, *inputs: Any, **kwargs: Any) -> Any:
        logger.warning(
            "a DistributedDataParallel was used after another one of its parameters had been "
            "accelerated: it reduces as plain DDP again"
        )
        restore(self)
        return self.forward(*inputs, **kwargs)

    def _leaves(self) -> None:
        """It is to be plain again, on all ranks: whatever is not yet equal on them."""

    def _compiled(self) -> bool:
        """Whether a part of the model was compiled in place since `accelerate`."""
        overlap = self.evener_steps.overlap
        if overlap is None or overlap.off:
            return False
        return any(map(lookups.compiled_in_place, self._evener_modules))

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """As DDP's: what a rank does that has no more inputs, while others have."""
        self._evener_own.never("join() is in use")
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return _Joined(self)

    def register_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        """Evener's reducer takes the place of communication hooks.

        A program that did not ask for Evener (`evener.door`) gets its plain DDP back instead.
        """
        if self.__dict__.get("_evener_door"):
            logger.info("a communication hook is registered: it is plain DDP's from here on")
            restore(self).register_comm_hook(*args, **kwargs)
            return
        raise UsageError(
            "a communication hook has no effect after evener.ddp.accelerate()",
            "choose with accelerate(mode=...), or leave accelerate out",
        )

    def _register_builtin_comm_hook(self, *args: Any, **kwargs: Any) -> None:
        if self.__dict__.get("_evener_door"):
            restore(self)._register_builtin_comm_hook(*args, **kwargs)
            return
        self.register_comm_hook()

    def _update_process_group(self, new_process_group: Any) -> None:
        """Evener's groups are made of the old one."""
        raise UsageError(
            "the process group of an accelerated DistributedDataParallel cannot be replaced",
            "evener.ddp.restore(model) first, and accelerate it again afterwards",
        )

    def _set_static_graph(self) -> None:
        """As DDP's: every step uses the same parameters, as often as the first."""
        self._evener_own.never("the graph is static")
        self.static_graph = True
        self.evener.track_unused = True
        self.evener.arrivals.expect_repeats()

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What DDP had to say of itself when it was accelerated."""
        return dict(self._evener_logged)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """DDP's own measurements are not made."""
        logger.info("DDP's own measurements are not made, at no sample rate: Evener reduces")

    def train(self, mode: bool = True) -> AcceleratedDataParallel:
        """As torch's; evaluation begins with all parameters up to date."""
        if not mode:
            self.evener_steps.finish("evaluation")
        super().train(mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's; gradients that a deferred step still needs go when it has used them."""
        if self.evener_steps.overlap is None:
            super().zero_grad(set_to_none)
        else:
            self.evener_steps.overlap.zero_grad(set_to_none, self.parameters())

    def __getstate__(self) -> dict[str, Any]:
        self.evener_steps.finish("a copy of the model")
        # DDP's own state has neither group, reducer nor logger.
        state: dict[str, Any] = DistributedDataParallel.__getstate__(self)
        return {name: value for name, value in state.items() if name not in _OWN}

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _blank, (self._evener_plain,), self.__getstate__()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = _blank(self._evener_plain)
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return made


def _blank(kind: type[DistributedDataParallel]) -> DistributedDataParallel:
    """For pickle, which gives it its state."""
    return kind.__new__(kind)


class _Joined(JoinHook):
    """This rank's inputs are used up: it brings nothing to the steps of the others."""

    def __init__(self, model: AcceleratedDataParallel) -> None:
        super().__init__()
        self._model = model

    def main_hook(self) -> None:
        """One forward and backward of the others, in the order in which they communicate."""
        model = self._model
        model._check_and_sync_module_buffers()
        syncs = model._check_global_requires_backward_grad_sync(is_joined_rank=True)
        model.require_forward_param_sync = syncs
        if syncs:
            model.evener_steps.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have joined: who came last has taken every step."""
        self._model.evener_steps.finish("join()")
        self._model._sync_final_model(is_last_joiner)


class _Begins:
    """A hook of the model's outputs: a backward has come to them. It dies with the reducer."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = weakref.ref(reducer)

    def __call__(self, gradient: Any) -> None:
        reducer = self._reducer()
        if reducer is not None:
            reducer.arrivals.backward_begins()


class _StandIn:
    """In the place of DDP's `reducer` and `logger`: what others call on them."""

    def __init__(self, model: AcceleratedDataParallel) -> None:
        self._model = weakref.ref(model)

    def prepare_for_backward(self, outputs: Any) -> None:
        """Frameworks that decide themselves which backward is reduced say so here."""
        if (model := self._model()) is not None:
            model.expect_gradients()

    def prepare_for_forward(self) -> None:
        """Nothing is to be done."""

    def _rebuild_buckets(self) -> bool:
        return False

    def _set_static_graph(self) -> None:
        """The model has been told."""

    def _check_reducer_finalized(self) -> None:
        """Steps end by themselves."""

    def _get_zeros_like_grad_buckets(self) -> list[Any]:
        """There are none of DDP's."""
        return []

    def set_runtime_stats_and_log(self) -> None:
        """DDP's own measurements are not made."""

    def _set_comm_hook_name(self, name: str) -> None:
        """There is no hook."""


def wrap(model: DistributedDataParallel, reducer: Reducer, steps: Steps) -> AcceleratedDataParallel:
    """Have `model` reduced by `reducer`, conducted by `steps`. Its class becomes another one."""
    own = TorchReducer(model)  # type: ignore[arg-type]
    if steps.planner is not None:
        steps.planner.library = own
    accelerated = become(
        model,
        AcceleratedDataParallel,
        functools.partial(_release, reducer, steps, own),
        evener=reducer,
        evener_steps=steps,
        _evener_modules=tuple(model.module.modules()),
        _evener_own=own,
        _evener_expects=False,
        _evener_share=1.0,
    )
    this = weakref.ref(accelerated)

    def ended() -> None:
        if (model := this()) is not None:
            model.backward_ended()

    reducer.arrivals.on_backward_end = ended
    take_kept(accelerated)
    reducer.arrivals.active = False
    return accelerated


def become(
    model: DistributedDataParallel,
    kind: type[AcceleratedDataParallel],
    release: Callable[[], None],
    **own: Any,
) -> AcceleratedDataParallel:
    """Make `model` of class `kind`, with attributes `own`; `release` ends what works for it.

    DDP's reducer is not asked any more: its hooks and its buckets, as large as the gradients, go.
    """
    logged = model._get_ddp_logging_data()
    plain = type(model)
    made: Any = kind
    if plain is not DistributedDataParallel:
        made = type(f"Accelerated{plain.__name__}", (plain, kind), {})
    model.__class__ = made
    accelerated: AcceleratedDataParallel = model  # type: ignore[assignment]
    finalizer = weakref.finalize(accelerated, release)
    finalizer.atexit = False
    stand_in = _StandIn(accelerated)
    accelerated.__dict__.update(
        reducer=stand_in,
        logger=stand_in,
        _evener_plain=plain,
        _evener_release=finalizer,
        _evener_ended=False,
        _evener_logged=logged,
        **own,
    )
    _LIVE.add(accelerated)
    return accelerated


def take_kept(model: AcceleratedDataParallel) -> None:
    """Go on with what a checkpoint held for this model before it was accelerated."""
    if (kept := _KEPT.pop(model.module, None)) is not None:
        try:
            model.evener.load_state_dict(kept)
        except UsageError as error:  # a checkpoint of another model
            logger.warning("what was not sent yet is not taken over: %s", error.problem)


def _release(reducer: Reducer, steps: Steps, own: TorchReducer) -> None:
    """The model is gone, or reduced by another reducer."""
    try:
        own.drop()
        if steps.overlap is not None:
            steps.overlap.detach()
    finally:
        reducer.drop()


def taken(model: DistributedDataParallel) -> list[tuple[str, torch.nn.Parameter]]:
    """Name and parameter of each that DDP took at the wrap: those that required gradients then.

    Which of them do so now is another matter: what is unfrozen later is reduced by DDP, too.
    """
    ignored = set(getattr(model, "parameters_to_ignore", ()))
    # The names are those that the parts would have if nothing was compiled, on this rank or others.
    named = [
        (n.replace("_orig_mod.", ""), p)
        for n, p in model.module.named_parameters()
        if n not in ignored
    ]
    if model._get_ddp_logging_data().get("num_parameter_tensors") == len(named):
        return named
    buckets = model.reducer._get_zeros_like_grad_buckets()  # the only place that names them
    mine = {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
    return [(name, parameter) for name, parameter in named if id(parameter) in mine]


def replace_older(parameters: list[torch.nn.Parameter]) -> None:
    """End what an earlier `accelerate` left on these: two reducers would both reduce.

    The model of the earlier one may live on, unused, where the user keeps it.
    """
    mine = {id(parameter) for parameter in parameters}
    for older in list(_LIVE):
        if any(id(parameter) in mine for parameter in older.evener.parameters):
            _LIVE.discard(older)
            older._evener_release()
            older._evener_ended = True


@given
def restore(model: DistributedDataParallel) -> DistributedDataParallel:
    """Make an accelerated model the DistributedDataParallel again that it was; returns it.

    Call it on every rank, between steps. Raises UsageError for a model that is not accelerated.
    """
    if not isinstance(model, AcceleratedDataParallel):
        raise UsageError(
            f"restore() was given a {type(model).__name__}", "give what accelerate() returned"
        )
    if not model._evener_ended:
        model._leaves()
    model._evener_release()
    _LIVE.discard(model)
    parameters = model.evener.parameters
    model.__class__ = model._evener_plain  # type: ignore[assignment]
    for name in _OWN:
        model.__dict__.pop(name, None)
    make_reducer(model, parameters)
    if model.static_graph:
        model._set_static_graph()
    return model
