"""The engine: a model whose weights, gradients and states live where the plan put them.

# A step
forward: a unit's weights are loaded before it runs and freed after (`loading`). backward: loaded
again; its gradients leave for the host as soon as all are there, the norm of each taken on the way
(`gradients`). The hooks that say when are in `passes`. step: one global norm, then the optimizer:
resident chunks at once on the accelerator, the others by the lanes (`lanes`) in the order of the
next forward pass, which waits for each chunk where it first needs it. Clipping is exact: nothing is
updated before the norm of all gradients is known. With `stale_updates` a pass does not wait: it may
compute with weights that are partly those of the step before.

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

import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map

from evener.base.records import StatsFile
from evener.errors import EvenerError, UsageError
from evener.zero.activations import Offload
from evener.zero.between import Between
from evener.zero.boundary import Boundary
from evener.zero.chunk import Chunk, Run
from evener.zero.device import Device
from evener.zero.gradients import Gradients
from evener.zero.inputs import signature
from evener.zero.lanes import Lanes, Update
from evener.zero.learned import Learned
from evener.zero.loading import Loading
from evener.zero.passes import Passes
from evener.zero.planner import SLOTS, Plan
from evener.zero.profile import Profile, outgoing
from evener.zero.ranks import Ranks
from evener.zero.room import Room
from evener.zero.rules import Rule
from evener.zero.scaler import LossScaler
from evener.zero.spans import Span, Spans
from evener.zero.states import SLICE, Noise, part
from evener.zero.store import Store
from evener.zero.trace import timed_trace
from evener.zero.vocabulary import Head

logger = logging.getLogger("evener.zero")


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
        rule: Rule,
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
        self.rule = rule
        self.device = device
        self.ranks = ranks or Ranks()
        self.rank, self.world = self.ranks.rank, self.ranks.world
        self.accumulation = accumulation
        self.clipping = clipping
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
        self.spans = offload.spans if offload else Spans(device)
        self._norm: torch.Tensor | None = None
        self._stats = StatsFile.open("zero", self.ranks.number)
        self._stats_last = (0, time.monotonic())
        self._step_began = 0.0
        self._closed = False
        self._lanes = Lanes(
            rule,
            device,
            seed=seed,
            ranks=(self.rank, self.world),
            streaming=streaming,
            spans=self.spans,
            ssd=store.ssd,
        )
        self._endured = store.ssd.moved() if store.ssd else (0, 0)
        self._loading = Loading(
            [chunks for _, chunks in store.units],
            device,
            self.ranks,
            self.spans,
            depth=depth,
            stale_updates=stale_updates,
        )
        self._gradients = Gradients(
            store.parameter_order,
            device,
            self.ranks,
            self.spans,
            once=stage == 1 and self.world > 1 and accumulation > 1,
            depth=outgoing(depth, self._largest_gradient()),
            stale_updates=stale_updates,
            apart=frozenset(
                chunk.index for unit, chunks in store.units if unit.repeated for chunk in chunks
            ),
            between=Between(
                self.ranks,
                device,
                linear=rule.name == "sgd",
                scale=lambda: self.scaler.scale if self.scaler else 1.0,
            ),
        )
        trained = [chunk for chunk in self.chunks() if chunk.group.trainable]
        self._gradients.share(trained, gathered=stage == 3)
        self._passes = Passes(
            model,
            store.units,
            self._loading,
            self._gradients,
            self.spans,
            recompute=recompute or set(),
            offload=offload,
            compiler=compiler,
            before=lambda: self.drain() if self._lanes.failed else None,
            head=head,
            early=traced is not None,
        )
        slots = SLOTS * SLICE * store.formats.host_bytes(len(rule.moments)) if streaming else 0
        largest = max(
            (c.states.weights.numel() for c in self.chunks() if c.group.trainable), default=0
        )
        scratch = self.ranks.form.scratch(largest, store.formats.gradient, self.ranks.replicas)
        self.room = Room(
            store,
            rule,
            device,
            self._passes,
            self._loading,
            self._gradients,
            self.drain,
            plan=plan,
            ranks=self.world,
            shared=self.ranks.size > 1,
            fixed=slots + scratch + (plan.gpu_reserve + plan.gpu_held if plan else 0),
            slack=slack,
        )
        """What makes room on the accelerator; `said` tells what it did."""
        self._boundary = Boundary(
            model,
            self._passes,
            device,
            check=self._look,
            room=self.room.make,
            retry=self.ranks.size == 1,
        )
        for chunk in self.chunks():
            for piece in chunk.group.pieces:
                vars(piece.parameter)["wake"] = self._passes.wake
        self._gradients.last = accumulation == 1
        self._head = head
        self._known = {
            id(piece.parameter): chunk.group.trainable
            for chunk in self.chunks()
            for piece in chunk.group.pieces
        }
        self._scaled = False
        """Whether a loss was scaled since the last step."""
        self._chunked = chunked
        self._undo = undo
        self._seen: dict[Any, list[int]] = {}
        self._learned = Learned(plan.step_seconds if plan else 0.0)
        if traced is not None:
            self._largest(*traced)
        held = self.room.held() + sum(b.nbytes for b in model.buffers())
        device.begin(held + (slots if streaming else 0))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass; floating-point inputs are cast to the compute dtype."""
        args, kwargs = self.inputs(args, kwargs)
        return self.module(*args, **kwargs)

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A call's arguments on the accelerator, floating-point ones in the compute dtype."""
        cast = self.store.dtype

        def move(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            value = value.to(self.device.device, non_blocking=True)
            return value.to(cast) if value.is_floating_point() else value

        moved: tuple[Any, Any] = tree_map(move, (args, kwargs))
        return moved

    def _largest_gradient(self) -> int:
        """Bytes, of those that are held while they go to the host or to other ranks."""
        width = self.store.formats.gradient.itemsize
        sizes = [
            chunk.flat.numel() * width
            for chunk in self.chunks()
            if chunk.group.trainable and (self.ranks.size > 1 or not chunk.resident)
        ]
        return max(sizes, default=0)

    def _largest(self, args: Any, kwargs: Any) -> bool:
        """Whether a call is larger than all of its kind before; then it is the one to know."""
        # Floating-point inputs are cast before they are used: an example need not be.
        shapes, spec = signature(args, kwargs, self.store.dtype)
        sizes = [math.prod(s[0]) for s in shapes if isinstance(s, tuple)]
        kind = spec, tuple((len(s[0]), s[1]) if isinstance(s, tuple) else s for s in shapes)
        before = self._seen.get(kind)
        # A little longer is not worth a trace: where it is too much, the pass runs again.
        if before is not None and all(
            new <= 1.02 * old for new, old in zip(sizes, before, strict=True)
        ):
            return False
        self._seen[kind] = [max(p) for p in zip(sizes, before or sizes, strict=True)]
        return True

    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a pass: make the room that it will take."""
        if not torch.is_grad_enabled() or not self._largest(args, kwargs):
            return
        if self.plan is None and self.device.peak_bytes() == 0:
            return  # nothing was planned, and nothing is limited
        with self.device.elsewhere(), self._passes.away():
            profile, said = timed_trace(
                self.module,
                [unit for unit, _ in self.store.units],
                args,
                kwargs,
                device=self.device.device,
                dtype=self.store.dtype,
                chunked=self._chunked,
                head=self._head,
            )
        logger.info("new inputs: %s", said)
        if profile is None:
            return
        self._keep(profile)
        if self.plan is not None and self.world == 1:
            self.room.fit(profile, self.plan.budget.gpu)

    def _keep(self, profile: Profile) -> None:
        """Weights that are read while their unit does not run stay from now on."""
        for unit, chunks in self.store.units:
            for chunk in chunks:
                if unit.module is not None and any(
                    piece.name in profile.strays for piece in chunk.group.pieces
                ):
                    self._loading.keep(chunk)

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
        self._scaled = True
        factor = self.scaler.scale if self.scaler else 1.0
        if factor == 1.0 and self.accumulation == 1:
            return loss
        return loss * (factor / self.accumulation)

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """The backward pass of one micro-batch."""
        self._gradients.last = (self.micro_steps + 1) % self.accumulation == 0
        self.scale(loss).backward()
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
        return self._gradients.norm(chunks) / (self.scaler.scale if self.scaler else 1.0)

    def get_global_grad_norm(self) -> float | None:
        """The norm of all gradients in the last step, before clipping."""
        return None if self._norm is None else float(self._norm)

    def zero_grad(self) -> None:
        """Forget gradients that no step has used. A forward pass whose backward pass is still to
        come stays as it is: many loops call this between the two."""
        for chunk in self.chunks():
            chunk.filled = chunk.touched = chunk.crossed = False
            chunk.norms = None
            chunk.given.clear()
            chunk.arrived.clear()
        self._gradients.clear()

    def chunks(self) -> Iterator[Chunk]:
        """All chunks in the order of the model."""
        for _, chunks in self.store.units:
            yield from chunks

    def drain(self) -> None:
        """Wait until every optimizer step that was begun is done. Raises what failed in one."""
        failed = self._lanes.wait()
        if isinstance(failed, EvenerError):
            raise failed
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
        self._boundary.close()
        self._passes.close()
        if self._head is not None:
            self._head.close()
        self._undo()
        self._loading.close()
        self._lanes.close()
        self.device.unlimit()
        if self._stats:
            self._stats.close()

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

    def step(self) -> None:
        """Update the weights and the learning rate, at the end of an accumulation; before it,
        nothing. Where the gradient is not finite, the step is skipped with a warning."""
        if self.micro_steps % self.accumulation == 0 and self.update() and self.scheduler:
            self.scheduler.step()

    def update(self) -> bool:
        """Update the weights from all gradients since the last time; False where it was skipped."""
        self.flush()
        self._refuse_strangers()
        self._gradients.finish()
        self._gradients.last = self.accumulation == 1
        chunks = [c for c in self.chunks() if c.group.trainable and c.filled]
        self._gradients.cross(chunks)
        scale = self._scale(self._gradients.norm(chunks))
        moving = self._moving(chunks)
        for chunk in chunks:
            chunk.filled = False
            chunk.norms = None
            chunk.given.clear()
        if scale is None:
            return False
        with self.spans.host("wait", "training for the last update", "drain"):
            self.drain()
        self._endurance()
        self.global_steps += 1
        jobs = []
        for chunk, places in zip(chunks, moving, strict=True):
            if not places:
                continue  # no rank had a gradient of it
            runs = chunk.begin_step(places, self.rank)
            chunk.stale, chunk.loaded = True, False
            hyper = self._hyper(chunk.group.group)
            if chunk.resident:
                self._update_resident(chunk, hyper, scale, runs)
            else:
                chunk.updated.clear()
                jobs.append(Update(chunk, hyper, scale, runs))
            if not chunk.loaded:
                chunk.guard()
        self._lanes.put(jobs)
        if self.spans.on:
            now = time.perf_counter()
            self.spans.add("step", "steps", f"step {self.global_steps}", self._step_began, now)
            self._step_began = now
        self._loading.ahead()
        self._learn()
        if self._stats and self._stats.due:
            self._write_stats(self._stats)
        return True

    def _refuse_strangers(self) -> None:
        """Raise where something would be left out of this step, or divided by a scale in vain."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad and not self._known.get(id(parameter), False):
                raise UsageError(
                    f"parameter {name} came, or was unfrozen, after initialize: the engine does "
                    "not train it",
                    "zero.give_back(engine), change the model, and initialize again",
                )
        scaled, self._scaled = self._scaled, False
        if self.scaler is not None and not scaled and any(c.filled for c in self.chunks()):
            raise UsageError(
                "the loss was not scaled, and fp16 divides its gradients by the loss scale",
                "call engine.backward(loss), or engine.scale(loss).backward()",
            )

    def _endurance(self) -> None:
        """What the step before has moved to and from the SSD; said once."""
        if self.store.ssd is None:
            return
        now = self.store.ssd.moved()
        moved = now[0] - self._endured[0], now[1] - self._endured[1]
        self._endured = now
        if self.global_steps == 1:
            logger.info(
                "SSD: %.2f GB read and %.2f GB written per step",
                moved[0] / 1e9,
                moved[1] / 1e9,
            )

    def _learn(self) -> None:
        """In the first steps: does the plan hold?"""
        if self._learned.over:
            return
        searched = self.device.searched()
        if self._learned.step(searched) and self.plan is not None and self.world == 1:
            self.room.loosen(self.plan.budget.gpu // 50)

    @property
    def expected_seconds(self) -> float:
        """Expected time of a step: as planned, or, after the first steps, what they took."""
        return self._learned.seconds

    def _write_stats(self, file: StatsFile) -> None:
        """docs/reference/records.md."""
        before, then = self._stats_last
        now = time.monotonic()
        self._stats_last = (self.global_steps, now)
        total, used, peak = self.store.host.usage()
        budget = self.plan.budget if self.plan else None
        file.write(
            {
                "steps": self.global_steps,
                "skipped": self.skipped_steps,
                "step_ms": 1e3 * (now - then) / (self.global_steps - before),
                "tiers": [
                    {
                        "name": "gpu",
                        "bytes": budget.gpu if budget else None,
                        "used": None,
                        "peak": self.device.peak_bytes(),
                    },
                    {"name": "host", "bytes": total, "used": used, "peak": peak},
                    *self._ssd_tier(),
                ],
                "updated": self.updated,
            }
        )

    def _ssd_tier(self) -> list[dict[str, Any]]:
        file = self.store.ssd
        if file is None:
            return []
        read, written = file.moved()
        return [
            {
                "name": "ssd",
                "bytes": file.size,
                "used": file.size,
                "peak": file.size,
                "read": read,
                "written": written,
            }
        ]

    def _scale(self, norm: torch.Tensor) -> float | None:
        """What gradients are multiplied by: unscaled and clipped. None: the step is skipped."""
        unscale = 1.0 / self.scaler.scale if self.scaler else 1.0
        self._norm = norm * unscale
        with self.spans.host("wait", "training for the backward pass", "norm"):
            finite = bool(torch.isfinite(self._norm))
        if self.scaler is not None:
            self.scaler.update(finite)
        if not finite:
            self.skipped_steps += 1
            logger.warning(
                "step %d skipped: the gradient is not finite%s",
                self.global_steps + self.skipped_steps,
                f"; loss scale is now {self.scaler.scale:g}" if self.scaler else "",
            )
            return None
        if self.clipping <= 0:
            return unscale
        return float((self.clipping / (self._norm + 1e-6)).clamp(max=1.0)) * unscale

    def _moving(self, chunks: list[Chunk]) -> list[set[int]]:
        """The places of the parameters that had a gradient on any rank. Collective."""
        if self.ranks.size == 1:
            return [set(chunk.given) for chunk in chunks]
        places = [(c, p) for c, chunk in enumerate(chunks) for p in range(len(chunk.group.pieces))]
        mine = [place in chunks[c].given for c, place in places]
        given = self.ranks.any(torch.tensor(mine, dtype=torch.uint8, device=self.device.device))
        found: list[set[int]] = [set() for _ in chunks]
        for (c, place), moves in zip(places, given.tolist(), strict=True):
            if moves:
                found[c].add(place)
        return found

    @torch.no_grad()
    def _update_resident(
        self, chunk: Chunk, hyper: dict[str, Any], scale: float, runs: list[Run]
    ) -> None:
        assert chunk.gradient is not None
        stream = chunk.index * self.world + self.rank
        with self.spans.host("wait", "training for the checkpoint", chunk.group.name):
            chunk.saved.wait()
        with self.spans.device("optimizer", "compute", chunk.group.name):
            for run in runs:
                self.rule.on_device(
                    part(chunk.states, run.begin, run.end),
                    chunk.gradient[run.begin : run.end],
                    hyper,
                    run.step,
                    scale,
                    Noise(self.seed, stream, run.begin),
                )
        if self.world == 1:
            chunk.stale, chunk.loaded = False, True
        else:
            self.device.wait("h2d", self.device.record("compute"))

    def _hyper(self, group: int) -> dict[str, Any]:
        given = self.param_groups[group]
        return {name: given[name] for name in self.rule.values}
