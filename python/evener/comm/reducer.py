"""Gradients in, averages out: the one interface on which the front doors stand.

    submit(bucket)   its gradients are complete: pack them and issue the collectives
    flush()          submit what is missing (zeros where no gradient came)
    apply()          wait, and leave the results as `p.grad`, views of the buckets

Autograd hooks count a bucket's gradients; the bucket is submitted by the hook of its last one, from
autograd's own thread, **in the order of bucket indices**: a bucket that is complete early waits for
those before it. Ranks may produce gradients in different orders, yet every communicator sees the
same sequence on all of them. A front door decides when to flush and apply: at the end of backward
(`evener.ddp`) or in the optimizer's step (Horovod).

The first step measures: the order in which rank 0 produced gradients becomes the order of the
buckets from then on, and top-k sends dense, so that no residual depends on a layout that was a
guess.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import get_args

import torch
import torch.distributed as dist
from torch.autograd import Variable

from evener.comm import buckets as layout
from evener.comm.agree import require_agreement
from evener.comm.buckets import Bucket, Buckets
from evener.comm.errors import CommError
from evener.comm.groups import Communicators, Route
from evener.comm.lanes import Lanes, Stage, StreamLanes, ThreadLanes, Ticket
from evener.comm.options import Options
from evener.comm.options import Wire as WireName
from evener.comm.profile import Recorder
from evener.comm.wires import CastWire, ExactWire, TopKWire, Wire, choose
from evener.errors import UsageError

logger = logging.getLogger("evener.comm")

_CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Reducer:
    """Reduces the gradients of `parameters` over all ranks of `group`.

    Attributes for front doors: `active` (False: hooks do nothing, gradients accumulate locally, as
    under `no_sync`), `passes` (backward passes whose gradients are summed before a submission) and
    `on_backward_end` (called by autograd when a backward that brought gradients has ended).
    A sparse gradient is refused, unless the door makes it dense (`densifies`; `densified` says
    which were) or reduces it itself (`on_sparse(index)`, when it came; `sparse` says which did).
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        options: Options,
        group: dist.ProcessGroup | None = None,
        *,
        track_unused: bool = False,
    ) -> None:
        """Collective over `group` (default: all ranks).

        `track_unused`: a parameter that no rank used in a step keeps its `p.grad` as it was (None,
        after `zero_grad()`); without it such a parameter gets zeros.

        Raises UsageError for what cannot be reduced, CommError where ranks are missing or disagree.
        """
        named = [(name, p) for name, p in named_parameters if p.requires_grad]
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.device = _device(named)
        self.options = options
        self.active = True
        self.passes = 1
        self.on_backward_end: Callable[[], None] | None = None
        self.on_sparse: Callable[[int], None] | None = None
        self.densifies = False
        # Parameters whose gradients are sparse, or were; and whether this step's came as such.
        self.sparse: set[int] = set()
        self.densified: set[int] = set()
        self.track_unused = track_unused
        self.recorder: Recorder | None = None
        self.communicators = Communicators(options, self.device, group)
        require_agreement(self.communicators, self.names, self.parameters, options)
        self._lanes: Lanes = (
            StreamLanes(self.device) if self.device.type == "cuda" else ThreadLanes()
        )
        self._measuring = True
        self._failed = False
        self._choices: tuple[tuple[str, str], ...] | None = None
        self._made: dict[tuple[int, str], Wire] = {}
        self._lay_out(range(len(self.parameters) - 1, -1, -1))
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._arrived, index))
            for index, p in enumerate(self.parameters)
        ]
        if self.communicators.rank == 0:
            logger.info("%s", self.describe())

    # --- layout ---

    def _lay_out(self, order: Iterable[int]) -> None:
        size = len(self.communicators.route.levels.inner)
        self.buckets = Buckets(self.parameters, list(order), self.options.bucket_bytes, size)
        self._routes = [self._route_of(bucket) for bucket in self.buckets]
        self._made.clear()
        self._wires = self._make_wires()
        self.sequence = tuple(range(len(self.buckets)))
        self._reset()

    def resequence(self, sequence: Sequence[int]) -> None:
        """Issue the buckets in this order from the next step on. The same on every rank."""
        if sorted(sequence) != list(range(len(self.buckets))):
            raise ValueError(f"{list(sequence)} is not an order of {len(self.buckets)} buckets")
        self.sequence = tuple(sequence)

    def adopt(self, choices: Sequence[tuple[str, str]], sequence: Sequence[int]) -> None:
        """A planner's decision, from the next step on: (algorithm, form) of each bucket, and order.

        Between steps only, and the same on every rank. "flat" or "2d"; a form of `forms`.
        """
        self._choices = tuple(choices)
        self._routes = [self._route_of(bucket) for bucket in self.buckets]
        self._wires = self._make_wires()
        self.resequence(sequence)

    def forms(self) -> tuple[str, ...]:
        """The names that `make_wire` knows."""
        return get_args(WireName)

    def _route_of(self, bucket: Bucket) -> Route:
        if self._choices is not None and self._choices[bucket.index][0] == "flat":
            return self.communicators.flat()
        if bucket.bytes > self.options.two_level_max_bytes:
            return self.communicators.flat()
        return self.communicators.route

    def _make_wires(self) -> list[Wire]:
        """One wire a bucket; buckets of one route and form share it, and so its scratch memory."""
        made = self._made
        wires = []
        for bucket, route in zip(self.buckets, self._routes, strict=True):
            form = self._form(bucket, route)
            if form == "topk" and self._measuring:
                form = "exact"
            if bucket.buffer.dtype == _CASTS.get(form):
                form = "exact"
            key = (id(route), form)
            if key not in made:
                made[key] = self.make_wire(form, route)
            wires.append(made[key])
        return wires

    def _form(self, bucket: Bucket, route: Route) -> str:
        if self._choices is not None and route.levels.nodes > 1:
            return self._choices[bucket.index][1]
        return choose(self.options, route, bucket)

    def make_wire(self, form: str, route: Route) -> Wire:
        """A new wire of that form for buckets that take `route`."""
        if form == "topk":
            return TopKWire(route, self.options.ratio, self.options.topk_fp16)
        if form in _CASTS:
            return CastWire(route, _CASTS[form])
        return ExactWire(route)

    def _reset(self) -> None:
        """Forget the step: every gradient is still to come."""
        self._passes_left = [self.passes] * len(self.parameters)
        self._missing = [len(bucket.slots) for bucket in self.buckets]
        self._here = [False] * len(self.parameters)
        self._order: list[int] = []
        self._next = 0
        self._tickets: dict[int, Ticket] = {}
        self._callback_queued = False

    def set_passes(self, passes: int) -> None:
        """From now on a gradient is complete after `passes` backward passes. Between steps only."""
        self.passes = passes
        self._reset()

    @property
    def pending(self) -> bool:
        """Whether gradients came, or were submitted, that were not applied yet."""
        return bool(self._tickets) or any(left < self.passes for left in self._passes_left)

    # --- gradients arrive ---

    def _arrived(self, index: int, parameter: torch.Tensor) -> None:
        if not self.active:
            return
        sparse = parameter.grad is not None and parameter.grad.layout != torch.strided
        if sparse and self.densifies:
            assert parameter.grad is not None
            parameter.grad = parameter.grad.to_dense()
            self.densified.add(index)
            sparse = False
        if sparse and self.on_sparse is None:
            raise UsageError(
                f"the gradient of {self.names[index]} is sparse",
                "use a dense one (sparse=False), or hvd.DistributedOptimizer, which reduces those",
            )
        if self.on_backward_end is not None and not self._callback_queued:
            self._callback_queued = True
            Variable._execution_engine.queue_callback(self.on_backward_end)
        self._passes_left[index] -= 1
        if self._passes_left[index] > 0:
            return
        if self._here[index]:
            raise CommError(
                f"the gradient of {self.names[index]} came again before it was applied",
                "step once a backward, or say how many passes are accumulated "
                "(no_sync(), backward_passes_per_step)",
            )
        self._here[index] = True
        bucket = self.buckets.bucket_of[index]
        if sparse:
            assert self.on_sparse is not None
            self.sparse.add(index)
            self.on_sparse(index)
            if bucket < 0:
                return
        elif index in self.sparse:
            raise CommError(
                f"the gradient of {self.names[index]} is dense, and was sparse before",
                "make it sparse in every step or in none; sparse_as_dense=True makes it dense",
            )
        else:
            self._order.append(index)
        self._missing[bucket] -= 1
        if self.recorder is not None and not self._missing[bucket]:
            self.recorder.complete(bucket)
        self._issue_complete()

    def _issue_complete(self) -> None:
        while self._next < len(self.sequence) and not self._missing[self.sequence[self._next]]:
            self.submit(self.sequence[self._next])

    def submit(self, index: int) -> None:
        """Issue the next bucket; `index` must be its number, so that the order is explicit."""
        if index != self.sequence[self._next]:
            raise ValueError(
                f"bucket {index} is out of order: bucket {self.sequence[self._next]} comes next"
            )
        bucket, route = self.buckets[index], self._routes[index]
        self._pack(bucket, route)
        name = f"bucket {index} ({self.names[bucket.slots[0].index]} ...)"
        stages = self._stages(bucket, route)
        if self.recorder is not None:
            stages = self.recorder.submitted(index, stages)
        self._tickets[index] = self._lanes.issue(name, stages)
        self._next += 1

    def _pack(self, bucket: Bucket, route: Route) -> None:
        views, gradients = [], []
        for slot in bucket.slots:
            view, gradient = self.buckets.views[slot.index], self.parameters[slot.index].grad
            if gradient is None or slot.index in self.sparse:
                view.zero_()
                continue
            views.append(view)
            gradients.append(gradient)
        with torch.no_grad():
            layout.pack(views, gradients, route.scaling.pack)
        for slot in bucket.slots:
            parameter = self.parameters[slot.index]
            if parameter.grad is not None and slot.index not in self.sparse:
                parameter.grad = self.buckets.views[slot.index]

    def _stages(self, bucket: Bucket, route: Route) -> tuple[Stage | None, Stage, Stage | None]:
        wire, scaling = self._wires[bucket.index], route.scaling
        whole = bucket.buffer
        length = whole.numel() // route.shards
        scatter, gather = route.scatter, route.gather
        place = 0 if scatter is None else scatter.rank
        shard = whole[place * length : (place + 1) * length]

        def exchange() -> None:
            if route.outer.size > 1:
                wire.exchange(bucket, shard)
            if scaling.final != 1.0:
                shard.mul_(scaling.final)

        if scatter is None or gather is None:
            return None, exchange, None
        return (
            lambda: dist.reduce_scatter_tensor(shard, whole, scaling.op, group=scatter.handle),
            exchange,
            lambda: dist.all_gather_into_tensor(whole, shard, group=gather.handle),
        )

    # --- the end of a step ---

    def flush(self) -> None:
        """Submit every bucket that is still open. What has no gradient counts as zeros."""
        while self._next < len(self.sequence):
            self.submit(self.sequence[self._next])

    def apply(self) -> None:
        """Wait for all buckets; `p.grad` of every parameter is then the reduced gradient.

        On a GPU the current stream waits, not the host. Raises what a collective raised.
        """
        unused = self._unused() if self.track_unused else frozenset()
        for index in list(self._tickets):
            self.wait(index)
        self._adopt(unused)
        self.end_step()

    def defer(self) -> None:
        """In place of `apply`: results stay on their way, `p.grad` is where they will land.

        Then `wait` for each bucket, and `end_step` once all have been waited for.
        """
        self._adopt(self._unused() if self.track_unused else frozenset())

    def wait(self, index: int) -> None:
        """Wait for one bucket that was submitted; as `apply`, on the current stream."""
        try:
            self._tickets[index].wait()
        except Exception as error:
            self._failed = True
            raise CommError(
                f"rank {self.communicators.rank}: {error}",
                "look for the first error on the other ranks; a peer has gone, or did not come "
                f"within EVENER_TIMEOUT={self.options.timeout:g} s",
            ) from error

    @property
    def measuring(self) -> bool:
        """Whether this is the first step, after which the buckets are laid out anew."""
        return self._measuring

    def _adopt(self, unused: frozenset[int]) -> None:
        for index, parameter in enumerate(self.parameters):
            if index not in unused and index not in self.sparse:
                parameter.grad = self.buckets.views[index]

    def end_step(self) -> None:
        """All buckets were waited for: expect the next step's gradients."""
        order, first_step, self._measuring = self._order, self._measuring, False
        self._reset()
        if first_step:
            self._settle(order)

    def _unused(self) -> frozenset[int]:
        """Parameters that no rank used: those keep the gradient that they had."""
        used = torch.tensor(self._here, dtype=torch.int32)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self.communicators.control.handle)
        return frozenset((used == 0).nonzero().flatten().tolist())

    def _settle(self, order: list[int]) -> None:
        """After the first step: buckets in the order in which rank 0 produced gradients.

        What was sparse there is in none of them.
        """
        came = {*order, *self.sparse}
        order = [*order, *(i for i in self.buckets.order if i not in came)]
        box = [order]
        control = self.communicators.control.handle
        dist.broadcast_object_list(box, group=control, group_src=0)
        self.sparse |= set(self.buckets.order) - set(box[0])
        if tuple(box[0]) == self.buckets.order:
            self._wires = self._make_wires()
            return
        old = self.buckets.views
        self._lay_out(box[0])
        with torch.no_grad():
            if box[0]:
                torch._foreach_copy_(
                    [self.buckets.views[i] for i in box[0]], [old[i] for i in box[0]]
                )
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is old[index]:
                parameter.grad = self.buckets.views[index]
        if self.communicators.rank == 0:
            logger.info("buckets follow the order of the first backward: %d", len(self.buckets))

    # --- what it is doing ---

    def describe(self) -> str:
        """One line: ranks, levels and why, buckets, forms on the wire."""
        route = self.communicators.route
        kind = "2-D" if route.levels.two_level else "flat"
        forms = [self._form(b, r) for b, r in zip(self.buckets, self._routes, strict=True)]
        counts = ", ".join(f"{forms.count(form)} {form}" for form in dict.fromkeys(forms))
        total = sum(bucket.bytes for bucket in self.buckets) / 1e6
        return (
            f"{self.communicators.size} ranks, {kind} all-reduce ({route.levels.reason}); "
            f"{total:.1f} MB of gradients in {len(self.buckets)} buckets: {counts}"
        )

    def residuals(self) -> dict[str, tuple[int, torch.Tensor]]:
        """What top-k has not sent yet: parameter name to (first element, float32 [n]).

        Only the part that falls into this rank's shard; views, not copies.
        """
        found = {}
        for bucket, route, wire in zip(self.buckets, self._routes, self._wires, strict=True):
            if not isinstance(wire, TopKWire) or bucket.index not in wire.residuals:
                continue
            residual = wire.residuals[bucket.index]
            start = residual.numel() * (0 if route.scatter is None else route.scatter.rank)
            for slot in bucket.slots:
                low = max(slot.offset, start)
                high = min(slot.offset + slot.numel, start + residual.numel())
                if low < high:
                    part = residual[low - start : high - start]
                    found[self.names[slot.index]] = (low - slot.offset, part)
        return found

    def detach(self) -> None:
        """Remove the hooks and end the lanes. May be called at any time, and twice."""
        for hook in self._hooks:
            hook.remove()
        self._lanes.close()

    def close(self) -> None:
        """`detach`, and give the groups to the next reducer: in the same order on all ranks."""
        self.detach()
        if not self._failed:
            self.communicators.close()


def _device(named: list[tuple[str, torch.nn.Parameter]]) -> torch.device:
    """The one device of all parameters."""
    if not named:
        raise UsageError("there is no parameter that requires a gradient", "pass the model's own")
    for name, parameter in named:
        if parameter.device != named[0][1].device:
            raise UsageError(
                f"{named[0][0]} is on {named[0][1].device}, {name} on {parameter.device}",
                "put the model on one device; models over several GPUs are not supported",
            )
        if not parameter.is_floating_point():
            raise UsageError(
                f"{name} is {parameter.dtype}", "only real floating-point parameters are reduced"
            )
    return named[0][1].device
