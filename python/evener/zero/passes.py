"""The hooks by which a model's own forward and backward passes drive loading and gradients.

A unit's `forward` is wrapped: its weights are loaded before it and freed after. The backward pass
reaches a unit when the first gradient of its outputs is there (`register_multi_grad_hook`): its
weights are loaded again. It is through when the gradients of its weights and of its inputs are
done. A recomputed block runs its forward inside that.

An input that all blocks share has its gradient when the last of them is through (T5's position
bias, what a decoder reads of its encoder), and the weights of all would stay for it. So in a model
that was traced (`early`) a unit with such an input and no frozen weights is through with the
gradients of its weights: what computes one has read the weight. Where one is read later all the
same, because it was detached, the trace finds it, and it stays.

Which units are recomputed may change between two passes (`recompute`). `abort` ends a pass that
failed, so that it can be run again; `away` takes the hooks off for as long as `trace` runs the same
model under hooks of its own.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from evener.zero import heads
from evener.zero.activations import Offload
from evener.zero.chunk import Chunk
from evener.zero.edges import Edges, WrittenError, kept
from evener.zero.gradients import Gradients
from evener.zero.loading import Loading
from evener.zero.spans import Spans
from evener.zero.units import Unit
from evener.zero.untouched import kept_graphs, modules_kept
from evener.zero.vocabulary import Head, whole


@dataclass
class _Live:
    """A unit while it runs. inputs: gradients of calls' inputs that are still to come. shares:
    whether one of those inputs is another call's, too."""

    unit: Unit
    index: int
    chunks: list[Chunk]
    in_backward: bool = False
    inputs: int = 0
    shares: bool = False
    mark: Any = None
    handles: list[Any] = field(default_factory=list)

    def unwatch(self) -> None:
        """A hook holds the node that it is on. Such a ring in each unit keeps the whole graph, and
        Python's collector frees one unit of it per pass."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def done(self, early: bool) -> bool:
        """Whether its backward pass is through."""
        waiting = any(c.group.trainable and (c.arrived or not c.touched) for c in self.chunks)
        early = early and self.shares and all(c.group.trainable for c in self.chunks)
        return self.in_backward and not waiting and (self.inputs == 0 or early)


class Passes:
    """See the head of this file. `recompute`: indices of the units that are. `head`: the layer
    whose logits are lazy. `before`: called before each forward pass. `early`: whether gradients of
    inputs need not be waited for."""

    def __init__(
        self,
        model: nn.Module,
        units: list[tuple[Unit, list[Chunk]]],
        loading: Loading,
        gradients: Gradients,
        spans: Spans,
        *,
        recompute: set[int],
        offload: Offload | None,
        compiler: bool | str,
        before: Callable[[], None],
        head: Head | None = None,
        early: bool = False,
        tracing: bool = False,
    ) -> None:
        self._loading = loading
        self._early = early
        self._gradients = gradients
        self._spans = spans
        self.recompute = recompute
        self.offload = offload
        self._head = head
        self._tracing = tracing
        self._compiler = compiler
        self._before = before
        self._running = False
        self.anew = False
        """Whether a whole forward pass runs again, inside of a backward pass."""
        self._suspended = False
        self._given: dict[int, tuple[weakref.ref[torch.Tensor], _Live]] = {}
        """Inputs of calls, by `id`, which is another tensor's once this one is gone."""
        self._live: list[_Live] = []
        self._home: dict[nn.Parameter, tuple[Chunk, int, _Live]] = {}
        begin = torch.compiler.disable(lambda *_: self._begin())
        self._hooks: list[Any] = [model.register_forward_pre_hook(begin)]
        self._wrapped: list[tuple[nn.Module, Any, Any]] = []
        for index, (unit, chunks) in enumerate(units):
            live = _Live(unit, index, chunks)
            self._live.append(live)
            for chunk in chunks:
                for place, piece in enumerate(chunk.group.pieces):
                    self._home[piece.parameter] = (chunk, place, live)
                    if chunk.group.trainable and piece.parameter.requires_grad:
                        self._hooks.append(
                            piece.parameter.register_post_accumulate_grad_hook(self._on_gradient)
                        )
            if unit.module is not None:
                self._wrap(live, unit.module)
        if head is not None:
            self._hold_before, head.hold = head.hold, self._hold

    @property
    def suspended(self) -> bool:
        """Whether the hooks are away."""
        return self._suspended

    @contextlib.contextmanager
    def away(self) -> Iterator[None]:
        """Without these hooks: for `trace`, between two passes."""
        self._suspended = True
        for module, original, _ in self._wrapped:
            module.forward = original
        try:
            yield
        finally:
            for module, _, wrapper in self._wrapped:
                module.forward = wrapper
            self._suspended = False

    def end(self) -> None:
        """After a backward pass, or before a forward pass where the last had none."""
        self._running = False
        self._gradients.end([chunk for live in self._live for chunk in live.chunks])
        self._settle()

    def backward(self) -> None:
        """Before a backward pass through the model."""
        self._gradients.begin([chunk for live in self._live for chunk in live.chunks])

    def abort(self) -> None:
        """After a pass that failed: forget what came of it in part. What the backward pass has
        delivered stays, and is not delivered again by the pass that follows (see Gradients)."""
        self._running = False
        self._gradients.abort([chunk for live in self._live for chunk in live.chunks])
        self._settle()

    def _settle(self) -> None:
        for live in self._live:
            live.unwatch()
            live.inputs, live.shares = 0, False
            live.in_backward = False
        self._given.clear()
        if self.offload is not None:
            self.offload.clear()
        self._loading.end()

    def close(self) -> None:
        """Unhook the model."""
        for hook in self._hooks:
            hook.remove()
        for live in self._live:
            live.unwatch()
        for module, original, _ in reversed(self._wrapped):
            module.forward = original
        if self._head is not None:
            self._head.hold = self._hold_before

    @contextlib.contextmanager
    def _hold(self) -> Iterator[None]:
        """The weights of the head, for as long as something computes with them."""
        assert self._head is not None
        homes = [self._home[p][2] for p in self._head.linear.parameters() if p in self._home]
        units = dict.fromkeys(live.index for live in homes if live.unit.module is not None)
        for unit in units:
            self._loading.enter(unit)
        try:
            yield
        finally:
            for unit in units:
                self._loading.leave(unit)

    def begin(self) -> None:
        """A forward pass begins."""
        self._running = True
        self._loading.begin()

    def wake(self) -> None:
        """A pass that begins elsewhere than in the model's forward: in one of its other methods,
        or in a part of it."""
        if not self._running and not self._suspended:
            self._begin()

    def _begin(self) -> None:
        if self._suspended:
            return
        self._before()
        if self._running:
            self.end()
        self.begin()

    def _wrap(self, live: _Live, module: nn.Module) -> None:
        inner = original = module.forward
        inside = list(module.modules())
        if self._compiler and live.unit.repeated:
            # The block itself; these hooks stay outside of what is compiled.
            backend = self._compiler if isinstance(self._compiler, str) else "inductor"
            inner = torch.compile(inner, backend=backend)

        def body(*args: Any, **kwargs: Any) -> Any:
            again = torch._C._current_graph_task_id() != -1 and not self.anew
            with _kept(module) if again else contextlib.nullcontext():
                return run(*args, **kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            if live.in_backward:  # recomputed: the weights are here
                return inner(*args, **kwargs)
            self._loading.enter(live.index)
            with self._spans.device("compute", "compute", f"forward {live.unit.name}"):
                out = inner(*args, **kwargs)
            self._loading.leave(live.index)
            return out

        def forward(*args: Any, **kwargs: Any) -> Any:
            head = self._head
            if head is not None and module is head.linear and head.lazy():
                return inner(*args, **kwargs)  # computes nothing yet
            if torch._C._current_graph_task_id() == -1:  # not recomputed
                self.wake()
            if not torch.is_grad_enabled():
                return body(*args, **kwargs)
            edges = Edges((args, kwargs))
            if live.index in self.recompute:
                if head is not None:  # made whole inside, they are whole when it is recomputed
                    args, kwargs = whole((args, kwargs))
                with self.offload.hooks() if self.offload else kept():
                    out = checkpoint(
                        heads.recomputed(body),
                        *args,
                        use_reentrant=False,
                        preserve_rng_state=not self._tracing,
                        **kwargs,
                    )
                if edges.written():
                    raise WrittenError(f"block {live.unit.name}")
            else:
                out = body(*args, **kwargs)
            self._watch(live, edges, (out, kept_graphs(inside)))
            return out

        module.forward = forward
        self._wrapped.append((module, original, forward))

    def _watch(self, live: _Live, edges: Edges, outputs: Any) -> None:
        ends = edges.ends(outputs)
        if not ends:
            return
        live.handles.append(
            register_multi_grad_hook(ends, lambda *_: self._reached(live), mode="any")
        )
        if edges.inputs:
            live.inputs += 1
            for x in edges.inputs:
                given = self._given.get(id(x))
                if given is not None and given[0]() is x:
                    given[1].shares = live.shares = True
                else:
                    self._given[id(x)] = weakref.ref(x), live
            live.handles += edges.on_begin(lambda: self._inputs_done(live))

    def _reached(self, live: _Live) -> None:
        if not live.in_backward:
            live.in_backward = True
            self._loading.enter(live.index)
            live.mark = self._spans.mark("compute")

    def _inputs_done(self, live: _Live) -> None:
        live.inputs -= 1
        self._maybe_done(live)

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        chunk, place, live = self._home[parameter]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:  # of a block in parts that did not use it
            return
        self._gradients.add(chunk, place, gradient)
        self._maybe_done(live)

    def _maybe_done(self, live: _Live) -> None:
        if live.done(self._early):
            live.in_backward = False
            self._spans.since(live.mark, "compute", "compute", f"backward {live.unit.name}")
            self._gradients.through(live.chunks)
            self._loading.leave(live.index)


@contextlib.contextmanager
def _kept(module: nn.Module) -> Iterator[None]:
    """Inside, a block runs a second time: its buffers and what it keeps stay as the first has left
    them."""
    before = [
        (each._buffers, name, buffer, buffer.detach().clone())
        for each in module.modules()
        for name, buffer in each._buffers.items()
        if buffer is not None
    ]
    try:
        with modules_kept(module.modules(), values=True):
            yield
    finally:
        for buffers, name, buffer, value in before:
            buffers[name] = buffer
            buffer.data.copy_(value)  # its version stays: autograd may have saved it
