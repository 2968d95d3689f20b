"""The edge between the caller's graph and the model's, where a pass that fails is run again.

What a forward pass returns is cut off the model's own graph: the caller's loss ends here, and its
backward pass asks this file for the gradients of the model. So when memory is wanting, inside the
model's forward or backward pass, the pass is undone, room is made (`room`), and it runs again: the
same inputs, random bits and buffers, the same weights (no optimizer step lies between), so the same
bits. Gradients that were delivered before are passed over (`gradients`).

A forward pass whose hooks are gone, because another one ran before its backward pass, is run again
in the same way: two passes and one loss of both work.

Tensors of the graph that the forward pass keeps as attributes of modules (an auxiliary loss of
experts) are outputs too: what stands there afterwards is cut off as well.

What the caller computes between the two passes, such as a loss in float32 of whole logits, is the
caller's: `trace` plans for it, and it cannot be run again.
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from evener.errors import EvenerError, UsageError
from evener.zero.device import Device
from evener.zero.out_of_memory import asked
from evener.zero.passes import Passes
from evener.zero.untouched import Attributes, kept_graphs, replace_kept
from evener.zero.vocabulary import LazyLogits

LARGE_BUFFER = 16 << 20
"""Bytes of a buffer from which on it is not kept for every pass."""


class NoRoomError(EvenerError):
    """A step needs more accelerator memory than the budget has, and no more room can be made."""


class _State:
    """What a pass depends on beside its inputs and the weights."""

    def __init__(
        self, modules: list[nn.Module], device: torch.device, buffers: list[torch.Tensor]
    ) -> None:
        self.modules = modules
        self.device = device
        self.attributes = Attributes(modules, values=True)
        self.random = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        kind = device.type
        self.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self.buffers = [(buffer, buffer.detach().clone()) for buffer in buffers]

    def now(self) -> _State:
        """The same of this moment."""
        return _State(self.modules, self.device, [buffer for buffer, _ in self.buffers])

    @torch.no_grad()
    def restore(self) -> None:
        """As it was."""
        self.attributes.restore()
        torch.set_rng_state(self.random)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)
        for buffer, value in self.buffers:
            # A norm saves its running means with its inputs and does not read them in a backward
            # pass. Their version must not change: autograd would refuse the pass that runs again.
            buffer.data.copy_(value)

    @contextlib.contextmanager
    def casting(self) -> Iterator[None]:
        """Autocast as it was."""
        on, dtype = self.autocast
        with torch.autocast(self.device.type, dtype=dtype, enabled=on):
            yield


class _Pass:
    """One forward pass, and its backward pass. `outs`: what needs a gradient."""

    def __init__(self, edge: Boundary, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.edge = edge
        leaves, self.spec = tree_flatten((args, kwargs))
        self.leaves: list[Any] = leaves
        self.wanted = [
            n for n, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad
        ]
        self.modules = list(edge.model.modules())
        self.earlier = {id(x): x for x in kept_graphs(self.modules)}
        """What modules keep of earlier passes."""
        self.state = _State(self.modules, edge.device.device, edge.buffers())
        self.finished = False
        self.outs: list[torch.Tensor] | None = None
        self.sharing: list[tuple[torch.Tensor, int]] = []
        """Memory that several outputs share, and its version as the caller got it."""
        self.inputs: list[torch.Tensor] = []

    def run(self) -> Any:
        """The model's forward pass; its outputs with its own graph."""
        edge = self.edge
        leaves = list(self.leaves)
        self.inputs = []
        for place in self.wanted:
            leaves[place] = leaves[place].detach().requires_grad_()
            self.inputs.append(leaves[place])
        args, kwargs = tree_unflatten(leaves, self.spec)
        edge.current = self
        return edge.inner(*args, **kwargs)

    def forward(self) -> Any:
        """Outputs as the caller gets them."""
        out = self.edge.with_room(self.run, self.drop, self._redo)
        self.edge.changed(self.state)
        self.finished = True
        leaves, spec = _flat(out)
        places = self._differentiable(leaves)
        kept = self._kept()
        self.outs, which = _once([*(_tensor(leaves[n]) for n in places), *kept])
        if not self.outs:
            return out
        anchor = torch.empty((), requires_grad=True)
        given = [self.leaves[n] for n in self.wanted]
        cuts = _Edge.apply(self, anchor, *given)
        self.sharing = _sharing(cuts)
        found = [cuts[n] for n in which]
        for place, cut in zip(places, found, strict=False):
            old = leaves[place]
            leaves[place] = old.cut(cut) if isinstance(old, LazyLogits) else cut
        if kept:
            replace_kept(self.modules, dict(zip(map(id, kept), found[len(places) :], strict=True)))
        return tree_unflatten(leaves, spec)

    def _differentiable(self, leaves: list[Any]) -> list[int]:
        return [
            n
            for n, x in enumerate(leaves)
            if isinstance(x, torch.Tensor) and (_tensor(x).grad_fn is not None)
        ]

    def _kept(self) -> list[torch.Tensor]:
        """What this pass has kept in modules, once each."""
        found = {id(x): x for x in kept_graphs(self.modules) if id(x) not in self.earlier}
        return list(found.values())

    def _redo(self) -> None:
        """Before the forward pass runs again."""
        self.state.restore()
        self.edge.passes.begin()

    def drop(self) -> None:
        """Give the graph back: the backward pass will run the forward pass again."""
        self.outs = None
        self.inputs = []

    def _again(self) -> None:
        """The forward pass once more, with the bits of the first time."""
        now = self.state.now()
        self.edge.passes.abort()
        self._redo()
        self.edge.passes.anew = True
        try:
            with torch.enable_grad(), self.state.casting():
                out = self.run()
        finally:
            self.edge.passes.anew = False
        leaves, _ = _flat(out)
        places = self._differentiable(leaves)
        self.outs, _ = _once([*(_tensor(leaves[n]) for n in places), *self._kept()])
        now.restore()

    def backward(
        self, gradients: list[torch.Tensor | None], weights: bool
    ) -> list[torch.Tensor | None]:
        """Gradients of the inputs; those of the weights go their way by the hooks, where they are
        asked for (`weights`)."""
        edge = self.edge
        if edge.busy:
            raise UsageError(
                "a forward pass computed with what an earlier one has kept in a module, and its "
                "gradient would run through both",
                "detach() what modules keep from one pass to the next",
            )
        if any(x._version != version for x, version in self.sharing):
            raise UsageError(
                "the model returned two views of one tensor, and something was written to one of "
                "them in place: the other's gradient would know nothing of it",
                "write `x = x * y` instead of `x *= y` to what the model returned",
            )
        if weights:
            edge.passes.backward()
        found: list[torch.Tensor | None] = []

        def attempt() -> None:
            if self.outs is None or edge.current is not self:
                self._again()
            assert self.outs is not None
            pairs = [(o, g) for o, g in zip(self.outs, gradients, strict=True) if g is not None]
            outs, given = [o for o, _ in pairs], [g for _, g in pairs]
            self.outs = None
            del pairs
            if outs and weights:
                torch.autograd.backward(outs, given)
            elif outs and self.inputs:
                torch.autograd.backward(outs, given, inputs=self.inputs)
            found.extend(x.grad for x in self.inputs)

        edge.busy = True
        try:
            edge.with_room(attempt, self.drop, found.clear)
        finally:
            edge.busy = False
        edge.passes.end()
        self.drop()
        return found


