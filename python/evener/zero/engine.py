"""The engine: a model whose weights, gradients and states live where the plan put them.

# A step
forward: a unit's weights are loaded before it runs (its next ones meanwhile, by the order traced in
the first step) and freed after. backward: loaded again before the first gradient reaches the unit;
its gradients leave for the host as soon as all are there, the norm of each taken on the way; freed
when the gradients of its weights and of its inputs are done. step: one global norm, then the
optimizer: resident chunks at once on the accelerator, the others by the lanes (see `lanes`) in the
order of the next forward pass, which waits for each chunk where it first needs it. Clipping is
exact: nothing is updated before the norm of all gradients is known. With `stale_updates` a pass
does not wait: it may compute with weights that are partly those of the step before.

# Who may touch what
The training thread owns chunks and parameters. The loader thread fills a chunk between `_request`
and `ready`; the lanes write a chunk's host states between `updated.clear()` and `updated.set()`
(and `updated_event`); the loader waits for both first. A chunk's gradient on the host is written by
a copy that `gradient_event` ends, and read by the lanes after it.

# Ranks
Every rank holds 1/N of each chunk's states. stage 1: gradients are reduced once a step; stage 2:
reduced to the rank's share in every backward pass; stage 3: weights are shared out too, and
gathered when a unit is loaded. All ranks must run the same units in the same order.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from evener.errors import EvenerError
from evener.zero.activations import Offload
from evener.zero.chunk import Chunk
from evener.zero.device import Device, Event
from evener.zero.hyper import Noise, Rule, update_on_device
from evener.zero.lanes import Lanes, Update
from evener.zero.planner import Plan
from evener.zero.ranks import Ranks
from evener.zero.scaler import LossScaler
from evener.zero.spans import Span, Spans
from evener.zero.store import Store
from evener.zero.transfers import Worker
from evener.zero.units import Unit

logger = logging.getLogger("evener.zero")


class Saving(Protocol):
    """A checkpoint on its way."""

    def wait(self) -> None:
        """Until it is written, or has failed."""


@dataclass
class _Live:
    """What the engine knows of a unit while it runs."""

    unit: Unit
    index: int
    chunks: list[Chunk]
    checkpoint: bool = False
    in_backward: bool = False
    inputs: int = 0
    mark: Any = None
    handles: list[Any] = field(default_factory=list)


class Engine:
    """Made by `evener.zero.initialize`. Call it as the model."""

    def __init__(
        self,
        model: nn.Module,
        store: Store,
        rule: Rule,
        device: Device,
        *,
        accumulation: int = 1,
        clipping: float = 0.0,
        checkpointing: bool = False,
        depth: int = 2,
        stage: int = 3,
        scaler: LossScaler | None = None,
        ranks: Ranks | None = None,
        seed: int = 0,
        streaming: bool = False,
        stale_updates: bool = False,
        offload: Offload | None = None,
        compiler: bool | str = False,
        plan: Plan | None = None,
    ) -> None:
        self.module = model
        self.store = store
        self.rule = rule
        self.device = device
        self.accumulation = accumulation
        self.clipping = clipping
        self.depth = depth
        self.stage = stage
        self.scaler = scaler
        self.seed = seed
        self.stale_updates = stale_updates
        self.plan = plan
        """What was planned; None where the places of chunks were given."""
        self.global_steps = 0
        self.skipped_steps = 0
        self.micro_steps = 0
        self.scheduler: Any = None
        self.saving: Saving | None = None
        """The checkpoint that is being written, or the last one."""
        self.param_groups: list[dict[str, Any]] = []
        self._norm: torch.Tensor | None = None
        self.ranks = ranks or Ranks()
        self.rank, self.world = self.ranks.rank, self.ranks.world
        self._traces: dict[bool, list[int]] = {True: [], False: []}
        self._mode = True
        self._recording: list[int] = []
        self._cursor = 0
        self._in_pass = False
        self._in_flight: list[tuple[Event, Any]] = []
        self._freed: list[tuple[int, int, Event]] = []
        self._freed_lock = threading.Lock()
        self._closed = False
        self.spans = offload.spans if offload else Spans(device)
        self._offload = offload
        self._step_began = 0.0
        self._loader: Worker[Chunk] = Worker("evener-load", self._load, device.attach)
        self._lanes = Lanes(
            rule,
            device,
            seed=seed,
            ranks=(self.rank, self.world),
            streaming=streaming,
            spans=self.spans,
        )
        self._live: list[_Live] = []
        self._home: dict[nn.Parameter, tuple[Chunk, int, _Live]] = {}
        self._hooks: list[Any] = []
        self._originals: list[tuple[nn.Module, Any]] = []
        self._compiler = compiler
        for index, (unit, chunks) in enumerate(store.units):
            live = _Live(unit, index, chunks, checkpointing and unit.repeated)
            self._live.append(live)
            for chunk in chunks:
                for place, piece in enumerate(chunk.group.pieces):
                    self._home[piece.parameter] = (chunk, place, live)
                    if chunk.group.trainable:
                        self._hooks.append(
                            piece.parameter.register_post_accumulate_grad_hook(self._on_gradient)
                        )
            if unit.module is not None:
                self._wrap(live, unit.module)
        self._hooks.append(model.register_forward_pre_hook(lambda *_: self._begin()))

    # --- the API ---

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass; floating-point inputs are cast to the compute dtype."""
        cast = self.store.dtype

        def move(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            value = value.to(self.device.device, non_blocking=True)
            return value.to(cast) if value.is_floating_point() else value

        args, kwargs = tree_map(move, (args, kwargs))
        return self.module(*args, **kwargs)

    def train(self, mode: bool = True) -> Engine:
        """As `torch.nn.Module.train`."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """As `torch.nn.Module.eval`."""
        return self.train(False)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the loss scale, divided by the accumulation steps: what to call
        `backward()` on in a loop of one's own."""
        factor = self.scaler.scale if self.scaler else 1.0
        if factor == 1.0 and self.accumulation == 1:
            return loss
        return loss * (factor / self.accumulation)

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """The backward pass of one micro-batch."""
        self.scale(loss).backward()
        self.flush()
        self.micro_steps += 1
        return loss

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates the weights."""
        return self.micro_steps % self.accumulation == 0 and self.micro_steps > 0

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients in the last step, before clipping."""
        return None if self._norm is None else float(self._norm)

    def zero_grad(self) -> None:
        """Forget gradients that no step has used."""
        self.flush()
        for chunk in self.chunks():
            chunk.filled = chunk.touched = False
            chunk.norms = None
        self.store.whole_gradients.clear()

    def chunks(self) -> Iterator[Chunk]:
        """All chunks in the order of the model."""
        for live in self._live:
            yield from live.chunks

    def drain(self) -> None:
        """Wait until every optimizer step that was begun is done. Raises what failed in one."""
        failed = self._lanes.wait()
        if failed is not None:
            raise EvenerError(
                f"an optimizer step on the host failed: {failed}", "see the cause above"
            ) from failed

    def close(self) -> None:
        """Stop the threads and unhook the model; the weights stay where they are."""
        if self._closed:
            return
        self._closed = True
        if self.saving is not None:
            self.saving.wait()
        self.drain()
        for hook in self._hooks:
            hook.remove()
        for module, original in self._originals:
            module.forward = original
        self._loader.close()
        self._lanes.close()
        self.device.unlimit()

    @property
    def threads(self) -> int:
        """Threads of the optimizer on the host."""
        return self._lanes.threads

    @threads.setter
    def threads(self, number: int) -> None:
        self._lanes.threads = number

    @property
    def updated(self) -> dict[str, int]:
        """Elements that the host's cores ("host") and the streaming lane ("stream") updated."""
        return dict(self._lanes.done)

    def record(self) -> None:
        """Record spans from now on, until `recorded`. Call it between steps."""
        self.spans.start()
        self._step_began = time.perf_counter()

    def recorded(self) -> list[Span]:
        """The spans since `record`, for `evener.zero.report`; recording stops. The optimizer of
        the last step goes on and is not in them."""
        return self.spans.stop()

    # --- loading and freeing ---

    def _load(self, chunk: Chunk) -> None:
        """On the loader's thread."""
        try:
            if not self.stale_updates:
                with self.spans.host("wait", "loader for the optimizer", chunk.group.name):
                    chunk.updated.wait()
                if chunk.updated_event is not None:
                    self.device.wait("h2d", chunk.updated_event)
            with torch.no_grad(), self.device.on("h2d"):
                if not chunk.keeps:
                    chunk.allocate()
                    self._reuse(chunk)
                begun = self.spans.mark("h2d")
                weights, size = chunk.states.weights, chunk.states.weights.numel()
                if self.world == 1:
                    chunk.flat.copy_(weights, non_blocking=True)
                else:
                    mine = chunk.flat[self.rank * size : (self.rank + 1) * size]
                    mine.copy_(weights, non_blocking=True)
                    self.ranks.gather(chunk.flat, mine)
                self.spans.since(begun, "copy", "h2d", chunk.group.name)
                chunk.load_event = self.device.record("h2d")
        except BaseException as error:  # noqa: BLE001  # raised again where the chunk is needed
            chunk.error = error
        chunk.ready.set()

    def _reuse(self, chunk: Chunk) -> None:
        """The copy into a chunk's new memory waits for those who computed in it before."""
        begin = chunk.flat.data_ptr()
        with self._freed_lock:
            before = [e for e in self._freed if e[0] < begin + chunk.bytes and begin < e[1]]
        for _, _, event in before:
            self.device.wait("h2d", event)

    def _request(self, chunk: Chunk) -> None:
        if chunk.loaded or chunk.requested or (chunk.keeps and not chunk.stale):
            return
        chunk.requested = True
        chunk.ready.clear()
        self._loader.put(chunk)

    def _acquire(self, chunk: Chunk) -> None:
        if chunk.loaded:
            return
        self._request(chunk)
        if chunk.requested:
            with self.spans.host("wait", "training for weights", chunk.group.name):
                chunk.ready.wait()
            chunk.requested = False
            if chunk.error is not None:
                error, chunk.error = chunk.error, None
                raise EvenerError(
                    f"chunk {chunk.group.name} could not be brought to {self.device.device}: "
                    f"{error}",
                    "lower the batch or the prefetch depth, or raise the GPU budget",
                ) from error
            assert chunk.load_event is not None
            self.device.wait("compute", chunk.load_event)
        chunk.bind()
        chunk.loaded, chunk.stale = True, False

    def _free(self, chunk: Chunk) -> None:
        if chunk.requested:
            self._acquire(chunk)
        if chunk.keeps or not chunk.loaded:
            return
        # What is loaded next may get this memory, and must come after what still computes with it.
        # Only that: a wait here would also hold up copies that were asked for before.
        place = chunk.flat.data_ptr()
        with self._freed_lock:
            entry = (place, place + chunk.bytes, self.device.record("compute"))
            self._freed = [*(e for e in self._freed if not e[2].query()), entry]
        chunk.unbind()
        chunk.empty()
        chunk.loaded = False

    def _enter(self, live: _Live) -> None:
        place = self._cursor
        self._cursor += 1
        self._recording.append(live.index)
        known = place < len(self._trace) and self._trace[place] == live.index
        if not known:
            self._traces[
                self._mode
            ] = []  # another order than last time: no guess, and learn it anew
        for chunk in live.chunks:
            self._request(chunk)
        for index in self._trace[place + 1 : place + 1 + self.depth]:
            for chunk in self._live[index].chunks:
                if not chunk.loaded:
                    self._request(chunk)
        for chunk in live.chunks:
            self._acquire(chunk)

    def _leave(self, live: _Live) -> None:
        if live.index in self._trace[self._cursor : self._cursor + self.depth]:
            return
        for chunk in live.chunks:
            self._free(chunk)

    def _begin(self) -> None:
        """Before the model's forward pass."""
        if self._lanes.failed:
            self.drain()
        if self._in_pass:
            self.flush()
        self._in_pass = True
        self._cursor = 0
        self._recording = []
        self._mode = torch.is_grad_enabled()  # evaluation has an order of its own
        for chunk in self._live[0].chunks:
            self._acquire(chunk)

    @property
    def _trace(self) -> list[int]:
        """The units in the order in which the last pass of this kind entered them."""
        return self._traces[self._mode]

    # --- hooks ---

    def _wrap(self, live: _Live, module: nn.Module) -> None:
        inner = module.forward
        self._originals.append((module, inner))
        if self._compiler and live.unit.repeated:
            # The block itself; the engine's hooks stay outside of what is compiled.
            backend = self._compiler if isinstance(self._compiler, str) else "inductor"
            inner = torch.compile(inner, backend=backend)

        def body(*args: Any, **kwargs: Any) -> Any:
            if live.in_backward:  # recomputed: the weights are here
                return inner(*args, **kwargs)
            self._enter(live)
            with self.spans.device("compute", "compute", f"forward {live.unit.name}"):
                out = inner(*args, **kwargs)
            self._leave(live)
            return out

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return body(*args, **kwargs)
            if live.checkpoint and module.training:
                with self._offload.hooks() if self._offload else contextlib.nullcontext():
                    out = checkpoint(body, *args, use_reentrant=False, **kwargs)
            else:
                out = body(*args, **kwargs)
            self._watch(live, (args, kwargs), out)
            return out

        module.forward = forward

    def _watch(self, live: _Live, inputs: Any, outputs: Any) -> None:
        def tracked(tree: Any) -> list[torch.Tensor]:
            return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.requires_grad]

        out, into = tracked(outputs), tracked(inputs)
        if not out:
            return
        live.handles.append(
            register_multi_grad_hook(out, lambda *_: self._before_backward(live), mode="any")
        )
        if into:
            live.inputs += 1
            live.handles.append(register_multi_grad_hook(into, lambda *_: self._inputs_done(live)))

    def _before_backward(self, live: _Live) -> None:
        if not live.in_backward:
            live.in_backward = True
            self._enter(live)
            live.mark = self.spans.mark("compute")

    def _inputs_done(self, live: _Live) -> None:
        live.inputs -= 1
        self._maybe_done(live)

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        chunk, place, live = self._home[parameter]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        earlier = chunk.arrived.get(place)
        chunk.arrived[place] = gradient if earlier is None else earlier + gradient
        if len(chunk.arrived) == len(chunk.group.pieces):
            self._reduce(chunk)
            self._maybe_done(live)

    def _maybe_done(self, live: _Live) -> None:
        waiting = any(c.group.trainable and (c.arrived or not c.touched) for c in live.chunks)
        if live.in_backward and not waiting and live.inputs == 0:
            live.in_backward = False
            self.spans.since(live.mark, "compute", "compute", f"backward {live.unit.name}")
            self._leave(live)

    # --- gradients ---

    @torch.no_grad()
    def _reduce(self, chunk: Chunk) -> None:
        """This backward pass's gradient of a chunk goes to where its states are."""
        assert chunk.gradient is not None
        arrived, chunk.arrived = chunk.arrived, {}
        chunk.touched = True
        pieces = chunk.group.pieces
        dtype = chunk.gradient.dtype
        whole = torch.zeros(chunk.flat.numel(), dtype=dtype, device=self.device.device)
        for place, gradient in arrived.items():
            piece = pieces[place]
            whole[piece.offset : piece.offset + piece.numel].copy_(gradient.reshape(-1))
        arrived.clear()
        if self.stage == 1 and self.world > 1 and self.accumulation > 1:
            # Stage 1 keeps the whole sum and reduces it once, in step().
            kept = self.store.whole_gradients.get(chunk.index)
            self.store.whole_gradients[chunk.index] = whole if kept is None else kept.add_(whole)
            return
        self._deliver(chunk, whole)

    @torch.no_grad()
    def _deliver(self, chunk: Chunk, whole: torch.Tensor) -> None:
        """Reduce over ranks, add what is there, take the norm, bring it home."""
        assert chunk.gradient is not None
        share = whole
        if self.world > 1:
            share = torch.empty(chunk.gradient.numel(), dtype=whole.dtype, device=whole.device)
            self.ranks.reduce(share, whole)
        if chunk.filled:
            share += self._fetch_gradient(chunk)
        chunk.filled = True
        self._measure(chunk, share)
        if chunk.resident:
            chunk.gradient.copy_(share)
            return
        if self.stale_updates:
            chunk.updated.wait()  # its last gradient is still being read
        done = self.device.record("compute")
        with self.device.on("d2h"):
            self.device.wait("d2h", done)
            with self.spans.device("copy", "d2h", chunk.group.name):
                chunk.gradient.copy_(share, non_blocking=True)
            chunk.gradient_event = self.device.record("d2h")
        self._in_flight.append((chunk.gradient_event, (share, whole)))
        if len(self._in_flight) > self.depth:
            with self.spans.host("wait", "training for gradients out", chunk.group.name):
                self._in_flight.pop(0)[0].synchronize()

    def _fetch_gradient(self, chunk: Chunk) -> torch.Tensor:
        assert chunk.gradient is not None
        if chunk.resident:
            return chunk.gradient
        # The sum so far comes back over the stream that took it away, so in order.
        with self.device.on("d2h"):
            earlier = chunk.gradient.to(self.device.device, non_blocking=True)
            event = self.device.record("d2h")
        self.device.wait("compute", event)
        event.synchronize()
        return earlier

    def _measure(self, chunk: Chunk, share: torch.Tensor) -> None:
        """Norms on the accelerator, before the gradient leaves it. On one rank, of each parameter,
        so that the global norm is that of `torch.nn.utils.clip_grad_norm_` bit for bit."""
        if self.world == 1:
            views = [share[p.offset : p.offset + p.numel] for p in chunk.group.pieces]
        else:
            views = [share]
        norms = torch._foreach_norm(views, 2, dtype=torch.float32)
        chunk.norms = torch.stack(list(norms))

    def flush(self) -> None:
        """The end of a backward pass: what has come in part is completed with zeros, and what is
        still loaded is freed."""
        self._in_pass = False
        for live in self._live:
            for chunk in live.chunks:
                if chunk.arrived:
                    self._reduce(chunk)
                chunk.touched = False
            for handle in live.handles:
                handle.remove()
            live.handles.clear()
            live.inputs = 0
            live.in_backward = False
        if self._recording:
            self._traces[self._mode] = self._recording
        self._recording = []
        self._mode = True
        self._cursor = len(self._trace)
        self._in_flight = [entry for entry in self._in_flight if not entry[0].query()]
        if self._offload is not None:
            self._offload.clear()
        for live in self._live:
            for chunk in live.chunks:
                self._free(chunk)

    # --- the optimizer ---

    @torch.no_grad()
    def _global_norm(self, chunks: list[Chunk]) -> torch.Tensor:
        norms = {c.index: c.norms for c in chunks if c.norms is not None}
        order = self.store.parameter_order
        if self.world == 1:
            each = [norms[index][place] for index, place in order if index in norms]
            if not each:
                return torch.zeros((), device=self.device.device)
            total: torch.Tensor = torch.linalg.vector_norm(torch.stack(each))
            return total
        square = torch.zeros((), dtype=torch.float64, device=self.device.device)
        for chunk in chunks:
            if chunk.norms is not None:
                square += chunk.norms.double().square().sum()
        return self.ranks.total(square).sqrt().to(torch.float32)

    def step(self) -> None:
        """Update the weights and the learning rate, at the end of an accumulation; before it,
        nothing. Where the gradient is not finite, the step is skipped with a warning."""
        if self.micro_steps % self.accumulation == 0 and self.update() and self.scheduler:
            self.scheduler.step()

    @torch.no_grad()
    def update(self) -> bool:
        """Update the weights from all gradients since the last time; False where it was skipped."""
        self.flush()
        for chunk in self.chunks():
            if (whole := self.store.whole_gradients.pop(chunk.index, None)) is not None:
                self._deliver(chunk, whole)
        chunks = [c for c in self.chunks() if c.group.trainable and c.filled]
        self._norm = norm = self._global_norm(chunks)
        unscale = 1.0 / self.scaler.scale if self.scaler else 1.0
        self._norm = norm * unscale
        with self.spans.host("wait", "training for the backward pass", "norm"):
            finite = bool(torch.isfinite(self._norm))
        if self.scaler is not None:
            self.scaler.update(finite)
        for chunk in chunks:
            chunk.filled = False
            chunk.norms = None
        if not finite:
            self.skipped_steps += 1
            logger.warning(
                "step %d skipped: the gradient is not finite%s",
                self.global_steps + self.skipped_steps,
                f"; loss scale is now {self.scaler.scale:g}" if self.scaler else "",
            )
            return False
        scale = unscale
        if self.clipping > 0:
            coefficient = (self.clipping / (self._norm + 1e-6)).clamp(max=1.0)
            scale = float(coefficient) * unscale
        with self.spans.host("wait", "training for the last update", "drain"):
            self.drain()
        self.global_steps += 1
        jobs = []
        for chunk in chunks:
            chunk.steps += 1
            chunk.stale, chunk.loaded = True, False
            hyper = self._hyper(chunk.group.group)
            if not chunk.resident:
                chunk.updated.clear()
                jobs.append(Update(chunk, hyper, scale))
                continue
            assert chunk.gradient is not None
            noise = Noise(self.seed, chunk.index * self.world + self.rank)
            with self.spans.host("wait", "training for the checkpoint", chunk.group.name):
                chunk.saved.wait()
            with self.spans.device("optimizer", "compute", chunk.group.name):
                update_on_device(
                    self.rule.kind,
                    chunk.states,
                    chunk.gradient,
                    hyper,
                    chunk.steps,
                    scale,
                    noise,
                )
            if self.world == 1:
                chunk.stale, chunk.loaded = False, True
            else:
                self.device.wait("h2d", self.device.record("compute"))
        self._lanes.put(jobs)
        if self.spans.on:
            now = time.perf_counter()
            self.spans.add("step", "steps", f"step {self.global_steps}", self._step_began, now)
            self._step_began = now
        for index in self._trace[: self.depth]:
            for chunk in self._live[index].chunks:
                self._request(chunk)
        return True

    def _hyper(self, group: int) -> dict[str, Any]:
        given = self.param_groups[group]
        return {name: given[name] for name in self.rule.values()}
