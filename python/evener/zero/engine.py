"""The engine: a model whose weights, gradients and states live where the plan put them.

# A step
forward: a unit's weights are loaded before it runs and freed after (`loading`). backward: loaded
again; its gradients leave for the host as soon as all are there, the norm of each taken on the way
(`gradients`). The hooks that say when are in `passes`. step: one global norm, then the optimizer:
resident chunks at once on the accelerator, the others by the lanes (`lanes`) in the order of the
next forward pass, which waits for each chunk where it first needs it. Clipping is exact: nothing is
updated before the norm of all gradients is known. With `stale_updates` a pass does not wait: it may
compute with weights that are partly those of the step before. With the optimizer in the backward
pass (`in_backward`) each chunk is updated when its gradient is whole, and a step only ends.

# Who may touch what
The training thread owns chunks and parameters. The loader thread fills a chunk between a request
and `ready`; the lanes write a chunk's host states between `updated.clear()` and `updated.set()`
(and `updated_event`); the loader waits for both first. A chunk's gradient on the host is written by
a copy that `gradient_event` ends, and read by the lanes after it.

# Memory
A call whose inputs are larger than any before, or others, is traced first (`trace`), and room is
made where the forecast is over the budget (`room`). Where an allocation fails all the same, room is
made and the pass runs again (`boundary`).

# Ranks
Every rank holds 1/N of each chunk's states. stage 1: gradients are reduced once a step; stage 2:
reduced to the rank's share in every backward pass; stage 3: weights are shared out too, and
gathered when a unit is loaded. All ranks must run the same units in the same order. Where nodes
have copies of the states, gradients cross between them once per step (`ranks`, `gradients`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from evener.errors import EvenerError, UsageError
from evener.zero import inputs
from evener.zero.account import Account
from evener.zero.activations import Offload
from evener.zero.between import Between
from evener.zero.boundary import Boundary
from evener.zero.chunk import Chunk
from evener.zero.device import Device
from evener.zero.foresight import Foresight
from evener.zero.gradients import Gradients
from evener.zero.in_backward import Buffers, InBackward, refuse_clipping
from evener.zero.lanes import Lanes
from evener.zero.loading import Loading
from evener.zero.out_of_memory import account, explained
from evener.zero.passes import Passes
from evener.zero.planner import Plan
from evener.zero.profile import outgoing
from evener.zero.ranks import Ranks
from evener.zero.room import Room
from evener.zero.scaler import LossScaler
from evener.zero.scaling import Scaling
from evener.zero.slots import at_once, slot_bytes
from evener.zero.spans import Span, Spans
from evener.zero.store import Store
from evener.zero.updates import Updates
from evener.zero.vocabulary import Head


class Saving(Protocol):
    """A checkpoint on its way."""

    def wait(self) -> None:
        """Until it is written, or has failed."""


class Engine:
    """Made by `evener.zero.initialize`. Call it as the model."""

    def __init__(
        self,
        model: nn.Module,
        store: Store,
        device: Device,
        *,
        accumulation: int = 1,
        clipping: float = 0.0,
        recompute: set[int] | None = None,
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
        head: Head | None = None,
        chunked: bool = False,
        slack: float = 0.0,
        traced: tuple[Any, Any] | None = None,
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        self.module = model
        self.store = store
        self.device = device
        self.ranks = ranks or Ranks()
        self.accumulation = accumulation
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
        self.spans = offload.spans if offload else Spans(device)
        self._scaling = Scaling(accumulation, clipping, scaler)
        self._account = Account(store, device, self.spans, plan, self.ranks.number)
        carried = [
            (at_once(c.group.matrices, c.states.weights.numel(), self.world), c.group)
            for c in self.chunks()
            if c.group.trainable
        ]
        streams = [(most, len(group.rule.moments)) for most, group in carried if most or streaming]
        self._lanes = Lanes(
            device,
            seed=seed,
            ranks=self.ranks,
            streaming=streaming,
            largest=max((most for most, _ in carried), default=0),
            spans=self.spans,
            ssd=store.ssd,
        )
        self._updates = Updates(device, self.ranks, self._lanes, self.spans, seed)
        self._early = (
            InBackward(
                device,
                self._updates,
                self._lanes,
                self.spans,
                Buffers(store.buffers),
                groups=lambda: self.param_groups,
                settle=self.settle,
            )
            if store.formats.pool
            else None
        )
        self._loading = Loading(
            [chunks for _, chunks in store.units],
            device,
            self.ranks,
            self.spans,
            depth=depth,
            stale_updates=stale_updates,
            late=self._early.refuse_late if self._early else lambda _: None,
        )
        self._gradients = self._make_gradients(depth, stage)
        self.came: Callable[[], int] = lambda: self._gradients.came
        """How many chunks' gradients were complete until now."""
        self._passes = Passes(
            model,
            store.units,
            self._loading,
            self._gradients,
            self.spans,
            recompute=recompute or set(),
            offload=offload,
            compiler=compiler,
            before=self._before,
            head=head,
            early=traced is not None,
        )
        slots = slot_bytes(streams, store.formats)
        self._fixed = slots + self._crossing_bytes()
        self.room = Room(
            store,
            device,
            self._passes,
            self._loading,
            self._gradients,
            self.settle,
            plan=plan,
            ranks=self.world,
            shared=self.ranks.size > 1,
            fixed=self._fixed + (plan.gpu_reserve + plan.gpu_held if plan else 0),
            slack=slack,
            buffers=self._early.buffers if self._early else None,
        )
        """What makes room on the accelerator; `said` tells what it did."""
        foresight = Foresight(
            model,
            store,
            device,
            self._passes,
            self._loading,
            self.room,
            plan,
            head=head,
            chunked=chunked,
            alone=self.world == 1,
        )
        self._boundary = Boundary(
            model,
            self._passes,
            device,
            check=foresight.look,
            room=self.room.make,
            retry=self.ranks.size == 1,
            account=self._account_of if plan else None,
        )
        for chunk in self.chunks():
            for piece in chunk.group.pieces:
                vars(piece.parameter)["wake"] = self._passes.wake
        self._gradients.last = accumulation == 1
        self._known = {
            id(piece.parameter): chunk.group.trainable
            for chunk in self.chunks()
            for piece in chunk.group.pieces
        }
        self._undo: list[Callable[[], None]] | None = [*([head.close] if head else []), undo]
        if traced is not None:
            foresight.largest(*traced)
        held = self.room.held() + sum(b.nbytes for b in model.buffers())
        device.begin(held + slots)

    def _make_gradients(self, depth: int, stage: int) -> Gradients:
        """What takes gradients to where their states are, and shares them between ranks."""
        units = self.store.units
        made = Gradients(
            self.store.parameter_order,
            self.device,
            self.ranks,
            self.spans,
            once=stage == 1 and self.world > 1 and self.accumulation > 1,
            depth=outgoing(depth, self._largest_gradient()),
            stale_updates=self.stale_updates,
            dtype=self.store.formats.gradient,
            early=self._early,
            shared=frozenset(c.index for unit, mine in units if unit.module is None for c in mine),
            apart=frozenset(
                chunk.index for unit, chunks in units if unit.repeated for chunk in chunks
            ),
            between=Between(
                self.ranks,
                self.device,
                linear=all(c.group.rule.name == "sgd" for c in self.chunks() if c.group.trainable),
                scale=lambda: self._scaling.scale,
            ),
            gathered=lambda: self._loading.order if self.world > 1 else 0,
        )
        trained = [chunk for chunk in self.chunks() if chunk.group.trainable]
        made.share(trained, gathered=stage == 3)
        return made

    def _account_of(self, wanted: int) -> tuple[str, str]:
        """Who has the accelerator's memory, between two passes."""
        assert self.plan is not None
        own = self._fixed + self.room.held() + sum(b.nbytes for b in self.module.buffers())
        return account(self.plan, self.device, wanted, own)

    def explained(self) -> contextlib.AbstractContextManager[None]:
        """Inside, torch's error for want of GPU memory says what the budget is, who has it and what
        to do. The engine's own calls do it by themselves; around what else a step computes, such as
        a second model, write `with engine.explained():`."""
        return explained(self.plan, self.device)

    def _before(self) -> None:
        """Before a forward pass."""
        if self._early is not None:
            self._early.refuse_open("a forward pass")
        if self._lanes.failed:
            self.settle()

    def _crossing_bytes(self) -> int:
        """Bytes on the accelerator for gradients that cross between nodes."""
        sizes = (c.states.weights.numel() for c in self.chunks() if c.group.trainable)
        form, gradient = self.ranks.form, self.store.formats.gradient
        return form.scratch(max(sizes, default=0), gradient, self.ranks.replicas)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass; floating-point inputs are cast to the compute dtype."""
        with self.explained():
            args, kwargs = self.inputs(args, kwargs)
            return self.module(*args, **kwargs)

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A call's arguments on the accelerator, floating-point ones in the compute dtype. Raises
        UsageError for whole numbers that it cannot hold: 999 would be 1000 in bf16."""
        return inputs.moved(args, kwargs, self.device.device, self.store.dtype)

    def _largest_gradient(self) -> int:
        """Bytes, of those that are held while they go to the host or to other ranks."""
        width = self.store.formats.gradient.itemsize
        sizes = [
            chunk.flat.numel() * width
            for chunk in self.chunks()
            if chunk.group.trainable and (self.ranks.size > 1 or not chunk.resident)
        ]
        return max(sizes, default=0)

    def memory(self) -> dict[str, int]:
        """Bytes: what the plan expected of accelerator, host and SSD, the accelerator's peak as its
        allocator holds it, with what the context takes, and what was read and written on the SSD
        and given to other nodes' copies of the states since the start."""
        plan = self.plan
        reserve = plan.gpu_reserve if plan else 0
        read, written = self.store.ssd.moved() if self.store.ssd else (0, 0)
        return {
            "ssd planned": plan.ssd_bytes if plan else 0,
            "ssd read": read,
            "ssd written": written,
            "gpu planned": plan.gpu_bytes if plan else 0,
            "host planned": plan.host_bytes if plan else 0,
            "gpu peak": self.device.peak_bytes() + reserve,
            "passes run again": self._boundary.again,
            "gradients between nodes": self._gradients.between.bytes,
        }

    def fallen_back(self) -> dict[str, str]:
        """Chunks whose gradients cross between nodes in a milder form than was asked for, as the
        guard has seen too much lost: the form by the chunk's name."""
        between, asked = self._gradients.between, self.ranks.form
        chunks = {c.group.name: between.form(c).name for c in self.chunks() if c.owed is not None}
        return {name: form for name, form in chunks.items() if form != asked.name}

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
        return self._scaling.loss(loss)

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """The backward pass of one micro-batch."""
        self._gradients.last = (self.micro_steps + 1) % self.accumulation == 0
        try:
            with self.explained():
                self.scale(loss).backward()
        except RuntimeError as error:
            if "through the graph a second time" not in str(error):
                raise
            raise UsageError(
                "the loss was used before, or computes with what the model's forward has kept "
                "somewhere else than in its outputs and its modules' attributes",
                "return it from forward, or keep it as an attribute of a module",
            ) from error
        self._gradients.last = self.accumulation == 1
        self.flush()
        self.micro_steps += 1
        return loss

    def flush(self) -> None:
        """The end of a backward pass, for a loop that does not call `backward` of the engine: what
        has come in part is completed with zeros, and what is still loaded is freed."""
        self._passes.end()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step` updates the weights."""
        return self.micro_steps % self.accumulation == 0 and self.micro_steps > 0

    def norm(self) -> torch.Tensor:
        """The norm of the gradients that the next step will use: a float32 scalar."""
        self.flush()
        self._gradients.finish()
        chunks = [c for c in self.chunks() if c.group.trainable and c.filled]
        self._gradients.cross(chunks, done=False)
        return self._gradients.norm(chunks) / self._scaling.scale

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients in the last step, before clipping."""
        norm = self._scaling.norm
        return None if norm is None else float(norm)

    def zero_grad(self, groups: Container[int] | None = None) -> None:
        """Forget gradients that no step has used (of `groups`, else all). A forward pass whose
        backward pass is still to come stays as it is: many loops call this between the two."""
        if self._early is not None:
            self._early.refuse_open("zero_grad()")
            self._early.clear()
        for chunk in self.chunks():
            if groups is not None and chunk.group.group not in groups:
                continue
            chunk.filled = chunk.touched = chunk.crossed = False
            chunk.norms = None
            chunk.given.clear()
            chunk.arrived.clear()
        self._gradients.clear(groups)

    def chunks(self) -> Iterator[Chunk]:
        """All chunks in the order of the model."""
        for _, chunks in self.store.units:
            yield from chunks

    def drain(self) -> None:
        """Wait until every optimizer step that was begun is done. Raises what failed in one, and
        UsageError where the backward pass has updated weights and no step has ended it."""
        if self._early is not None:
            if self._gradients.open:  # not between a forward pass and its backward pass
                self.flush()
            self._early.refuse_open("reading or saving states")
        self.settle()

    def settle(self) -> None:
        """Wait until every update that was begun is done, also within a step. Raises what failed in
        one."""
        failed = self._lanes.wait()
        if isinstance(failed, EvenerError):
            raise failed
        if failed is not None:
            raise EvenerError(
                f"an optimizer step on the host failed: {failed}", "see the cause above"
            ) from failed

    def close(self) -> None:
        """Stop the threads and unhook the model; the weights stay where they are."""
        if self._undo is None:
            return
        undo, self._undo = self._undo, None
        if self.saving is not None:
            self.saving.wait()
        self.settle()
        self._boundary.close()
        self._passes.close()
        for each in undo:
            each()
        self._loading.close()
        self._lanes.close()
        self.device.unlimit()
        self._account.close()

    @property
    def rank(self) -> int:
        """This rank's number among those that share a copy of the states."""
        return self.ranks.rank

    @property
    def world(self) -> int:
        """How many ranks share a copy of the states."""
        return self.ranks.world

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scale of fp16."""
        return self._scaling.scaler

    @property
    def clipping(self) -> float:
        """The largest norm of all gradients; 0: they are not clipped."""
        return self._scaling.clipping

    @clipping.setter
    def clipping(self, norm: float) -> None:
        if norm > 0 and self._early is not None:
            refuse_clipping(norm)
        self._scaling.clipping = norm

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
        self._account.begin()

    def recorded(self) -> list[Span]:
        """The spans since `record`, for `evener.zero.report`; recording stops. The optimizer of
        the last step goes on and is not in them."""
        return self.spans.stop()

    def step(self) -> None:
        """Update the weights and the learning rate, at the end of an accumulation; before it,
        nothing. Where the gradient is not finite, the step is skipped with a warning."""
        with self.explained():
            if self.micro_steps % self.accumulation == 0 and self.update() and self.scheduler:
                self.scheduler.step()

    def update(self, groups: list[dict[str, Any]] | None = None) -> bool:
        """Update the weights from all gradients since the last time; False where it was skipped.
        `groups`: with this step's hyperparameters, where they are not those of now."""
        self.flush()
        self._refuse_strangers()
        self._scaling.refuse_unscaled(any(c.filled for c in self.chunks()))
        self._gradients.finish()
        self._gradients.last = self.accumulation == 1
        chunks = [c for c in self.chunks() if c.group.trainable and c.filled]
        self._gradients.cross(chunks)
        step = self.global_steps + self.skipped_steps + 1
        scale = self._scaling.factor(self._gradients.norm(chunks), self.spans, step)
        moving = self._updates.moving(chunks)
        for chunk in chunks:
            chunk.filled = False
            chunk.norms = None
            chunk.given.clear()
        if self._early is not None:
            self._early.step(groups or self.param_groups, scale is not None)
        if scale is None:
            self.skipped_steps += 1
            return False
        if self._early is None:
            with self.spans.host("wait", "training for the last update", "drain"):
                self.settle()
        self.global_steps += 1
        self._account.endured(first=self.global_steps == 1)
        if self._early is None:
            self._updates.begin(chunks, moving, groups or self.param_groups, scale)
        self._account.span(self.global_steps)
        self._loading.ahead()
        if self._account.searches() and self.plan is not None and self.world == 1:
            self.room.loosen(self.plan.budget.gpu // 50)
        self._account.write(self.global_steps, self.skipped_steps, self.updated)
        return True

    def reloaded(self) -> None:
        """All weights and states were loaded: what a failed step has left is gone."""
        if self._early is not None:
            self._early.clear()

    def _refuse_strangers(self) -> None:
        """Raise where something would be left out of this step."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and not self._known.get(id(parameter), False):
                raise UsageError(
                    f"parameter {name} came, or was unfrozen, after initialize: the engine does "
                    "not train it",
                    "zero.give_back(engine), change the model, and initialize again",
                )

    @property
    def expected_seconds(self) -> float:
        """Expected time of a step: as planned, or, after the first steps, what they took."""
        return self._account.learned.seconds