def _once(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[int]]:
    """Each once, and where in that list each of `tensors` is."""
    places = {key: n for n, key in enumerate(dict.fromkeys(map(id, tensors)))}
    return list({id(x): x for x in tensors}.values()), [places[id(x)] for x in tensors]


def _sharing(cuts: tuple[torch.Tensor, ...]) -> list[tuple[torch.Tensor, int]]:
    """A tensor without a graph, and its version, of each memory that several of `cuts` share."""
    once = {x.untyped_storage()._cdata: x for x in cuts}
    several = collections.Counter(x.untyped_storage()._cdata for x in cuts)
    return [(x.detach(), x._version) for key, x in once.items() if several[key] > 1]


def _tensor(x: Any) -> torch.Tensor:
    """What of an output is in the graph."""
    if isinstance(x, LazyLogits):
        assert x.hidden is not None
        return x.hidden
    found: torch.Tensor = x
    return found


def _flat(out: Any) -> tuple[list[Any], Any]:
    """The leaves of what a model returned: logits that something has made whole are."""
    leaves, spec = tree_flatten(out)
    return [x.whole() if isinstance(x, LazyLogits) and not x.parts else x for x in leaves], spec


def _wants_weights(ctx: Any) -> bool:
    """Whether this backward pass gathers gradients in the weights, for which the anchor stands: not
    where torch.autograd.grad, or `backward(inputs=...)`, asks for others."""
    anchor = ctx.next_functions[0][0]
    try:
        return bool(torch._C._will_engine_execute_node(anchor))
    except RuntimeError:  # torch does not say it of a leaf while autograd.grad runs
        return False


