"""DDP's own reducer, given back to a model for as long as nothing else is faster.

The planner tries DDP's own way and torch's BF16 communication hook beside its own choice
(`evener.comm.planner.ways`). To be as fast as these they are these: torch's C++ reducer with its
C++ hooks, its buckets and, for BF16, torch's own hook function. While it works,
Evener's hooks and buffers are gone (`Reducer.rest`), so that the model needs the memory and the
time of plain DDP; the planner goes on watching the step.

The C++ reducer is made anew each time, as in `evener.ddp.restore`: its first step has one bucket,
and the second begins with the real ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch._C._distributed_c10d import _register_comm_hook
from torch.autograd import Variable
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import DistributedDataParallel

from evener.comm.frozen import thawed
from evener.comm.reducer import Reducer
from evener.comm.steps import Steps

_HOOKS = {"bf16": default_hooks.bf16_compress_hook}


def make_reducer(model: DistributedDataParallel, parameters: Sequence[torch.Tensor]) -> None:
    """Make DDP's C++ reducer anew, as DDP does where it is unpickled, of `parameters`.

    They are those that it took at the wrap, whichever of them are frozen now.
    """
    with thawed(parameters, model.module.parameters()):
        taken, sparse = model._build_params_for_reducer()
        names = model._build_debug_param_to_name_mapping(taken)
        model._ddp_init_helper(taken, sparse, names, model.static_graph)


class Model(Protocol):
    """What is used of `evener.ddp.model.AcceleratedDataParallel`."""

    evener: Reducer
    evener_steps: Steps
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    process_group: Any
    reducer: Any
    logger: Any
    _has_rebuilt_buckets: bool


class TorchReducer:
    """A model's own reducer: `evener.comm.planner.live.Library`. `on`: its form, or empty."""

    def __init__(self, model: Model) -> None:
        self._model = weakref.ref(model)
        self._stand_in: Any = None
        self._logger: Any = None  # the C++ reducer knows it, and does not keep it
        self._never = ""
        self.on = ""
        # From the parameter whose gradients say that a step is there: all come in each of them.
        self._node: Any = None
        self._hook: Any = None
        self.expects = False  # a forward was synchronised, and its backward is to come

    def takes(self) -> bool:
        """Whether it takes the gradients now."""
        return bool(self.on)

    def refusal(self) -> str:
        """Why DDP's own reducer would not do what Evener does with this model; or nothing."""
        model = self._model()
        if model is None or self._never:
            return self._never or "the model is gone"
        if model.find_unused_parameters or model.static_graph:
            return "parameters may be unused, or come several times"
        if model.gradient_as_bucket_view:
            return "gradients are views of DDP's buckets, which it lays out anew in a forward"
        if not model.evener.unused.needs_all:
            return "a parameter was not used"
        if model.evener.arrivals.repeats:
            return "a gradient comes several times in a backward"
        return ""

    def enter(self, form: str) -> None:
        """From the step that begins now on gradients are DDP's, in `form`. All ranks alike."""
        model = self._model()
        if self.on == form or model is None or self.refusal():
            return
        if self.on:
            self.leave()
        model.evener.rest()
        self._stand_in = model.__dict__["reducer"]
        make_reducer(cast(DistributedDataParallel, model), model.evener.parameters)
        # DDP's logger makes the host wait for the device in each of a reducer's first ten steps.
        self._logger, model.__dict__["logger"] = model.logger, self._stand_in
        if form != "exact":
            _register_comm_hook(model.reducer, model.process_group, _HOOKS[form])
        with thawed(model.evener.parameters[:1]):
            self._node = torch.autograd.graph.get_gradient_edge(model.evener.parameters[0]).node
        this = weakref.ref(self)
        self._hook = self._node.register_hook(
            lambda *_: None if (own := this()) is None else own._came()
        )
        self.expects = False
        self.on = form

    def _came(self) -> None:
        """A backward has brought a gradient: where it is reduced, go on when it has ended."""
        if self.expects:
            self.expects = False
            # Behind what DDP has queued for that moment, and will have queued by it.
            queue = Variable._execution_engine.queue_callback
            queue(lambda: queue(self._reduced))

    def _reduced(self) -> None:
        model = self._model()
        if model is None or not self.on:
            return
        # All ranks are here. DDP would do it in the next forward, which may be one rank's own.
        if model.reducer._rebuild_buckets():
            model._has_rebuilt_buckets = True
        model.evener_steps.own_backward_ended()

    def leave(self) -> None:
        """Evener takes them again, from the step that begins now on."""
        model = self._model()
        if self.on and model is not None:
            self.drop()
            model.evener.wake()

    def drop(self) -> None:
        """The C++ reducer goes; who reduces is the caller's matter."""
        model = self._model()
        if self.on and model is not None:
            model.__dict__["reducer"] = model.__dict__["logger"] = self._stand_in
            self._hook.remove()
        self._node = self._hook = None
        self.on, self._stand_in, self._logger = "", None, None

    def never(self, why: str) -> None:
        """What begins now is nothing for it, for good: `why`."""
        self.leave()
        self._never = why
