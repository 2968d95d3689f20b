"""Local steps: ranks train by themselves, and every N steps they average how far they went.

Each round begins with weights that are equal on all ranks, the shared ones (theta). A rank takes N
steps from there with its own optimizer, data and gradients. Then

    delta = theta - weights           how far this rank went; the sign makes it a gradient
    D     = mean of delta over ranks  in a form: exact, or compressed with error feedback
    m     = momentum * m + D          SGD with Nesterov momentum, as torch.optim.SGD has it
    theta = theta - lr * (D + momentum * m)

and all ranks go on from theta. The inner optimizer's state stays where it is. DiLoCo, Douillard et
al., arXiv 2311.08105; lr 0.7 and momentum 0.9 are theirs. Where a form sends a change over many
rounds (top-k, low rank), error feedback is a momentum already, and the outer step is a plain one:
lr 1, momentum 0 (SparseLoCo, Sarfi et al., arXiv 2508.15706).

The outer step is linear in D. So error feedback is right here with any inner optimizer, Adam's kin
among them, which it is not for gradients: what a round does not send is added to the next one's.

Theta and m are float32 (float64 for weights of that) in flat buffers, laid out as gradients are
(`evener.comm.buckets`), and the averages take the same routes and forms. Weights of 16 bits are
theta rounded, and delta is counted from there, so that rounding is no step.

With `overlap` an exchange runs behind the rank's next steps (lanes, as gradients have them), and D
is there `overlap` steps after it began, when theta moves. How far the rank went in these steps is
kept: its weights are then theta + (weights - weights as they were sent), and the next round's delta
is that difference and what follows. Each step counts once; D is late, which is what Streaming
DiLoCo (Douillard et al., arXiv 2501.18512) found to cost little. Theta is equal on all ranks after
each exchange, as always; the ranks' own weights are never.

Before anything is sent the ranks meet: a few numbers from each say whether all are at the same
exchange, with the same shared weights, bit for bit, and with finite weights. Where they are not,
every rank raises the same error, which names the rank. A rank that is missing is an error after the
group's timeout.

Weights that the program loads into the model are no step: at the next exchange they are theta, and
the momentum is forgotten, unless the state of this module was loaded too. Where a load leaves all
weights of all ranks as they were, nothing happens. That must be asked: of ranks that all load what
rank 0 has saved, rank 0 alone is where it was. Of an exchange that is on its way meanwhile, theta
moves when it is time, and the rank's own weights only when that is known.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from evener.base.records import StatsFile
from evener.comm import drift, pace, wires
from evener.comm.agree import require_agreement
from evener.comm.buckets import Buckets
from evener.comm.errors import CommError
from evener.comm.exchange import Exchange
from evener.comm.fragments import Flight, Fragment, digest, finite, saved
from evener.comm.groups import Communicators
from evener.comm.lanes import Lanes, StreamLanes, ThreadLanes
from evener.comm.loads import LoadHook
from evener.comm.options import Options
from evener.comm.reducer import device_of
from evener.errors import UsageError

logger = logging.getLogger("evener.comm")

VERSION = 1
# A load that changed nothing here may have changed weights elsewhere: this many are remembered.
_LOADS = 3
# Exchanges that are timed before `every="auto"` chooses; the first is none of them.
_TIMED = 2
# What the ranks tell each other before an exchange, and how an error calls it.
_TOLD = (
    ("rounds", ""),
    ("steps", ""),
    ("frozen", "other parameters frozen"),
    ("digest", "other shared weights"),
)


class Rounds:
    """The rounds of one model: `model.evener` where a model takes local steps.

    `stepped` is called after each step of the program; `exchanged` is called at the end of each
    exchange, on all ranks, for what has to be equal besides (buffers). `steps` and `rounds` count
    from the start of the training, `since` the steps since the last exchange began. `drift`: of the
    round before the last exchange (`evener.comm.drift`); None where it is not known.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        module: torch.nn.Module,
        options: Options,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Collective over `group`. All ranks take rank 0's weights if they differ.

        Raises UsageError for what cannot be averaged, CommError where ranks are missing, or have
        other parameters or options.
        """
        named = list(named_parameters)
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.device = device_of(named)
        self.options = options
        self.exchanged: Callable[[], None] = lambda: None
        self.steps = self.rounds = self.since = 0
        self.every, self.overlap = options.every, options.overlap
        self._chosen = not options.auto
        self._flight: Flight | None = None
        self._unmet = False  # an exchange has landed, and no rank has asked about loads since
        self._lanes: Lanes | None = None
        self._at = (1, 0)  # the exchange to which the ranks come, and after how many steps
        self._before: list[torch.Tensor] | None = None  # the weights, when the program loads others
        # Of this round: the last load that changed a weight here (0: none), and the weights after
        # some loads, by fragment. A load's number is the step before which it came, from 1, which
        # is the same on all ranks.
        self._changed_at = 0
        self._loaded: dict[int, list[torch.Tensor]] = {}
        self._state_loaded = False
        self._state_of = 0  # the weights with which it was saved
        self._last: float | None = None  # when an exchange ended
        # Seconds; `crossing` is what of `exchanging` is after the ranks have met.
        self._stepping = self._exchanging = self._crossing = self._spent = 0.0
        self._timed = 0
        self.drift: float | None = None
        self._together = drift.UNKNOWN
        self.communicators = Communicators(options, self.device, group)
        self._stats = StatsFile.open("local", self.communicators.rank)
        require_agreement(self.communicators, self.names, self.parameters, options)
        self.fragments = self._lay_out()
        with torch.no_grad():
            self._start_equal()
        hook = LoadHook(self)
        self._hooks = [m.register_load_state_dict_pre_hook(hook) for m in module.modules()]
        if self.communicators.rank == 0:
            logger.info("%s", self.describe())

    def _lay_out(self) -> list[Fragment]:
        lossy = wires.get(self.options.wire).lossy
        dense = {i for i, p in enumerate(self.parameters) if p.dim() <= 1} if lossy else set()
        masters = [
            p.detach().to(torch.promote_types(p.dtype, torch.float32)) for p in self.parameters
        ]
        size = self.options.bucket_bytes
        shards = self.communicators.route.shards
        buckets = Buckets(masters, range(len(masters)), size, shards, frozenset(dense))
        made: dict[str, wires.Wire] = {}
        fragments = []
        route = self.communicators.route
        for bucket in buckets:
            form = wires.choose(self.options, route, bucket)
            if form not in made:
                made[form] = wires.get(form)(route, self.options)
            indices = [slot.index for slot in bucket.slots]
            names = [self.names[index] for index in indices]
            shared = [buckets.views[index] for index in indices]
            for view, index in zip(shared, indices, strict=True):
                view.copy_(masters[index])
            fragments.append(
                Fragment(
                    bucket,
                    Exchange(bucket, route, made[form], self.options, names),
                    [self.parameters[index] for index in indices],
                    shared,
                    torch.zeros_like(bucket.buffer) if self.options.outer_momentum else None,
                )
            )
        return fragments

    def _start_equal(self) -> None:
        """As DistributedDataParallel does where it is made: all begin with rank 0's weights."""
        digests = self._meet(torch.tensor([self._digest()]))
        if len(set(digests[:, 0].tolist())) == 1:
            return
        if self.communicators.rank == 0:
            logger.info("the ranks' weights differ: all go on with rank 0's")
        for fragment in self.fragments:
            dist.broadcast(
                fragment.bucket.buffer, group=self.communicators.flat().outer.handle, group_src=0
            )
            fragment.write()

    # --- steps ---

    def stepped(self) -> None:
        """The program's optimizer took a step, or its loss scaler left one out. Collective in each
        N-th call; with overlap it only begins there, and what is wrong is raised where it ends.
        """
        self.settle()  # again: a step that was left out did not begin
        self._state_loaded = False
        self.steps += 1
        self.since += 1
        if self.since >= self.overlap:
            self.land()
        if self.since >= self.every:
            if self.overlap:
                self._depart()
            else:
                self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """End the round now. Collective.

        Raises CommError where the ranks are not at the same exchange, or weights are not finite.
        """
        self.land()
        mine = self._tell()  # it waits for the device, so that its time is not the exchange's
        began = time.perf_counter()
        self._agree(mine)
        met = time.perf_counter()
        try:
            for fragment in self.fragments:
                fragment.exchange.route.outer.check()
                whole = fragment.gone()
                for stage in fragment.stages(whole):
                    stage()
                fragment.outer_step(whole, self.options)
                fragment.write()
            self.exchanged()
        except RuntimeError as error:
            raise self._alone(error) from error
        self.rounds += 1
        self.since = 0
        self._took(began, met)
        if not self._chosen and self._timed == _TIMED:
            self._choose()

    def _agree(self, mine: torch.Tensor) -> None:
        """Check that all are at one place, and settle what was loaded in this round. Collective."""
        if at := self._check(mine):
            self._begin_loaded(at)
        elif self._flight is not None:
            self._arrive(self._flight)
        self._flight, self._unmet, self._changed_at, self._loaded = None, False, 0, {}

    @torch.no_grad()
    def _depart(self) -> None:
        """Begin an exchange behind the next steps; `land` ends it. Collective."""
        mine = self._tell()
        began = time.perf_counter()
        agreed = bool(self._loaded)
        if agreed:  # where a round began must be known before it is sent how far it went
            self._agree(mine)
        flight = Flight(
            [fragment.gone() for fragment in self.fragments],
            [[p.detach().clone() for p in fragment.parameters] for fragment in self.fragments],
        )

        def meet() -> None:
            try:
                if not agreed:
                    self._check(mine)
            except CommError as error:  # the same on all ranks: none of them sends
                flight.error = error

        if self._lanes is None:
            on_gpu = self.device.type == "cuda"
            self._lanes = StreamLanes(self.device) if on_gpu else ThreadLanes()
        title = f"exchange {self._at[0]}"
        try:
            flight.tickets.append(self._lanes.issue(title, [meet, None, None]))
            for fragment, whole in zip(self.fragments, flight.wholes, strict=True):
                fragment.exchange.route.outer.check()
                stages = map(flight.unless_failed, fragment.stages(whole))
                flight.tickets.append(self._lanes.issue(title, list(stages)))
        except RuntimeError as error:
            raise self._alone(error) from error
        self._flight = flight
        self.rounds += 1
        self.since = 0
        self._spent = time.perf_counter() - began

    @torch.no_grad()
    def land(self) -> None:
        """Apply the exchange that is on its way, if one is: wait for it, move the shared weights,
        go on from there. On all ranks after the same step.

        Raises CommError as `exchange` does.
        """
        self.settle()
        flight = self._flight
        if flight is None or flight.landed:
            return
        began = time.perf_counter() - self._spent
        self._wait(flight)
        for fragment, whole in zip(self.fragments, flight.wholes, strict=True):
            fragment.outer_step(whole, self.options)
        flight.wholes, flight.landed, self._unmet = [], True, True
        if flight.asks:
            self._agree(self._tell())
        elif not self._loaded:  # else the next meeting knows whether the weights are others now
            self._arrive(flight)
            self._flight = None
        try:
            self.exchanged()
        except RuntimeError as error:
            raise self._alone(error) from error
        self._took(began, began)

    def _wait(self, flight: Flight) -> None:
        """Until its averages are there; nothing is applied."""
        try:
            for ticket in flight.tickets:
                ticket.wait()
        except RuntimeError as error:
            raise self._alone(error) from error
        flight.tickets = []
        if flight.error is not None:
            raise flight.error

    def _arrive(self, flight: Flight) -> None:
        for fragment, sent in zip(self.fragments, flight.sent, strict=True):
            fragment.write(sent)

    def _choose(self) -> None:
        """Steps per round, from the slowest rank's times. Collective."""
        times = [self._stepping / self._timed / self.every, self._crossing / self._timed]
        mine = torch.tensor([max(1, round(1e6 * seconds)) for seconds in times])
        step, exchange = self._meet(mine).amax(0).tolist()
        chosen = pace.choose(step, exchange)
        self.every, self.overlap, self._chosen = chosen.every, chosen.overlap, True
        self._stepping = self._exchanging = self._crossing = 0.0
        self._timed = 0
        if self.communicators.rank == 0:
            behind = f", behind the next {self.overlap}" if self.overlap else ""
            logger.info(
                "every=auto: a step takes %.1f ms and an exchange %.1f ms, so the ranks average "
                "every %d steps%s, and stand still for %.0f%% of the time",
                step / 1e3,
                exchange / 1e3,
                self.every,
                behind,
                100 * chosen.share(step, exchange),
            )

    def _took(self, began: float, met: float) -> None:
        """An exchange has ended, for which the rank has stood still since `began`, in one go or as
        if. Its time counts from the second on, as that of the steps."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self._last is not None:
            self._stepping += began - self._last
            self._exchanging += now - began
            self._crossing += now - met
            self._timed += 1
            if self._timed == 1 and self.communicators.rank == 0:
                logger.info("%s", self._times())
        self._last, self._spent = now, 0.0
        if self._stats is not None and self._stats.due:
            self._stats.write(self._record())

    def _record(self) -> dict[str, Any]:
        """What docs/reference/records.md describes."""
        timed = max(1, self._timed)
        return {
            "rounds": self.rounds,
            "steps": self.steps,
            "every": self.every,
            "overlap": self.overlap,
            "step_ms": 1e3 * self._stepping / timed / self.every if self._timed else None,
            "exchange_ms": 1e3 * self._exchanging / timed if self._timed else None,
            "bytes_sent": sum(exchange.sent_bytes for exchange in self.exchanges),
            "drift": self.drift,
        }

    def _times(self) -> str:
        """Means of the exchanges so far."""
        steps, exchange = (1e3 * t / self._timed for t in (self._stepping, self._exchanging))
        share = self._exchanging / (self._stepping + self._exchanging)
        took = "ranks stood still for an exchange for" if self.overlap else "an exchange took"
        return (
            f"{took} {exchange:.1f} ms, the steps of its round took {steps:.1f} ms: {share:.0%} of "
            "the time, with the wait for the slowest rank"
        )

    def end_round(self) -> None:
        """Make all ranks equal, if they took steps since the last exchange. Collective."""
        self.land()
        if self.since:
            self.exchange()
        elif self._unmet:  # on all ranks; a flight is kept by those that have loaded weights
            with torch.no_grad():
                self._agree(self._tell())

    def _tell(self) -> torch.Tensor:
        """int64 [8]: what this rank says of itself; see `_check`."""
        self._at = (self.rounds + 1, self.steps)
        went, self._together = drift.lengths(self.fragments)
        frozen = zlib.crc32(bytes(p.requires_grad for p in self.parameters))
        mine = [self.rounds, self.steps, frozen, self._digest(), self._changed_at]
        mine += [bool(self._loaded), drift.to_bits(went), finite(self.parameters)]
        return torch.tensor(mine, dtype=torch.int64)

    def _check(self, mine: torch.Tensor) -> int:
        """The load of this round that was the last to change weights on any rank; 0: none was.
        Collective.

        Raises on every rank unless all are at the same place, with finite weights.
        """
        told = self._meet(mine).tolist()
        number = self._at[0]
        at = max(int(row[4]) for row in told)
        for rank, row in enumerate(told):
            for (what, said), theirs, first in zip(_TOLD, row, told[0], strict=False):
                if theirs == first:
                    continue
                said = f"has {said} than rank 0"
                if what in ("rounds", "steps"):
                    said = f"has {theirs} {what} behind it, rank 0 has {first}"
                raise CommError(
                    f"exchange {number}: rank {rank} {said}",
                    "load, freeze and write weights, and load model.evener's state, on every rank "
                    "alike",
                )
            if at and row[5] != told[0][5]:
                raise self._loaded_apart(rank)
            if not row[-1]:
                raise CommError(
                    f"exchange {number}: rank {rank} has weights that are not finite",
                    "lower its learning rate or clip gradients; nothing of it was sent",
                )
        self.drift = drift.of([drift.from_bits(row[6]) for row in told], self._together)
        return at

    def _loaded_apart(self, rank: int) -> CommError:
        return CommError(
            f"exchange {self._at[0]}: rank {rank} has loaded other weights than rank 0",
            "load weights on every rank alike; model.evener's state too, where each rank has its "
            "own",
        )

    def _meet(self, mine: torch.Tensor) -> torch.Tensor:
        """int64 [ranks, n]: what each rank has where this one has `mine`, int64 [n]. Collective."""
        rows = [torch.empty_like(mine) for _ in range(self.communicators.size)]
        try:
            dist.all_gather(rows, mine, group=self.communicators.control.handle)
        except RuntimeError as error:
            raise self._alone(error) from error
        return torch.stack(rows)

    def _alone(self, error: RuntimeError) -> CommError:
        first = " ".join(str(error).split())[:200]
        return CommError(
            f"rank {self.communicators.rank} came to exchange {self._at[0]} after {self._at[1]} "
            "steps, and a peer is gone or did not come within "
            f"{self.communicators.waits}: {first}",
            "give every rank as many steps; or look at the log of the rank that is gone",
        )

    def _digest(self) -> int:
        """A digest of the shared weights."""
        return digest([fragment.bucket.buffer for fragment in self.fragments])

    def _own_weights(self) -> int:
        """A digest of this rank's weights, whatever the buckets are."""
        found = 0
        for parameter in self.parameters:
            bits = parameter.detach().contiguous().view(-1).view(torch.uint8)
            found = zlib.crc32(str(int(bits.sum(dtype=torch.int64))).encode(), found)
        return found

    # --- weights that the program loads ---

    def will_load(self) -> None:
        """The program loads weights into the model, or a part of it."""
        if self._before is None:
            self._before = [parameter.detach().clone() for parameter in self.parameters]

    def settle(self) -> None:
        """Before a step: remember what was loaded since the last one. The next exchange asks."""
        before, self._before = self._before, None
        if before is None:
            return
        at = self.since + 1
        # After a state, weights that do not belong to it are others, whatever was here before it.
        if self._state_loaded:
            changed = self._own_weights() != self._state_of
        else:
            changed = not all(map(torch.equal, before, self.parameters))
        if changed:
            self._changed_at = at
        made = []
        with torch.no_grad():
            for fragment in self.fragments:
                whole = torch.zeros_like(fragment.bucket.buffer)
                for view, parameter in zip(fragment.views(whole), fragment.parameters, strict=True):
                    view.copy_(parameter)
                made.append(whole)
        self._loaded[at] = made
        for old in sorted(self._loaded)[:-_LOADS]:
            if old != self._changed_at:
                del self._loaded[old]

    def _begin_loaded(self, at: int) -> None:
        """The round began with the weights of this load, on all ranks. Collective."""
        loaded = self._loaded.get(at)
        digests = self._meet(torch.tensor([-1 if loaded is None else digest(loaded)]))
        for rank, (theirs,) in enumerate(digests.tolist()):
            if theirs != digests[0].item():
                raise self._loaded_apart(rank)
        assert loaded is not None
        for fragment, whole in zip(self.fragments, loaded, strict=True):
            fragment.bucket.buffer.copy_(whole)
            if fragment.momentum is not None:
                fragment.momentum.zero_()
            fragment.exchange.state.residual = None
        if self.communicators.rank == 0:
            logger.info("weights were loaded: the round began with them, without momentum")

    # --- checkpoints ---

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on besides the model's and the optimizer's own state.

        Not collective; tensors are copies on the CPU. Shared weights and momentum are equal on all
        ranks. What compression has not sent is this rank's own, and is taken over only where the
        same rank loads it: save on each rank to resume with equal bits. An exchange that is on its
        way is waited for, and saved as what is to be applied.
        """
        self.settle()
        if (flight := self._flight) is not None:
            self._wait(flight)
        kept = {
            number: {"steps": fragment.exchange.state.steps, "residual": saved(residual)}
            for number, fragment in enumerate(self.fragments)
            if (residual := fragment.exchange.state.residual) is not None
        }
        return {
            "version": VERSION,
            "steps": self.steps,
            "rounds": self.rounds,
            "since": self.since,
            "pace": [self.every, self.overlap] if self._chosen else None,
            "weights": self._own_weights(),
            "shared": self._by_name([f.bucket.buffer for f in self.fragments]),
            "momentum": self._by_name([f.momentum for f in self.fragments]),
            "changed_at": self._changed_at,
            "loaded": {at: self._by_name(one) for at, one in self._loaded.items()},
            "layout": self._layout(),
            "kept": kept,
            "flight": None if flight is None else self._flight_state(flight),
        }

    def _flight_state(self, flight: Flight) -> dict[str, Any]:
        sent = {
            name: saved(weight)
            for fragment, weights in zip(self.fragments, flight.sent, strict=True)
            for name, weight in zip(fragment.exchange.names, weights, strict=True)
        }
        return {"landed": flight.landed, "mean": self._by_name(flight.wholes), "sent": sent}

    def _by_name(self, buffers: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Copies of what lies in `buffers`, one a fragment, by parameter."""
        found: dict[str, torch.Tensor] = {}
        for fragment, buffer in zip(self.fragments, buffers, strict=False):
            if buffer is not None:
                views = map(saved, fragment.views(buffer))
                found.update(zip(fragment.exchange.names, views, strict=True))
        return found

    def _filled(self, fragment: Fragment, values: dict[str, torch.Tensor]) -> torch.Tensor:
        """A buffer of this fragment's with `values` by parameter, zeros for others."""
        buffer = torch.zeros_like(fragment.bucket.buffer)
        for name, view in zip(fragment.exchange.names, fragment.views(buffer), strict=True):
            if name in values:
                view.copy_(values[name])
        return buffer

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave: on all ranks alike, between steps.

        Load the model's weights too, before or after: they are where this rank was in its round.
        Raises UsageError for the state of other parameters.
        """
        if state.get("version") != VERSION or "shared" not in state:
            raise UsageError("this is no state of local steps", "give what state_dict() returned")
        for fragment in self.fragments:
            for slot in fragment.bucket.slots:
                name, shape = self.names[slot.index], self.parameters[slot.index].shape
                theirs = state["shared"].get(name)
                if theirs is None or theirs.shape != shape:
                    raise UsageError(
                        f"the state has no parameter {name} {list(shape)}",
                        "load the state of the same model",
                    )
        same = list(state["layout"]) == self._layout()
        if self._flight is not None:
            self._wait(self._flight)  # it is nobody's any more, and still under way
        with torch.no_grad():
            for number, fragment in enumerate(self.fragments):
                fragment.bucket.buffer.copy_(self._filled(fragment, state["shared"]))
                if fragment.momentum is not None:
                    fragment.momentum.copy_(self._filled(fragment, state["momentum"]))
                kept = state["kept"].get(number) if same else None
                own = fragment.exchange.state
                own.steps = 0 if kept is None else int(kept["steps"])
                own.residual = None
                if kept is not None:
                    own.residual = kept["residual"].to(self.device, copy=True)
        if state["kept"] and not same:
            logger.info("what another rank or world has not sent yet is not taken over")
        self.steps, self.rounds = int(state["steps"]), int(state["rounds"])
        self.since = int(state["since"])
        if self.options.auto and (chosen := state.get("pace")):
            (self.every, self.overlap), self._chosen = chosen, True
        self._changed_at = int(state["changed_at"])
        self._loaded = {
            at: [self._filled(fragment, values) for fragment in self.fragments]
            for at, values in state["loaded"].items()
        }
        # Other ranks may have kept a flight.
        self._flight, self._unmet = None, bool(self.overlap)
        if (flight := state.get("flight")) is not None:
            self._flight = Flight(
                []
                if flight["landed"]
                else [self._filled(f, flight["mean"]) for f in self.fragments],
                [
                    [
                        flight["sent"][name].to(parameter.device, parameter.dtype, copy=True)
                        for name, parameter in zip(f.exchange.names, f.parameters, strict=True)
                    ]
                    for f in self.fragments
                ],
                landed=flight["landed"],
                asks=True,
            )
        self._before = None
        self._state_loaded, self._state_of = True, int(state["weights"])

    def _layout(self) -> list[Any]:
        """What must be equal for a residual to be taken over."""
        communicators = self.communicators
        parts = [
            [fragment.exchange.wire.name, *fragment.exchange.names] for fragment in self.fragments
        ]
        return [communicators.rank, communicators.size, communicators.route.shards, *parts]

    # --- what it is doing ---

    @property
    def exchanges(self) -> list[Exchange]:
        """The exchange of each fragment."""
        return [fragment.exchange for fragment in self.fragments]

    def describe(self) -> str:
        """One line: ranks, steps per round, outer step, forms, bytes and times."""
        forms = [exchange.wire.name for exchange in self.exchanges]
        counts = ", ".join(f"{forms.count(form)} {form}" for form in dict.fromkeys(forms))
        sent = sum(exchange.sent_bytes for exchange in self.exchanges) / 1e6
        size = f"{sent:.1f} MB" if sent >= 0.1 else f"{1e3 * sent:.1f} kB"
        options = self.options
        took = f"; {self._times()}" if self._timed else ""
        behind = f"; behind the next {self.overlap}" if self.overlap else ""
        return (
            f"{self.communicators.size} ranks train by themselves and average every "
            f"{self.every} steps (outer lr {options.outer_lr:g}, momentum "
            f"{options.outer_momentum:g}{behind}); each sends {size} per exchange in "
            f"{len(forms)} {'buckets' if len(forms) > 1 else 'bucket'}: {counts}{took}"
        )

    def detach(self) -> None:
        """Remove the hooks. May be called twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _end(self) -> bool:
        """`detach`, and wait for what is on its way; whether all is well with the groups."""
        self.detach()
        if self._stats is not None:
            self._stats.close()
        flight, self._flight = self._flight, None
        try:
            if flight is not None:
                self._wait(flight)
        except CommError:
            return False
        finally:
            if self._lanes is not None:
                self._lanes.close()
        return True

    def drop(self) -> None:
        """`detach`, for whom nobody calls `close`: ranks collect garbage at different moments."""
        if self._end():
            self.communicators.drop()

    def close(self) -> None:
        """`detach`, and give the groups to the next user: in the same order on all ranks."""
        if self._end():
            self.communicators.close()
