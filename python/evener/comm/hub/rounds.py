"""Rounds between nodes: `model.evener` where a model's node has a hub.

Inside the node the ranks train as DistributedDataParallel has it, so their weights are equal after
each step. The node's first rank leads: it counts steps, talks to the hub, and after an exchange all
ranks of the node take its weights. A round is that of `evener.comm.rounds`,

    change = shared weights - weights     what this node sends, in a form
    mean   = of all nodes' changes, weighted by the steps that each took
    outer step on the shared weights, from which all nodes go on

and the hub says whose changes are in the mean. What a node did since its last exchange is lost to
the others where it is left out; it then goes on from the shared weights that the hub sends.

With `overlap` a node goes on while its change is on its way, as in `evener.comm.rounds`: after
`overlap` steps its weights are the new shared ones, and how far it went in these steps. They count
in the next round. Where the others call before, it lands at once, and sends that.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from evener.base import settings
from evener.comm.agree import require_agreement
from evener.comm.errors import CommError
from evener.comm.exchange import Exchange
from evener.comm.fragments import rounded
from evener.comm.groups import Communicators
from evener.comm.hub import frames
from evener.comm.hub.client import Event, Link, Place, said_by
from evener.comm.hub.frames import Fields
from evener.comm.hub.shared import Form, Outer, Shared, Sizes, job_of
from evener.comm.loads import LoadHook
from evener.comm.options import Options
from evener.comm.reducer import device_of
from evener.errors import EvenerError, UsageError

logger = logging.getLogger("evener.comm")

VERSION = 1
# What the node's first rank tells the others after each step.
_GO, _WROTE, _WAIT, _FAILED = range(4)
_LOOK = 0.5
_SAY = 10.0
_WAITING = 5.0  # seconds between two words to the ranks that wait in a collective


@dataclass
class _Flight:
    """A change of `steps` steps that is on its way. `round`: the one that it ends. `sent`: the
    weights [weights] whose change it is. `session`: of the connection that took it; 0: none yet.
    """

    round: int
    steps: int
    payload: frames.Payload
    sent: torch.Tensor
    session: int = 0


class NodeRounds:
    """See the module. Counts as `Rounds` does: `steps`, `rounds`, and `since` the last exchange
    began.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        module: torch.nn.Module,
        options: Options,
        group: dist.ProcessGroup | None = None,
        buffers: bool = True,
    ) -> None:
        """Collective over the node. Nothing is sent before `begin`.

        `buffers`: nodes average them too. Raises UsageError for what cannot be exchanged.
        """
        named = list(named_parameters)
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.options, self.every, self.overlap = options, options.every, options.overlap
        self.steps = self.rounds = self.since = 0
        self.device = device_of(named)
        if any(p.dtype == torch.float64 for p in self.parameters):
            raise UsageError(
                "nodes that come and go exchange float32, and this model has float64 weights",
                "train in float32, or leave the hub out",
            )
        kept = dict(module.named_buffers()) if buffers else {}
        self._buffers = {n: b for n, b in kept.items() if b.is_floating_point() and b.numel()}
        self.communicators = Communicators(options, self.device, group)
        self._group, self._rank = self.communicators.flat().outer.handle, self.communicators.rank
        require_agreement(self.communicators, self.names, self.parameters, options)
        lossy = options.wire != "exact"
        small = {i for i, p in enumerate(self.parameters) if lossy and p.dim() <= 1}
        order = sorted(range(len(self.parameters)), key=lambda i: (i in small, i))
        self._order = [(i, self.parameters[i]) for i in order]
        large = sum(p.numel() for i, p in self._order if i not in small)
        few = sum(p.numel() for i, p in self._order if i in small)
        sizes = Sizes(large, few, sum(b.numel() for b in self._buffers.values()))
        self._outer = Outer(options.outer_lr, options.outer_momentum)
        self._form = Form(options.wire, sizes)
        self._residual = torch.zeros(large) if self._form.feedback else None
        self._shared = Shared(sizes)
        self._lock = threading.Lock()  # of the shared weights, which the link's thread reads
        self._link: Link | None = None
        self._ready = self._entered = self._said = 0  # sessions
        self._flight: _Flight | None = None
        self._wrote = False
        self._told = 0.0
        self.ended = False
        self._before: list[torch.Tensor] | None = None
        self._hooks = [
            m.register_load_state_dict_pre_hook(LoadHook(self)) for m in module.modules()
        ]
        if self._rank == 0:
            with torch.no_grad():
                self._read_weights(self._shared.weights)
                self._shared.buffers.copy_(self._own_buffers())

    def begin(self, place: Place | None = None) -> None:
        """Join the nodes at the hub, by default that of EVENER_HUB. Collective over the node.

        Waits for the hub, and until enough nodes are there. Raises UsageError for what the hub
        refuses, CommError where it does not answer.
        """
        self._lead(lambda: self._begin(place or Place.of_variables()))
        if self._rank == 0:
            logger.info("%s", self.describe())

    # --- steps ---

    def stepped(self) -> None:
        """The program's optimizer took a step. Collective over the node."""
        self.settle()
        self.steps += 1
        self.since += 1
        self._lead(self._after_step)

    def exchange(self) -> None:
        """End the round now, and wait for the other nodes. Collective over the node."""
        self.settle()
        self._lead(self._exchange)

    def end_round(self) -> None:
        """`exchange`, if this node took steps since the last one. Collective over the node."""
        self.land()
        if self.since:
            self.exchange()

    def land(self) -> None:
        """Wait for the exchange that is on its way, if one is, and apply it. Collective over the
        node.
        """
        if self.overlap:
            self._lead(self._land)

    @torch.no_grad()
    def _lead(self, act: Callable[[], None]) -> None:
        """On the first rank `act`; then all ranks have its weights, or raise what it raised."""
        if self._rank:
            self._follow()
            return
        self._wrote = False
        self._told = time.monotonic()
        try:
            act()
        except Exception as error:
            self._tell(_FAILED, error)
            raise
        self._tell(_WROTE if self._wrote else _GO)
        if self._wrote:
            self._spread()

    def _follow(self) -> None:
        said = torch.tensor([_WAIT, 0, 0, 0])
        control = self.communicators.control.handle
        while int(said[0]) == _WAIT:
            dist.broadcast(said, group=control, group_src=0)
        code, self.steps, self.rounds, self.since = said.tolist()
        if code == _FAILED:
            box: list[Any] = [None]
            dist.broadcast_object_list(box, group=control, group_src=0)
            raise CommError(*box[0])
        if code == _WROTE:
            self._spread()

    def _tell(self, code: int, error: Exception | None = None) -> None:
        if self.communicators.size == 1:
            return
        control = self.communicators.control.handle
        said = torch.tensor([code, self.steps, self.rounds, self.since])
        dist.broadcast(said, group=control, group_src=0)
        if error is not None:
            what = (f"rank 0 of this node failed: {type(error).__name__}: {error}", "")
            if isinstance(error, EvenerError):
                what = (error.problem, error.fix)
            dist.broadcast_object_list([what], group=control, group_src=0)

    def _spread(self) -> None:
        """All ranks of the node take its first rank's weights."""
        if self.communicators.size == 1:
            return
        for tensor in [*self.parameters, *self._buffers.values()]:
            whole = tensor.detach()
            sent = whole if whole.is_contiguous() else whole.contiguous()
            dist.broadcast(sent, group=self._group, group_src=0)
            if sent is not whole:
                whole.copy_(sent)

    # --- what the first rank does ---

    def _begin(self, place: Place) -> None:
        this = weakref.ref(self)

        def joins() -> Fields:
            return {} if (live := this()) is None else live._joins()

        def state() -> tuple[Fields, frames.Payload]:
            return ({}, b"") if (live := this()) is None else live._state()

        sizes, size = self._shared.sizes.state, self._form.size
        most = {"take": sizes, "result": size}
        self._link = Link(place, joins, state, lambda fields: most.get(fields["is"], 0))
        self._until(lambda: self._ready > 0, "to begin")

    def _joins(self) -> Fields:
        sizes, options = self._shared.sizes, self.options
        job = job_of(
            self.names,
            self.parameters,
            sorted(self._buffers),
            every=self.every,
            overlap=self.overlap,
            form=self._form.name,
            outer_lr=self._outer.lr,
            outer_momentum=self._outer.momentum,
        )
        outer = {"outer_lr": float(options.outer_lr), "outer_momentum": float(self._outer.momentum)}
        size = {"large": sizes.large, "small": sizes.small, "kept": sizes.buffers}
        with self._lock:
            return {
                "is": "join",
                "job": job,
                "form": self._form.name,
                **outer,
                **size,
                **self._claim(),
            }

    def _claim(self) -> Fields:
        claim = self._shared.claim
        return {"round": claim.round, "digest": claim.digest}

    def _state(self) -> tuple[Fields, frames.Payload]:
        with self._lock:
            return {**self._claim(), "steps": self._shared.steps}, bytes(self._shared.raw())

    def _after_step(self) -> None:
        link = self._live
        self._handle()
        if (flight := self._flight) is not None:
            called = link.called == self._shared.round > flight.round
            if called or self.since >= self.overlap:
                self._land()
        self._say()
        if not self.overlap:
            self._until(self._answered, "to enter")
        due = self.since >= self.every or link.called == self._shared.round
        if self.since and self._flight is None and due:
            self._depart()
            if not self.overlap:
                self._land()

    def _answered(self) -> bool:
        """No answer is to come. Where the weights were old, others came, and there was no step."""
        link = self._live
        asked = self._said == link.session and self._entered < link.session
        return not asked or not self.since or self._away

    def _say(self) -> None:
        """Tell the hub what it does not know over this connection: that this node has taken a step
        from the weights that the hub has, and then the change that is on its way.
        """
        link, flight, session = self._live, self._flight, self._live.session
        if self._away or self._ready != session:
            return
        if self._entered < session:
            if (self.since or flight is not None) and self._said != session:
                self._said = session
                link.send({"is": "enter", **self._claim()}, session)
        elif flight and flight.session != session and flight.round == self._shared.round:
            flight.session = session
            fields = {"is": "change", "steps": flight.steps, **self._claim()}
            link.send(fields, session, flight.payload)

    @property
    def _live(self) -> Link:
        assert self._link is not None
        return self._link

    @property
    def _away(self) -> bool:
        return self._live.lost_at is not None

    def _exchange(self) -> None:
        """Land what is on its way, and what this node did since then."""
        waits = self._flight is not None
        self._land()
        if self.since or not waits:
            self._depart()
            self._land()

    def _depart(self) -> None:
        """Send how far this node went; `_land` ends it."""
        round_ = self._shared.round
        if any(not p.requires_grad for p in self.parameters):
            raise UsageError(
                f"{self.names[self._frozen()]} was frozen after DDP wrapped the model, and the "
                "outer momentum would move it",
                "freeze it before the model is wrapped, or leave the hub out",
            )
        own = self._own_weights()
        whole = self._change(own)
        if not bool(whole.isfinite().all()):
            raise CommError(
                f"round {round_}: this node has weights that are not finite",
                "lower its learning rate or clip gradients; nothing of it was sent",
            )
        key = round_, self._live.slot
        payload = self._form.write(whole, self._own_buffers(), self._residual, key)
        self._flight = _Flight(round_, self.since, payload, own)
        self.since = 0
        self._say()

    def _land(self) -> None:
        """Wait until the change that is on its way counted or was for nothing, and go on from the
        shared weights.
        """
        flight = self._flight
        if flight is None:
            return

        def over() -> bool:
            self._say()
            return self._flight is not flight or self._shared.round > flight.round

        self._until(over, f"for round {flight.round}")
        if self._flight is flight:
            self._moved(flight.sent)

    def _frozen(self) -> int:
        return next(i for i, p in enumerate(self.parameters) if not p.requires_grad)

    def _until(self, over: Callable[[], bool], what: str) -> None:
        """Handle what comes until it is `over`. Raises what the hub refuses, and CommError where
        it is gone for too long.
        """
        link = self._live
        began = said = time.monotonic()
        limit = self.options.timeout or settings.EVENER_TIMEOUT.default
        while not over():
            self._handle(_LOOK)
            now = time.monotonic()
            if link.refused is not None:
                raise link.refused
            if link.lost_at is not None and now - max(link.lost_at, began) > limit:
                raise CommError(
                    f"the hub at {link.place.host}:{link.place.port} is gone for {limit:g} s, and "
                    f"this node waits for it {what}: {link.why}",
                    "start it again, then the nodes; model.evener.state_dict() holds the shared "
                    "weights and the momentum (EVENER_TIMEOUT sets how long to wait)",
                )
            if now - self._told > _WAITING:
                self._told = now
                self._tell(_WAIT)
            if now - said > _SAY:
                said = now
                whom = "more nodes" if link.waits else "the other nodes"
                if link.lost_at is not None:
                    whom = "the hub, which does not answer"
                logger.info("waiting %s for %.0f s, for %s", what, now - began, whom)

    def _handle(self, seconds: float = 0.0) -> None:
        """What came from the hub, waiting for it for `seconds`."""
        while True:
            try:
                event = (
                    self._live.events.get(timeout=seconds)
                    if seconds
                    else (self._live.events.get_nowait())
                )
            except queue.Empty:
                return
            seconds = 0.0
            self._happens(event)

    def _happens(self, event: Event) -> None:
        if event.what == "take":
            self._take(event)
        elif event.what == "keep":
            self._ready = max(self._ready, event.session)
        elif event.what == "entered":
            self._entered = max(self._entered, event.session)
        elif event.what == "result":
            self._result(event)
        elif event.what == "out":
            logger.warning("the hub left this node out: %s", str(event.fields.get("why"))[:300])
        elif event.what == "lost" and not self._live.refused:
            logger.warning(
                "the connection to the hub ended (%s): this node trains on until its next exchange",
                event.fields["why"] or "closed",
            )

    def _take(self, event: Event) -> None:
        """Go on from the hub's weights."""
        said, flight = said_by(event.fields), self._flight
        counted = event.fields.get("counted") or (flight and self._shared.round > flight.round)
        with self._lock:
            self._shared.fill(event.payload, said["round"], said["steps"])
            same = self._shared.claim.digest == said["digest"]
        if not same:
            self._live.again()
            return
        if self._ready:
            lost = self.since + (0 if flight is None or counted else flight.steps)
            steps = f"{lost} step{'s' * (lost != 1)}"
            dropped = f"; what it did in its last {steps} is dropped" * bool(lost)
            logger.warning(
                "this node goes on from the shared weights of round %d%s", said["round"], dropped
            )
        else:
            logger.info("the shared weights are those of round %d", said["round"])
        self._ready = event.session
        self._entered = self._said = 0  # it is a guest, over the same connection too
        if self._residual is not None:
            self._residual.zero_()
        self._moved()

    def _result(self, event: Event) -> None:
        said = said_by(event.fields)
        if said["round"] != self._shared.round + 1 or len(event.payload) != self._form.size:
            return  # of a round that this node has by another way
        with self._lock:
            self._shared.step(*self._form.read(event.payload), self._outer)
            self._shared.steps = said["steps"]
            if self._entered < self._ready:
                self._said = 0  # of weights that are no more: the hub passes over it
            same = self._shared.claim.digest == said["digest"]
        if not same:
            logger.warning(
                "round %d: this node has other shared weights than the hub, and asks for them",
                said["round"],
            )
            self._live.again()
        if self._flight is None:
            self._moved()

    def _moved(self, sent: torch.Tensor | None = None) -> None:
        """The shared weights are others: go on from them, and keep how far this node went since it
        had `sent` [weights].
        """
        self.since = self.since if sent is not None else 0
        begins = self._shared.weights
        if sent is not None and self.since:
            begins = self._own_weights().sub_(sent).add_(begins)
        at = 0
        for _, parameter in self._order:
            n = parameter.numel()
            parameter.copy_(begins[at : at + n].view(parameter.shape))
            at += n
        at = 0
        for buffer in self._buffers.values():
            n = buffer.numel()
            buffer.copy_(self._shared.buffers[at : at + n].view(buffer.shape))
            at += n
        self.rounds, self.steps = self._shared.round, self._shared.steps + self.since
        self._flight, self._wrote = None, True

    def _read_weights(self, into: torch.Tensor) -> None:
        at = 0
        for _, parameter in self._order:
            n = parameter.numel()
            into[at : at + n].view(parameter.shape).copy_(parameter)
            at += n

    def _own_weights(self) -> torch.Tensor:
        """[weights]"""
        own = torch.zeros_like(self._shared.weights)
        self._read_weights(own)
        return own

    def _change(self, own: torch.Tensor) -> torch.Tensor:
        """How far this node went to its `own` weights: [weights]."""
        change = torch.zeros_like(own)
        at = 0
        for _, parameter in self._order:
            n = parameter.numel()
            began = self._shared.weights[at : at + n]
            if parameter.dtype != torch.float32:
                began = rounded(began, parameter.detach().cpu())
            torch.sub(began, own[at : at + n], out=change[at : at + n])
            at += n
        return change

    def _own_buffers(self) -> torch.Tensor:
        found = [b.detach().float().flatten().cpu() for b in self._buffers.values()]
        return torch.cat(found) if found else torch.zeros(0)

    # --- weights that the program loads ---

    def will_load(self) -> None:
        """The program loads weights into the model, or a part of it."""
        if self._before is None:
            self._before = [parameter.detach().clone() for parameter in self.parameters]

    def settle(self) -> None:
        """Before a step. Raises UsageError where the program has loaded other weights."""
        before, self._before = self._before, None
        if before is not None and not all(map(torch.equal, before, self.parameters)):
            raise UsageError(
                "weights were loaded into a model that is shared with other nodes",
                "load them before the model is accelerated (without a line: before its first "
                "step), on every node",
            )

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """The shared weights and the outer momentum, on the node's first rank; not collective."""
        found: dict[str, Any] = {"version": VERSION, "rounds": self.rounds, "steps": self.steps}
        if self._rank:
            return found
        found["rounds"] = self._shared.round  # one further, where an exchange is about to land
        with self._lock:
            for what, flat in (
                ("shared", self._shared.weights),
                ("momentum", self._shared.momentum),
            ):
                at, views = 0, {}
                for i, parameter in self._order:
                    n = parameter.numel()
                    views[self.names[i]] = flat[at : at + n].view(parameter.shape).clone()
                    at += n
                found[what] = views
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`'s, where the hub has nothing further. Collective over the node.

        Raises UsageError for the state of another model.
        """
        self._before = None
        self._lead(lambda: self._load(state))

    def _load(self, state: dict[str, Any]) -> None:
        shared = state.get("shared")
        if state.get("version") != VERSION or not isinstance(shared, dict):
            raise UsageError(
                "this is no state of nodes that come and go", "give what state_dict() returned"
            )
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if name not in shared or shared[name].shape != parameter.shape:
                raise UsageError(
                    f"the state has no parameter {name} {list(parameter.shape)}",
                    "load the state of the same model",
                )
        self._land()  # else its average came later, and would move what was loaded
        if int(state["rounds"]) <= self._shared.round:
            logger.info("the hub is in round %d: its weights are taken", self._shared.round)
            self._moved()
            return
        with self._lock:
            for what, flat in (
                ("shared", self._shared.weights),
                ("momentum", self._shared.momentum),
            ):
                at = 0
                for i, parameter in self._order:
                    n = parameter.numel()
                    flat[at : at + n].view(parameter.shape).copy_(state[what][self.names[i]])
                    at += n
            self._shared.round, self._shared.steps = int(state["rounds"]), int(state["steps"])
        self._moved()
        before = self._ready
        self._live.again()
        self._until(lambda: self._ready > before, "to begin anew")

    # --- what it is doing ---

    @property
    def exchanges(self) -> list[Exchange]:
        """None goes between ranks."""
        return []

    def describe(self) -> str:
        """One line: nodes' rounds, outer step, form and bytes."""
        size = self._form.size / 1e6
        said = f"{size:.1f} MB" if size >= 0.1 else f"{1e3 * size:.1f} kB"
        link = self._link
        moved = (
            ""
            if link is None
            else (f"; {link.sent / 1e6:.1f} MB sent and {link.received / 1e6:.1f} MB received")
        )
        ranks = self.communicators.size
        behind = f"; behind the next {self.overlap}" if self.overlap else ""
        return (
            f"this node ({ranks} rank{'s' * (ranks != 1)}) trains by itself, and nodes average "
            f"every {self.every} steps (outer lr {self._outer.lr:g}, momentum "
            f"{self._outer.momentum:g}{behind}): {said} each way in {self._form.name}; "
            f"round {self.rounds}{moved}"
        )

    def leave(self, well: bool = True) -> None:
        """The program came to its end, `well` or not: the others do not wait for this node."""
        self.detach()
        self.ended = True
        if self._link is not None:
            self._link.close(leave=well)

    def detach(self) -> None:
        """Remove the hooks. May be called twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def drop(self) -> None:
        """The model is gone."""
        self.leave()
        self.communicators.drop()

    def close(self) -> None:
        """`leave`, and give the groups to the next user: in the same order on all ranks."""
        self.leave()
        self.communicators.close()