class _Edge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Pass, *_: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.run = run
        assert run.outs is not None
        return tuple(x.detach() for x in run.outs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():  # create_graph
            raise UsageError(
                "a gradient of a gradient (create_graph=True) cannot go through the engine: the "
                "model's graph is gone by then",
                "train a model with such a penalty without evener.zero",
            )
        return None, None, *ctx.run.backward(list(gradients), _wants_weights(ctx))


class Boundary:
    """Stands in for `model.forward`. `check`: sees a pass's arguments before it runs; `room`:
    makes room for this many bytes and says whether it could; `retry`: whether a pass may run again
    for want of memory (several ranks would wait for each other); `account`: who has the memory
    when no more room can be made, and what to do, of the bytes that were asked for."""

    def __init__(
        self,
        model: nn.Module,
        passes: Passes,
        device: Device,
        *,
        check: Callable[[tuple[Any, ...], dict[str, Any]], None],
        room: Callable[[int], bool],
        retry: bool,
        account: Callable[[int], tuple[str, str]] | None = None,
    ) -> None:
        self.model = model
        self.passes = passes
        self.device = device
        self.inner = model.forward
        self.current: _Pass | None = None
        self.again = 0
        """Passes that ran again for want of memory."""
        self.busy = False
        """Whether a backward pass through the model runs."""
        self._check = check
        self._room = room
        self._retry = retry
        self._account = account
        self._changing: dict[bool, list[torch.Tensor]] = {}

        # What torch.compile makes of a whole model would hold weights that come and go, so a pass
        # runs as it is. `compile` of the configuration compiles each block, inside of its hooks.
        @functools.wraps(self.inner)  # generation looks at the names of its arguments
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._forward(*args, **kwargs)

        model.forward = forward

    def close(self) -> None:
        """The model's own forward again."""
        self.model.forward = self.inner
        self.current = None

    def buffers(self) -> list[torch.Tensor]:
        """Buffers that a pass may change: a branch that is taken now may not have been before.

        Large ones (a quantized weight) are looked at in the first pass of each mode alone.
        """
        changing = self._changing.get(self.model.training)
        buffers = list(self.model.buffers())
        if changing is None:
            return buffers
        known = {id(buffer) for buffer in changing}
        return [b for b in buffers if b.nbytes <= LARGE_BUFFER or id(b) in known]

    def changed(self, state: _State) -> None:
        """After a pass: learn which of the large buffers it changed."""
        if self.model.training not in self._changing:
            large = [(b, old) for b, old in state.buffers if b.nbytes > LARGE_BUFFER]
            changing = [b for b, old in large if not torch.equal(b, old)]
            self._changing[self.model.training] = changing
            still = {id(b) for b, _ in large} - {id(b) for b in changing}
            state.buffers = [(b, old) for b, old in state.buffers if id(b) not in still]

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.passes.suspended:
            return self.inner(*args, **kwargs)
        if self.current is not None:
            self.current.drop()  # its hooks went when this pass began
            self.current = None
        self._check(args, kwargs)
        if torch.is_grad_enabled():
            return _Pass(self, args, kwargs).forward()
        state = _State(list(self.model.modules()), self.device.device, self.buffers())

        def redo() -> None:
            state.restore()
            self.passes.begin()

        return self.with_room(lambda: self.inner(*args, **kwargs), lambda: None, redo)

    def with_room(
        self, attempt: Callable[[], Any], drop: Callable[[], None], redo: Callable[[], None]
    ) -> Any:
        """`attempt`, with more room each time that memory is wanting. `drop`: let go of what the
        attempt made; `redo`: prepare the next one."""
        tries = 0
        while True:
            try:
                return attempt()
            except torch.OutOfMemoryError as error:
                if not self._retry:
                    raise
                wanted, said = asked(error), str(error).splitlines()[0]
                # The frames in between hold what the pass had made.
                error.__traceback__ = None
            drop()
            self.passes.abort()
            self.device.trim()
            if not self._room(max(wanted, 1) << min(tries, 6)):
                problem = f"a step needs more accelerator memory than the budget has: {said}"
                fix = (
                    "raise the gpu budget, lower the batch, or give evener.checkpointing = "
                    '"auto"; no weight was changed'
                )
                if self._account is not None:
                    of, way = self._account(wanted)
                    problem, fix = f"{problem}; {of}", f"{way}; or {fix}"
                raise NoRoomError(problem, fix)
            redo()
            tries += 1
            self.again += 1
