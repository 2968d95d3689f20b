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

Before anything is sent the ranks meet: a few numbers from each say whether all are at the same
exchange, with the same shared weights, bit for bit, and with finite weights. Where they are not,
every rank raises the same error, which names the rank. A rank that is missing is an error after the
group's timeout.

Weights that the program loads into the model are no step: at the next exchange they are theta, and
the momentum is forgotten, unless the state of this module was loaded too. Where a load leaves all
weights of all ranks as they were, nothing happens. That must be asked: of ranks that all load what
rank 0 has saved, rank 0 alone is where it was.
"""

from __future__ import annotations

import logging
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from evener.comm import wires
from evener.comm.agree import require_agreement
from evener.comm.buckets import Bucket, Buckets, Slot, place
from evener.comm.errors import CommError
from evener.comm.exchange import Exchange, Step
from evener.comm.groups import Communicators
from evener.comm.options import Options
from evener.comm.reducer import device_of
from evener.errors import UsageError

logger = logging.getLogger("evener.comm")

VERSION = 1
# Sums of bits are taken apart in this many columns, so that two changes rarely cancel.
_COLUMNS = 32
# A load that changed nothing here may have changed weights elsewhere: this many are remembered.
_LOADS = 3
# What the ranks tell each other before an exchange, and how an error calls it.
_TOLD = (
    ("rounds", ""),
    ("steps", ""),
    ("frozen", "other parameters frozen"),
    ("digest", "other shared weights"),
)


@dataclass
class Fragment:
    """What is exchanged as one: `shared` weights by parameter, views of the bucket's buffer, and
    the outer `momentum`, of the same layout; None where there is none.
    """

    bucket: Bucket
    exchange: Exchange
    parameters: list[torch.nn.Parameter]
    shared: list[torch.Tensor]
    momentum: torch.Tensor | None

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The parameters' places in `buffer`, which is laid out as the bucket is."""
        return [
            place(buffer, Slot(slot.index, slot.offset, slot.numel), parameter)
            for slot, parameter in zip(self.bucket.slots, self.parameters, strict=True)
        ]

    def run(self, options: Options) -> None:
        """Average how far the ranks went, and go on from where that leads. Collective."""
        route = self.exchange.route
        whole = torch.zeros_like(self.bucket.buffer)
        means = self.views(whole)
        for mean, shared, parameter in zip(means, self.shared, self.parameters, strict=True):
            torch.sub(rounded(shared, parameter), parameter.to(shared.dtype), out=mean)
        if route.scaling.pack != 1.0:
            whole.mul_(route.scaling.pack)
        if route.scatter is not None:
            route.reduce_inside(whole)
        start, end = self.exchange.place()
        self.exchange.run(whole[start:end], Step())
        if route.gather is not None:
            route.spread_inside(whole)
        kept: Sequence[torch.Tensor | None] = [None] * len(means)
        if self.momentum is not None:
            kept = self.views(self.momentum)
        for mean, momentum, shared, parameter in zip(
            means, kept, self.shared, self.parameters, strict=True
        ):
            outer_step(mean, momentum, shared, options, parameter.requires_grad)
            parameter.copy_(shared)


def outer_step(
    mean: torch.Tensor,
    momentum: torch.Tensor | None,
    shared: torch.Tensor,
    options: Options,
    trained: bool,
) -> None:
    """SGD with Nesterov momentum on `shared`; `mean` is used up. Not `trained`: what momentum there
    is would move a weight that the program has frozen, and is forgotten.
    """
    if momentum is not None:
        if not trained:
            momentum.zero_()
        momentum.mul_(options.outer_momentum).add_(mean)
        mean.add_(momentum, alpha=options.outer_momentum)
        if not trained:
            momentum.zero_()
    shared.add_(mean, alpha=-options.outer_lr)


