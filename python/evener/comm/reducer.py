"""Gradients in, averages out: the one interface on which the front doors stand.

    submit(bucket)   its gradients are complete: pack them and issue the collectives
    flush()          submit what is missing (zeros where no gradient came)
    apply()          wait, and leave the results as `p.grad`, views of the buckets

When a bucket is complete, and which one leaves next, is `evener.comm.arrivals`': one `sequence`,
equal on all ranks, so that every communicator sees the same on all of them. A front door decides
when to flush and apply: at the end of backward (`evener.ddp`) or in the optimizer's step (Horovod);
or lets results come in while the next forward runs (`defer`, `wait`, `end_step`; see
`evener.comm.overlap`).

The first step measures: the order in which rank 0 produced gradients becomes the order of the
buckets from then on, and forms that keep a residual send exactly, so that none depends on a layout
that was a guess.

Embeddings may be taken apart (`evener.comm.parts`): then a parameter's gradient is the sum of what
its own buckets and one by rows have brought.

Which route and form a bucket takes is `evener.comm.assignment`'s, how it leaves,
`evener.comm.departures`'; what happens to it between nodes, `evener.comm.exchange`'s; what the
compression remembers, `evener.comm.state`'s.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler

from evener.comm import checkpoint, guard, holders, wires
from evener.comm.agree import require_agreement
from evener.comm.arrivals import Arrivals, Phase
from evener.comm.assignment import Assignment
from evener.comm.buckets import Buckets
from evener.comm.departures import Departures
from evener.comm.errors import CommError
from evener.comm.exchange import Exchange
from evener.comm.groups import Communicators
from evener.comm.lanes import Lanes, StreamLanes, ThreadLanes, Ticket
from evener.comm.options import Options
from evener.comm.parts import Parts
from evener.comm.profile import Recorder
from evener.comm.records import Records
from evener.comm.state import LossScale
from evener.comm.unused import Unused
from evener.errors import UsageError

logger = logging.getLogger("evener.comm")


class Reducer:
    """Reduces the gradients of `parameters` over all ranks of `group`.

    Attributes for front doors: `arrivals`, with some of its own, and `on_first` (called when the
    first gradient of a step comes).
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
        repeats: bool = False,
    ) -> None:
        """Collective over `group` (default: all ranks).

        All of the parameters are reduced, whether they require gradients now or later.
        `track_unused`: a parameter that no rank used in a step keeps its `p.grad` as it was (None,
        after `zero_grad()`); without it such a parameter gets zeros. `repeats`: a gradient may come
        several times in one backward (checkpointed layers that share it), as often in each step as
        in the first one, in which nothing leaves before backward ends.

        Raises UsageError for what cannot be reduced, CommError where ranks are missing or disagree.
        """
        named = list(named_parameters)
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.device = device_of(named)
        self.options = options
        self.on_first: Callable[[], None] | None = None
        self.on_sparse: Callable[[int], None] | None = None
        self.densifies = False
        # Parameters whose gradients are sparse, or were; and whether this step's came as such.
        self.sparse: set[int] = set()
        self.densified: set[int] = set()
        self.track_unused = track_unused
        self.recorder: Recorder | None = None
        # Brings in what a front door has left on its way between steps; why is for the log.
        self.finish: Callable[[str], None] = lambda _: None
        # Hooks of Evener's own on each parameter's gradient.
        self.own_hooks = 0
        # Whether the program keeps gradients, so that it may look at them while this step is on its
        # way; and those of them that are in no bucket, and are to get this step's result.
        self.gradients_seen = False
        self._looked: int | None = None  # in which backward that was looked for
        self._kept: dict[int, torch.Tensor] = {}
        # Parameters that no rank used in this step, known when it has ended; their gradients stay
        # as they were: with those that lie in buckets, copies.
        self.left_alone: frozenset[int] = frozenset()
        self._as_it_was: dict[int, torch.Tensor] = {}
        self._coming: int | None = None  # whose hook this is
        # Whether a front door has left something on its way that a gradient must not be added to.
        self.is_pending: Callable[[], bool] = lambda: False
        self.communicators = Communicators(options, self.device, group)
        require_agreement(self.communicators, self.names, self.parameters, options)
        self.lanes: Lanes = (
            StreamLanes(self.device) if self.device.type == "cuda" else ThreadLanes()
        )
        self.loss_scale = LossScale()
        if any(wires.get(form).feedback for form in (options.wire, options.floor)):
            self.loss_scale.watch(self.parameters)
        # Who steps the parameters, for the guard: doors say so, or let it look.
        self.optimizers = guard.Optimizers(self.parameters)
        self.steps = 0
        self.records = Records.open(self.communicators.rank)
        self._loaded: dict[str, Any] | None = None
        self._measuring = True
        self._failed = False
        self._resting: list[tuple[torch.UntypedStorage, int]] = []
        self.unused = Unused(self.names, self.communicators)
        self.arrivals = Arrivals(self.names, self, repeats=repeats)
        self.parts = Parts(self)
        self.assignment = Assignment(self.names, options, self.communicators, self.parts)
        self.departures = Departures(self)
        self._lay_out(range(len(self.parameters) - 1, -1, -1))
        self.arrivals.hook(self.parameters)
        if self.communicators.rank == 0:
            logger.info("%s", self.describe())
            if why := self.assignment.why_exact():
                logger.info("%s", why)

    # --- layout ---

    def _lay_out(self, order: Iterable[int]) -> None:
        size = self.communicators.route.shards
        dense = frozenset[int]()
        if any(wires.get(form).lossy for form in (self.options.wire, self.options.floor)):
            dense = frozenset(i for i, p in enumerate(self.parameters) if p.dim() <= 1)
        self.buckets = Buckets(
            self.parameters,
            list(order),
            self.options.bucket_bytes,
            size,
            dense,
            self.options.partition_bytes,
            self.parts.expected(),
        )
        self.assignment.lay_out(self.buckets)
        last = [bucket.index for bucket in self.buckets if bucket.by_rows]
        rest = [bucket.index for bucket in self.buckets if not bucket.by_rows]
        self.arrivals.sequence = self.parts.ordered([*rest, *last])
        sizes = [len(bucket.slots) for bucket in self.buckets]
        self.arrivals.lay_out(sizes, self.buckets.buckets_of)
        self._reset()

    @property
    def exchanges(self) -> list[Exchange]:
        """The exchange of each bucket, by index."""
        return self.assignment.exchanges

    @property
    def sequence(self) -> tuple[int, ...]:
        """The buckets in the order in which they leave."""
        return self.arrivals.sequence

    def resequence(self, sequence: Sequence[int]) -> None:
        """Issue the buckets in this order from the next step on. The same on every rank."""
        if sorted(sequence) != list(range(len(self.buckets))):
            raise ValueError(f"{list(sequence)} is not an order of {len(self.buckets)} buckets")
        self.arrivals.sequence = self.parts.ordered(sequence)

    def adopt(self, choices: Sequence[tuple[str, str]], sequence: Sequence[int]) -> None:
        """A planner's decision, from the next step on: (algorithm, form) of each bucket, and order.

        Between steps only, and the same on every rank. "flat", "2d", or "own", which is the
        collective library alone as DDP's own reducer takes it ("ddp": and where there is such a
        reducer, it takes it); a form of `wires.names()`.
        """
        moves = self.assignment.choose(choices)
        state = checkpoint.collect(self) if moves else None
        self.assignment.apply(keep=not moves)
        if state is not None:
            checkpoint.install(self, state, forms=False)
        self.resequence(sequence)

    def _reset(self) -> None:
        """Forget the step: every gradient is still to come."""
        self.departures.reset()
        self.arrivals.reset()
        self.parts.reset()
        self.gradients_seen, self._looked = False, None
        self._kept, self._as_it_was = {}, {}
        self.left_alone = frozenset()

    def set_passes(self, passes: int) -> None:
        """From now on a gradient is complete after `passes` backward passes. Between steps only."""
        self.arrivals.set_passes(passes)
        self._reset()

    @property
    def pending(self) -> bool:
        """Whether gradients came, or were submitted, that were not applied yet."""
        return self.arrivals.phase is not Phase.WAITING

    def with_gradients(self) -> list[torch.Tensor]:
        """The parameters whose gradients have come in this step."""
        return [self.parameters[index] for index in self.arrivals.order]

    # --- gradients arrive: `Arrivals`' owner ---

    def begins(self) -> None:
        """A backward begins: whoever has kept gradients of earlier steps keeps them as they are.

        With plain DDP a gradient is a tensor of its own. One that was dropped stays what it was,
        and one that was not is added to, and gets the result.
        """
        backward = int(torch._C._current_graph_task_id())
        if self._looked == backward:
            return
        # Anew: one before it may have brought nothing, as that of an input's gradient alone, and
        # what was a gradient then may be none now.
        self._looked, self._kept = backward, {}
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        kept = self._keep_views()
        views = self.buckets.views
        own = [
            i
            for i, p in enumerate(self.parameters)
            if p.grad is not None and p.grad is not views[i]
        ]
        here = holders.together(self.parameters[i].grad for i in own)  # type: ignore[misc]
        for index in own:
            parameter = self.parameters[index]
            if index in self.sparse:
                continue
            if holders.is_kept(parameter, None if index == self._coming else here):
                self._kept[index] = parameter.grad  # type: ignore[assignment]
        hooked = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in self.parameters)
        self.gradients_seen = bool(kept or self._kept or hooked)

    def _keep_views(self) -> bool:
        """Leave to others what they hold of gradients that were dropped; whether they hold any."""
        found = set(self.buckets.kept(patient=not self.gradients_seen))
        for bucket in self.buckets:
            for slot in bucket.slots:
                is_gradient = self.parameters[slot.index].grad is self.buckets.views[slot.index]
                if holders.view_is_kept(self.buckets.views, slot.index, is_gradient):
                    found.add(bucket.parts[0])
        for first in found:
            slots, views = self.buckets[first].slots, self.buckets.views
            own = [s.index for s in slots if self.parameters[s.index].grad is views[s.index]]
            if len(own) == len(slots):
                continue  # all are gradients still, which are added to where they are
            self.buckets.renew(first, self.parameters)
            self._kept |= {index: self.parameters[index].grad for index in own}  # type: ignore[misc]
        return bool(found)

    def began(self) -> None:
        """The first gradient of this step has come."""
        if self.is_pending():  # no call of torch.autograd's has said that a backward begins
            raise CommError(
                "a backward has added to gradients that were on their way",
                "call torch.autograd.backward() or Tensor.backward(), not autograd's engine itself",
            )
        self.parts.begin()
        if self.on_first is not None:
            self.on_first()

    def special(self) -> Iterable[int] | None:
        """Gradients that `arrived` must be told of; others are only counted. None: all of them."""
        return None if self._measuring else (*self.parts.of, *self.sparse)

    def arrived(self, index: int) -> None:
        """A backward has added to this parameter's gradient, which is to be reduced."""
        # Once for each parameter and step: what is rare is asked for here, before it is called.
        arrivals, gradient = self.arrivals, self.parameters[index].grad
        sparse = gradient is not None and gradient.layout is not torch.strided
        sparse = sparse and self._is_sparse(index)
        del gradient  # or it is held here
        self._coming = index
        arrivals.begin()
        self._coming = None
        if index in self.parts.of and self.parts.takes(index):
            return
        # In the first step a gradient may have come by uses that are told apart, so not by count.
        if not (self._measuring and self.parts.first_arrived(index)):
            if not arrivals.count(index):
                return
            if sparse and self.on_sparse is not None:
                self.sparse.add(index)
                self.on_sparse(index)
                arrivals.complete(index)
                return
            if index in self.sparse:
                raise CommError(
                    f"the gradient of {self.names[index]} is dense, and was sparse before",
                    "make it sparse in every step or in none; sparse_as_dense=True makes it dense",
                )
        arrivals.order.append(index)
        arrivals.complete(index)

    def _is_sparse(self, index: int) -> bool:
        """Whether a gradient that came sparse stays so."""
        parameter = self.parameters[index]
        if self.densifies and parameter.grad is not None:
            parameter.grad = parameter.grad.to_dense()
            self.densified.add(index)
            return False
        if self.on_sparse is None:
            raise UsageError(
                f"the gradient of {self.names[index]} is sparse",
                "use a dense one (sparse=False), or hvd.DistributedOptimizer, which reduces those",
            )
        return True

    def completed(self, bucket: int) -> None:
        """All gradients of this bucket are there."""
        if self.recorder is not None:
            self.recorder.complete(bucket)

    def catch_up(self, came: Sequence[torch.Tensor] = ()) -> None:
        """Take the gradients that are there as this step's: they came before this reducer.

        `came`: their parameters, in the order in which they came; buckets follow it from the next
        step on. Those that it leaves out count as the last, in reverse: backward's usual order.
        """
        places = {id(parameter): place for place, parameter in enumerate(came)}
        count = len(self.parameters)
        for index in sorted(
            range(count),
            key=lambda i: (places.get(id(self.parameters[i]), len(places)), count - i),
        ):
            if self.parameters[index].grad is not None:
                self.arrivals.expect_one(index)
                self.arrived(index)

    def submit(self, index: int) -> Ticket:
        """Issue the collectives of bucket `index`. `Arrivals` says when."""
        with self._failing():
            return self.departures.submit(index)

    # --- the end of a step ---

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """After a CommError the groups' state is unknown: they are not lent again."""
        try:
            yield
        except CommError:
            self._failed = True
            raise

    def flush(self) -> None:
        """Submit every bucket that is still open. What has no gradient counts as zeros."""
        with self._failing():
            self.communicators.check()
            self.parts.agree()
        # Before the last buckets leave: what nobody used is in one of them, and stays out of it.
        self.left_alone = self._ask_unused()
        self._leave_alone()
        self.unused.look(self.arrivals.used, self.steps + 1)
        self.arrivals.flush()

    def _leave_alone(self) -> None:
        """Gradients that stay as they are must not lie where this step's results come in."""
        for index in self.left_alone:
            gradient, part = self.parameters[index].grad, self.parts.of.get(index)
            # One that is taken apart gives its gradient away when it leaves.
            leaves = part is not None and not part.sent and gradient is not None
            if gradient is self.buckets.views[index] or leaves:
                assert gradient is not None
                self._kept[index], self._as_it_was[index] = gradient, gradient.clone()
                self.gradients_seen = True

    def apply(self) -> None:
        """Wait for all buckets; `p.grad` of every parameter is then the reduced gradient.

        On a GPU the current stream waits, not the host. Raises what a collective raised.
        """
        for index in list(self.arrivals.tickets):
            self.wait(index)
        self._adopt(self.left_alone)
        self.end_step()

    def defer(self) -> None:
        """Instead of `apply`: results stay on their way, `p.grad` is where they will land.

        Then `wait` for each bucket, and `end_step` once all have been waited for.
        """
        self._adopt(self.left_alone)

    def wait(self, index: int) -> None:
        """Wait for one bucket that was submitted; as `apply`, on the current stream."""
        with self._failing():
            self.exchanges[index].route.outer.check()
        try:
            self.arrivals.tickets[index].wait()
        except Exception as error:
            self._failed = True
            raise CommError(
                f"rank {self.communicators.rank}: {error}",
                "look for the first error on the other ranks; a peer has gone, or did not come "
                f"within {self.communicators.waits}",
            ) from error

    @property
    def ends_together(self) -> bool:
        """Whether `end_step` of this step is collective: ranks must then call it at one point.

        The first step, after which buckets are laid out anew, and those that the guard checks.
        """
        return self._measuring or self.departures.step.checked

    def _adopt(self, unused: frozenset[int]) -> None:
        for index, parameter in enumerate(self.parameters):
            left = index in self.parts.of and self.parts.of[index].had
            keeps = index in unused and (index in self._as_it_was or not left)
            if (kept := self._kept.get(index)) is not None:
                result = self._as_it_was.get(index) if keeps else self.buckets.views[index]
                if result is not None:
                    with torch.no_grad():
                        kept.copy_(result)
                parameter.grad = kept
                continue
            if parameter.grad is self.buckets.views[index]:
                continue
            if not keeps and index not in self.sparse:
                parameter.grad = self.buckets.views[index]

    def end_step(self) -> None:
        """All buckets were waited for: expect the next step's gradients."""
        with self._failing():
            self.communicators.check()
        order, first_step, self._measuring = self.arrivals.order, self._measuring, False
        self.steps += 1
        self.arrivals.settle()
        self._reset()
        verdicts = self._guard()
        if first_step:
            self.assignment.settle()
            self._settle(order)
        if self.records is not None:
            self.records.step(self.steps, self.exchanges, verdicts)

    def _ask_unused(self) -> frozenset[int]:
        """Parameters that no rank used: those keep the gradient that they had."""
        return self.unused.ask(self.arrivals.used) if self.track_unused else frozenset()

    def _guard(self) -> list[guard.Verdict]:
        if not self.departures.step.checked:
            return []
        verdicts = guard.judge(
            self.exchanges, self.steps, self.options, self.communicators, self.optimizers
        )
        for verdict in verdicts:
            if verdict.falls_to:
                self.assignment.use(verdict.bucket, verdict.falls_to)
        return verdicts

    def _settle(self, order: list[int]) -> None:
        """After the first step: buckets in the order in which rank 0 produced gradients.

        What was sparse there is in none of them.
        """
        came = {*order, *self.sparse}
        order = [*order, *(i for i in self.buckets.order if i not in came)]
        box = [self.parts.settle(order)]
        control = self.communicators.control.handle
        dist.broadcast_object_list(box, group=control, group_src=0)
        self.sparse |= set(self.buckets.order) - set(box[0])
        if tuple(box[0]) == self.buckets.order and not self.parts.of:
            self.assignment.refresh()
        else:
            self._reorder(box[0])
        if self._loaded is not None:
            loaded, self._loaded = self._loaded, None
            checkpoint.install(self, loaded, first_step_taken=True)

    def _reorder(self, order: list[int]) -> None:
        velocity = checkpoint.velocities(self)
        before = self.buckets
        old = self.buckets.views
        self._lay_out(order)
        checkpoint.move_velocity(self, before, velocity)
        with torch.no_grad():
            if order:
                torch._foreach_copy_(
                    [self.buckets.views[i] for i in order], [old[i] for i in order]
                )
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is old[index]:
                parameter.grad = self.buckets.views[index]
        if self.communicators.rank == 0:
            logger.debug("buckets follow the order of the first backward: %d", len(self.buckets))

    # --- another's turn ---

    def rest(self) -> None:
        """Another reducer takes the gradients from here on: hooks and memory of buckets go.

        Between steps, as `wake`. A gradient that lies in a bucket stays, as a tensor of its own.
        """
        self.finish("")
        self.arrivals.detach()
        self.arrivals.active = False
        self.keep_apart()
        self._resting = self.buckets.release()

    def keep_apart(self) -> None:
        """No gradient lies in a bucket any more; who holds one keeps it as it is."""
        kept = set(self.buckets.kept(patient=False))
        for index, parameter in enumerate(self.parameters):
            views, mine = self.buckets.views, self.buckets.buckets_of[index]
            is_gradient = parameter.grad is views[index]
            if mine and holders.view_is_kept(views, index, is_gradient):
                kept.add(self.buckets[mine[0]].parts[0])
            elif is_gradient:
                parameter.grad = views[index].clone()
        for first in kept:
            self.buckets.renew(first, self.parameters)

    def wake(self) -> None:
        """It is this one's turn again."""
        self.buckets.restore(self._resting)
        self._resting = []
        self.arrivals.hook(self.parameters)
        self._reset()

    # --- what it is doing ---

    def describe(self) -> str:
        """One line: ranks, levels and why, buckets, forms."""
        route = self.communicators.route
        kind = "2-D" if route.levels.two_level else "flat"
        forms = self.assignment.forms()
        counts = ", ".join(f"{forms.count(form)} {form}" for form in dict.fromkeys(forms))
        total = sum(bucket.bytes for bucket in self.buckets) / 1e6
        if self._resting:
            counts += ", by DDP's own reducer"
        staged = ", staged between nodes" if route.outer.transport is not None else ""
        return (
            f"{self.communicators.size} ranks, {kind} all-reduce ({route.levels.reason}){staged}; "
            f"{total:.1f} MB of gradients in {len(self.buckets)} "
            f"{'buckets' if len(self.buckets) > 1 else 'bucket'}: {counts}"
        )

    def residuals(self) -> dict[str, list[tuple[int, torch.Tensor]]]:
        """What compression has not sent yet: parameter name to parts (first element, float32 [n]).

        Only what falls into this rank's shards, in the order of the parameter's memory; views, not
        copies.
        """
        self.finish("a checkpoint")
        return checkpoint.residuals(self)

    def follow(self, scaler: GradScaler) -> None:
        """Keep residuals in `scaler`'s units, and give back what its skipped steps lost."""
        self.loss_scale.settle()
        last, self.loss_scale = self.loss_scale, LossScale(scaler)
        states = [exchange.state for exchange in self.exchanges]
        if any(s.residual is not None or s.velocity is not None for s in states):
            self.loss_scale.resume(last.value())

    def set_loss_scale(self, scale: float) -> None:
        """For a script that scales its loss itself: gradients are `scale` times so large from now.

        A smaller scale than before says that the last step was skipped.
        """
        self.loss_scale.given = scale

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, on the CPU. Collective, between steps; equal on all ranks.

        Residuals and velocities by parameter name, of the parameter's shape, summed over ranks, so
        that `load_state_dict` works in a world of any size.
        """
        self.finish("a checkpoint")
        state = checkpoint.collect(self)
        with self._failing():
            self.communicators.check()  # what came over a dead network must not be kept
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave: on all ranks alike, between steps.

        Raises UsageError for a checkpoint of other parameters, or in the middle of a step.
        """
        self.finish("a checkpoint")
        state = checkpoint.check(self, state)
        self.steps = int(state["steps"])
        if self._measuring:
            self._loaded = state  # the layout is not settled before the first step
            checkpoint.install_velocity(self, state)
        else:
            checkpoint.install(self, state)

    def detach(self) -> None:
        """Remove the hooks and end the lanes. May be called at any time, and twice."""
        self.arrivals.detach()
        self.parts.detach()
        self.optimizers.settle()
        self.loss_scale.settle()
        self.lanes.close()
        if self.records is not None:
            self.records.close()

    def drop(self) -> None:
        """`detach`, for whom nobody calls `close`: ranks collect garbage at different moments."""
        self.detach()
        if not self._failed:
            self.communicators.drop()

    def close(self) -> None:
        """`detach`, and give the groups to the next reducer: in the same order on all ranks."""
        self.detach()
        if not self._failed:
            self.communicators.close()


def device_of(named: list[tuple[str, torch.nn.Parameter]]) -> torch.device:
    """The one device of all parameters. Raises UsageError for several, or for what is not real."""
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