def rounded(shared: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The shared weights as this parameter can hold them, in their own dtype."""
    return shared.to(parameter.dtype).to(shared.dtype)


class Rounds:
    """The rounds of one model: `model.evener` where a model takes local steps.

    `stepped` is called after each step of the program; `exchanged` is called at the end of each
    exchange, on all ranks, for what has to be equal besides (buffers). `steps` and `rounds` count
    from the start of the training, `since` the steps since the last exchange.
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
        self._before: list[torch.Tensor] | None = None  # the weights, when the program loads others
        # Of this round: the last load that changed a weight here (0: none), and the weights after
        # some loads, by fragment. A load's number is the step before which it came, from 1, which
        # is the same on all ranks.
        self._changed_at = 0
        self._loaded: dict[int, list[torch.Tensor]] = {}
        self._state_loaded = False
        self._state_of = 0  # the weights with which it was saved
        self._last: float | None = None  # when an exchange ended
        self._stepping = self._exchanging = 0.0  # seconds
        self._timed = 0
        self.communicators = Communicators(options, self.device, group)
        require_agreement(self.communicators, self.names, self.parameters, options)
        self.fragments = self._lay_out()
        with torch.no_grad():
            self._start_equal()
        hook = _LoadHook(self)
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
            self._write(fragment)

    @staticmethod
    def _write(fragment: Fragment) -> None:
        for shared, parameter in zip(fragment.shared, fragment.parameters, strict=True):
            parameter.copy_(shared)

    # --- steps ---

    def stepped(self) -> None:
        """The program's optimizer took a step, or its loss scaler left one out. Collective in each
        N-th call."""
        self.settle()  # again: a step that was left out did not begin
        self._state_loaded = False
        self.steps += 1
        self.since += 1
        if self.since >= self.options.every:
            self.exchange()

    def exchange(self) -> None:
        """End the round now. Collective.

        Raises CommError where the ranks are not at the same exchange, or weights are not finite.
        """
        with torch.no_grad():
            self.settle()
            mine = self._tell()  # it waits for the device, so that its time is not the exchange's
            began = time.perf_counter()
            if at := self._check(mine):
                self._begin_loaded(at)
            self._changed_at, self._loaded = 0, {}
            try:
                for fragment in self.fragments:
                    fragment.exchange.route.outer.check()
                    fragment.run(self.options)
                self.exchanged()
            except RuntimeError as error:
                raise self._alone(error) from error
        self.rounds += 1
        self.since = 0
        self._took(began)

    def _took(self, began: float) -> None:
        """An exchange has ended. Its own time counts from the second on, as that of the steps."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self._last is not None:
            self._stepping += began - self._last
            self._exchanging += now - began
            self._timed += 1
            if self._timed == 1 and self.communicators.rank == 0:
                logger.info("an exchange took %s", self._times())
        self._last = now

    def _times(self) -> str:
        """Means of the exchanges so far."""
        steps, exchange = (1e3 * t / self._timed for t in (self._stepping, self._exchanging))
        share = self._exchanging / (self._stepping + self._exchanging)
        return (
            f"{exchange:.1f} ms, the steps of its round {steps:.1f} ms: {share:.0%} of the time, "
            "with the wait for the slowest rank"
        )

    def end_round(self) -> None:
        """Make all ranks equal, if they took steps since the last exchange. Collective."""
        self.settle()
        if self.since:
            self.exchange()

    def _tell(self) -> torch.Tensor:
        """int64 [6]: what this rank says of itself; see `_check`."""
        frozen = zlib.crc32(bytes(p.requires_grad for p in self.parameters))
        mine = [self.rounds, self.steps, frozen, self._digest(), self._changed_at]
        return torch.tensor([*mine, int(_finite(self.parameters))])

    def _check(self, mine: torch.Tensor) -> int:
        """The load of this round that was the last to change weights on any rank; 0: none was.
        Collective.

        Raises on every rank unless all are at the same place, with finite weights.
        """
        told = self._meet(mine).tolist()
        for rank, row in enumerate(told):
            for (what, said), theirs, first in zip(_TOLD, row, told[0], strict=False):
                if theirs == first:
                    continue
                said = f"has {said} than rank 0"
                if what in ("rounds", "steps"):
                    said = f"has {theirs} {what} behind it, rank 0 has {first}"
                raise CommError(
                    f"exchange {self.rounds + 1}: rank {rank} {said}",
                    "load, freeze and write weights, and load model.evener's state, on every rank "
                    "alike",
                )
            if not row[-1]:
                raise CommError(
                    f"exchange {self.rounds + 1}: rank {rank} has weights that are not finite",
                    "lower its learning rate or clip gradients; nothing of it was sent",
                )
        return max(int(row[-2]) for row in told)

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
            f"rank {self.communicators.rank} came to exchange {self.rounds + 1} after {self.steps} "
            f"steps, and waited {self.communicators.waits} for its peers: {first}",
            "give every rank as many steps; or look at the log of the rank that is gone",
        )

    def _digest(self) -> int:
        """A digest of the shared weights."""
        return _digest([fragment.bucket.buffer for fragment in self.fragments])

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
        digests = self._meet(torch.tensor([-1 if loaded is None else _digest(loaded)]))
        for rank, (digest,) in enumerate(digests.tolist()):
            if digest != digests[0].item():
                raise CommError(
                    f"exchange {self.rounds + 1}: rank {rank} has loaded other weights than rank 0",
                    "load weights on every rank alike; model.evener's state too, where each rank "
                    "has its own",
                )
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
        same rank loads it: save on each rank to resume with equal bits.
        """
        self.settle()
        kept = {
            number: {"steps": fragment.exchange.state.steps, "residual": _saved(residual)}
            for number, fragment in enumerate(self.fragments)
            if (residual := fragment.exchange.state.residual) is not None
        }
        return {
            "version": VERSION,
            "steps": self.steps,
            "rounds": self.rounds,
            "since": self.since,
            "weights": self._own_weights(),
            "shared": self._by_name([f.bucket.buffer for f in self.fragments]),
            "momentum": self._by_name([f.momentum for f in self.fragments]),
            "changed_at": self._changed_at,
            "loaded": {at: self._by_name(one) for at, one in self._loaded.items()},
            "layout": self._layout(),
            "kept": kept,
        }

    def _by_name(self, buffers: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Copies of what lies in `buffers`, one a fragment, by parameter."""
        found: dict[str, torch.Tensor] = {}
        for fragment, buffer in zip(self.fragments, buffers, strict=False):
            if buffer is not None:
                views = map(_saved, fragment.views(buffer))
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
        self._changed_at = int(state["changed_at"])
        self._loaded = {
            at: [self._filled(fragment, values) for fragment in self.fragments]
            for at, values in state["loaded"].items()
        }
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

    @property
    def every(self) -> int:
        """Steps per round."""
        return self.options.every

    def describe(self) -> str:
        """One line: ranks, steps per round, outer step, forms, bytes and times."""
        forms = [exchange.wire.name for exchange in self.exchanges]
        counts = ", ".join(f"{forms.count(form)} {form}" for form in dict.fromkeys(forms))
        sent = sum(exchange.sent_bytes for exchange in self.exchanges) / 1e6
        size = f"{sent:.1f} MB" if sent >= 0.1 else f"{1e3 * sent:.1f} kB"
        options = self.options
        took = f"; an exchange took {self._times()}" if self._timed else ""
        return (
            f"{self.communicators.size} ranks train by themselves and average every "
            f"{options.every} steps (outer lr {options.outer_lr:g}, momentum "
            f"{options.outer_momentum:g}); each sends {size} per exchange in "
            f"{len(forms)} buckets: {counts}{took}"
        )

    def detach(self) -> None:
        """Remove the hooks. May be called twice."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def drop(self) -> None:
        """`detach`, for whom nobody calls `close`: ranks collect garbage at different moments."""
        self.detach()
        self.communicators.drop()

    def close(self) -> None:
        """`detach`, and give the groups to the next user: in the same order on all ranks."""
        self.detach()
        self.communicators.close()


def _digest(buffers: Sequence[torch.Tensor]) -> int:
    """Equal for equal bits."""
    found = 0
    for buffer in buffers:
        bits = buffer.view(torch.int32).view(-1, _COLUMNS)
        found = zlib.crc32(bits.sum(0, dtype=torch.int64).cpu().numpy().tobytes(), found)
    return found


def _finite(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether all entries of all of them are; waits for the device once."""
    found = [p.detach() for p in parameters if p.numel()]
    if not found:
        return True
    largest = torch._foreach_norm(found, float("inf"))
    return bool(torch.stack([one.isfinite() for one in largest]).all())


def _saved(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU without the buffer that it is a view of."""
    return tensor.detach().to("cpu", copy=True).clone()


class _LoadHook:
    """Tells `rounds` of a `load_state_dict`. Copies of a module, by any way, have an idle one."""

    def __init__(self, rounds: Rounds | None = None) -> None:
        self._rounds = None if rounds is None else weakref.ref(rounds)

    def __call__(self, *_: Any) -> None:
        rounds = None if self._rounds is None else self._rounds()
        if rounds is not None:
            rounds.will_load()

    def __reduce__(self) -> Any:
        return _LoadHook, ()
