"""Experts spread over ranks: the layer's forward and backward passes with tokens on the way.

A batch goes in chunks. Forward: all chunks leave, then each is computed as it comes and its sums
leave again; the shared expert runs meanwhile. Backward, the same with gradients: as soon as those
of the tokens have left, the gradients of the matrices are made (delayed), and autograd goes on with
the shared expert's backward pass; what comes back is waited for where the layer began (`_Begin`).
The ways were learnt in forward, so backward waits for no counts.

Where parts of a batch take turns (`turns`), a part hands over when its tokens have left and when
its sums have; each part has a road of its own.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from evener.comm import watch
from evener.errors import UsageError
from evener.moe import core, permute
from evener.moe.gate import Activation
from evener.moe.lane import Lane, Ticket
from evener.moe.positions import Positions
from evener.moe.route import Counts, Ranks, Trip, Way, count
from evener.moe.turns import hand_over, part
from evener.moe.wire import Wire

logger = logging.getLogger("evener.moe")
CHUNKS = (1, 2, 4)  # the numbers that `chunks="auto"` tries


class Held(Protocol):
    """This rank's experts: what is used of `evener.moe.layer.Experts`."""

    training: bool
    load: torch.Tensor
    activation: Activation
    gate_up_proj: torch.nn.Parameter
    down_proj: torch.nn.Parameter

    def note(self, at: Positions, experts: torch.Tensor | None = None) -> None: ...


class MoEError(watch.RankError):
    """Experts failed, on this rank or on another. `rank`: where; -1: not known."""


@dataclass(frozen=True)
class Road:
    """Groups, and the lane in which their collectives have one order."""

    ranks: Ranks
    lane: Lane


@dataclass
class Shared:
    """What the layers of one model share. way: None until the first batch was probed.

    roads: of each part of a batch that takes turns; the first is also that of a whole batch.
    mean: gradients of experts are those of the mean of all ranks' losses, as DDP's are.
    """

    roads: list[Road]
    way: Way | None
    chunks: int
    wire: Wire
    watch: watch.Watch
    replicas: dist.ProcessGroup | None = None
    mean: bool = True
    trial: Trial | None = None

    @property
    def ranks(self) -> Ranks:
        return self.roads[0].ranks

    @property
    def lane(self) -> Lane:
        return self.roads[0].lane

    def road(self) -> Road:
        """The road of the part that this thread runs."""
        mine = part()
        return self.roads[0 if mine is None else mine.index]


@dataclass
class Trial:
    """The first passes of one layer try numbers of chunks, in turns; the fastest stays."""

    layer: str = ""
    passes: int = -1  # the first one makes connections and chooses the way
    seconds: list[float] = field(default_factory=lambda: [math.inf] * len(CHUNKS))

    def chunks(self) -> int:
        """Chunks of the next pass."""
        return CHUNKS[max(self.passes, 0) % len(CHUNKS)]

    def note(self, seconds: float) -> bool:
        """The time of a pass; whether that was the last one."""
        if self.passes >= 0:
            at = self.passes % len(CHUNKS)
            self.seconds[at] = min(self.seconds[at], seconds)
        self.passes += 1
        return self.passes == 2 * len(CHUNKS)


@dataclass
class _Pass:
    """One forward pass of a layer and its backward pass."""

    shared: Shared
    road: Road
    trips: list[Trip]
    name: str
    activation: Activation
    lossy: bool
    sizes: list[int]
    come: list[Ticket[tuple[torch.Tensor, Positions, torch.Tensor]]]
    # What `_End` waits for.
    back: list[Ticket[torch.Tensor]] = field(default_factory=list)
    # Backward: what `_Through` waits for, and what `_Begin` does.
    gone: list[Ticket[torch.Tensor]] = field(default_factory=list)
    to_tokens: list[Ticket[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=list)


class _Begin(torch.autograd.Function):
    """Nothing forward; backward: the gradients of tokens and weights have come."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weights: torch.Tensor, state: _Pass) -> Any:
        ctx.state = state
        return x.view_as(x), weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        state = ctx.state
        with state.shared.watch.step(f"the backward pass of {state.name}"):
            found = [ticket.wait() for ticket in state.to_tokens]
        state.to_tokens = []
        to_x, to_weights = zip(*found, strict=True)
        return torch.cat(to_x), torch.cat(to_weights), None


class _Through(torch.autograd.Function):
    """Tokens that have come > sums of their experts, which leave again. `x` is for autograd."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor,
        down: torch.Tensor, state: _Pass,
    ) -> torch.Tensor:  # fmt: skip
        keep: list[torch.Tensor] = []
        for trip, come in zip(state.trips, state.come, strict=True):
            tokens, at, of_rows = come.wait()
            out, kept = core.run(tokens, of_rows, at, gate_up, down, state.activation)
            keep += [kept.rows, kept.both]
            del tokens, kept
            state.back.append(state.road.lane.submit(trip.back, out))
        state.come = []
        ctx.state, ctx.like = state, weights
        ctx.save_for_backward(gate_up, down, *keep)
        return _nothing(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        state: _Pass = ctx.state
        needs = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        with state.shared.watch.step(f"the backward pass of {state.name}"):
            of_matrices = _backward(state, ctx.saved_tensors, ctx.like, needs)
        # The true ones are what `_Begin` waits for.
        return _nothing(gradient), _nothing(ctx.like), *of_matrices, None


class _End(torch.autograd.Function):
    """The sums have come; backward: their gradients leave. `through` is for autograd."""

    @staticmethod
    def forward(ctx: Any, through: torch.Tensor, state: _Pass) -> torch.Tensor:
        ctx.state = state
        found = torch.cat([ticket.wait() for ticket in state.back])
        state.back = []
        assert len(through) == len(found)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        state: _Pass = ctx.state
        shared = state.shared
        with shared.watch.step(f"the backward pass of {state.name}"):
            parts = gradient.contiguous().split(state.sizes)
            state.gone = [
                state.road.lane.submit(_carried, trip, part, shared.wire, state.lossy)
                for trip, part in zip(state.trips, parts, strict=True)
            ]
        return _nothing(gradient), None


def _nothing(like: torch.Tensor) -> torch.Tensor:
    """Zeros of that shape, of one value in memory."""
    return like.new_zeros(()).expand(like.shape)


def _backward(
    state: _Pass, saved: Any, like: torch.Tensor, needs: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The gradients of the matrices; those of the tokens are on their way."""
    shared = state.shared
    gate_up, down, *keep = saved
    come, state.gone = state.gone, []
    made = []
    for at, (trip, ticket) in enumerate(zip(state.trips, come, strict=True)):
        rows = ticket.wait()
        assert trip.at is not None and trip.weights is not None
        kept = core.Kept(trip.at, trip.weights, keep[2 * at], keep[2 * at + 1], state.activation)
        to_rows, to_weights = core.back(kept, rows, gate_up, down)
        made.append(kept)
        state.to_tokens.append(state.road.lane.submit(_home, trip, to_rows, to_weights, like))
    if not needs:
        return None, None
    # While those travel: nobody else waits for these.
    to_gate_up, to_down = made[0].of_matrices()
    for kept in made[1:]:
        more = kept.of_matrices()
        to_gate_up += more[0]
        to_down += more[1]
    if shared.mean:
        to_gate_up /= shared.ranks.size
        to_down /= shared.ranks.size
    return to_gate_up, to_down


def _home(
    trip: Trip, rows: torch.Tensor, weights: torch.Tensor, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of tokens, and of weights as `like` [tokens, k], go back to their tokens."""
    to_tokens, to_weights = trip.gradients_back(rows, weights, like.shape[1])
    return to_tokens, to_weights.to(like.dtype)


def _carried(trip: Trip, x: torch.Tensor, wire: Wire, lossy: bool) -> torch.Tensor:
    """Rows go to their experts, in the wire's form if that is in use."""
    if not lossy:
        return trip.there(x)
    return wire.decode(trip.there(wire.encode(x)), x.shape[1], x.dtype)


class Parallel:
    """A layer's parallelism: which rank has which expert, and the layer's passes.

    held: int64 [experts], the experts in the order of ranks and of their places there.
    """

    def __init__(self, shared: Shared, experts: int, name: str = "") -> None:
        self.shared, self.name, self.experts = shared, name, experts
        # For each thread: parts of a batch are in one layer at a time.
        self._mine = threading.local()
        self.place(torch.arange(experts))

    def place(self, held: torch.Tensor) -> None:
        """Experts lie in this order from now on; the caller moves their matrices."""
        each = self.experts // self.shared.ranks.size
        owner, slot = (torch.full((self.experts + 1,), -1) for _ in range(2))
        owner[held] = torch.arange(self.experts) // each
        slot[held] = torch.arange(self.experts) % each
        self.held, device = held, self.shared.lane.device
        self.owner, self.slot = owner.to(device), slot.to(device)

    @property
    def mine(self) -> torch.Tensor:
        """The experts of this rank, in the order of its matrices."""
        each = self.experts // self.shared.ranks.size
        return self.held[self.shared.ranks.rank * each :][:each]

    def meanwhile(self, module: Callable[[torch.Tensor], Any], x: torch.Tensor) -> None:
        """Run module(x) while the tokens of the next pass travel; `done_meanwhile` gives it."""
        self._mine.shared_expert = lambda: module(x)

    def done_meanwhile(self) -> Any:
        """What `meanwhile` gave; None where the layer did not run since."""
        own, self._mine.own = getattr(self._mine, "own", None), None
        return own

    def __call__(
        self, layer: Held, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor,
        limit: int | None,
    ) -> torch.Tensor:  # fmt: skip
        shared = self.shared
        lane = shared.lane
        name = f"experts {self.name}" if self.name else "experts"
        if x.device.type != lane.device.type:
            raise UsageError(f"tokens on {x.device}, experts spread over {lane.device}",
                             "move the model first, then convert it")  # fmt: skip
        weights = weights.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
        with shared.watch.step(name):
            trial = shared.trial
            if trial is None or trial.layer not in ("", self.name):
                return self._pass(name, layer, x, experts, weights, limit)
            trial.layer, shared.chunks = self.name, trial.chunks()
            begin = time.perf_counter()
            out = self._pass(name, layer, x, experts, weights, limit)
            if out.is_cuda:
                torch.cuda.synchronize(out.device)
            if trial.note(time.perf_counter() - begin):
                self._settle(trial)
            return out

    def _settle(self, trial: Trial) -> None:
        """Keep the number of chunks that was the fastest, by the slowest rank. Collective."""
        shared = self.shared
        took = torch.tensor(trial.seconds, dtype=torch.float64, device=shared.lane.device)
        ticket = shared.lane.submit(_slowest, shared.ranks, took)
        ticket.hold()
        slowest = ticket.wait().tolist()
        shared.chunks, shared.trial = CHUNKS[slowest.index(min(slowest))], None
        if shared.ranks.rank == 0:
            said = ", ".join(f"{n}: {t * 1e3:.2f} ms" for n, t in zip(CHUNKS, slowest, strict=True))
            logger.info("experts %s: %d chunks (%s)", self.name, shared.chunks, said)

    def _pass(
        self, name: str, layer: Held, x: torch.Tensor, experts: torch.Tensor,
        weights: torch.Tensor, limit: int | None,
    ) -> torch.Tensor:  # fmt: skip
        shared, road = self.shared, self.shared.road()
        ranks, lane = road.ranks, road.lane
        with torch.no_grad():
            if limit is not None:
                at = permute.positions(experts, self.experts, limit)
                layer.note(at, experts)
                experts = torch.where(at.rows >= 0, experts, -1)
            elif layer.training:
                flat = torch.where(experts < 0, self.experts, experts).reshape(-1)
                load = x.new_zeros(self.experts + 1, dtype=layer.load.dtype)
                layer.load += load.index_add_(0, flat, load.new_ones(len(flat)))[:-1]
            told = count(self.owner[experts], ranks, shared.chunks)
            flags = torch.stack((~x.isfinite().all() | ~weights.isfinite().all(),
                                 shared.wire.bad(x))).to(told.dtype)  # fmt: skip
            told = torch.cat((told.flatten(), flags))
            meta = torch.cat((experts.to(weights.dtype), weights), 1)
        # What travels waits for this much, not for the shared expert.
        mark = lane.mark()
        counting = lane.submit(_tell, ranks, told, after=mark)
        state = _Pass(shared, road, [], name, layer.activation, False, [], [])
        begun, scaled = _Begin.apply(x, weights, state)
        shared_expert: Callable[[], Any] | None = getattr(self._mine, "shared_expert", None)
        if shared_expert is not None:
            self._mine.own, self._mine.shared_expert = shared_expert(), None
        if lane.ahead:
            hand_over()
        counting.hold()
        if shared.watch.heard is not None:  # NCCL's waits end without an error
            raise shared.watch.heard
        everyone = counting.wait().view(ranks.size, -1).tolist()
        self._judge(everyone)
        state.lossy = shared.wire.on and not any(each[-1] for each in everyone)
        shared.wire.note(not state.lossy)
        columns = ranks.nodes + 2 * ranks.size
        counts = Counts(ranks, [
            [each[c * columns :][:columns] for c in range(shared.chunks)] for each in everyone
        ])  # fmt: skip
        held = layer.gate_up_proj.shape[0]
        tokens = x.detach().tensor_split(shared.chunks)
        choices = meta.tensor_split(shared.chunks)
        if shared.way is None:
            shared.way = self._probe(counts, tokens[0], choices[0], held)
        state.sizes = [len(part) for part in tokens]
        for chunk in range(shared.chunks):
            trip = Trip(ranks, shared.way, counts, chunk)
            state.trips.append(trip)
            state.come.append(lane.submit(
                self._dispatch, trip, tokens[chunk], choices[chunk], held, state.lossy, after=mark
            ))  # fmt: skip
        if not lane.ahead:
            hand_over()
        through = _Through.apply(begun, scaled, layer.gate_up_proj, layer.down_proj, state)
        hand_over()
        out: torch.Tensor = _End.apply(through, state)
        return out

    def _probe(self, counts: Counts, x: torch.Tensor, meta: torch.Tensor, held: int) -> Way:
        """The faster way for a batch as this one, by the slowest rank. Collective."""
        road = self.shared.road()
        ranks, lane = road.ranks, road.lane
        if ranks.outer is None:
            return "flat"
        ways: tuple[Way, ...] = ("two", "flat")
        took = x.new_zeros(len(ways), dtype=torch.float64)
        for _ in range(2):  # the first makes connections
            for at, way in enumerate(ways):
                trip = Trip(ranks, way, counts, 0)
                lane.submit(_wait_for_all, ranks, x).hold()
                begin = time.perf_counter()
                rows, *_ = (gone := lane.submit(
                    self._dispatch, trip, x, meta, held, False)).wait()  # fmt: skip
                gone.hold()
                lane.submit(trip.back, rows).hold()
                took[at] = time.perf_counter() - begin
        ticket = lane.submit(_slowest, ranks, took)
        ticket.hold()
        slowest = ticket.wait().tolist()
        best = min(range(len(ways)), key=slowest.__getitem__)
        said = ", ".join(f"{w} {t * 1e3:.2f} ms" for w, t in zip(ways, slowest, strict=True))
        if ranks.rank == 0:
            logger.info("experts %s: tokens go %s (%s)", self.name, ways[best], said)
        return ways[best]

    def _dispatch(
        self, trip: Trip, x: torch.Tensor, meta: torch.Tensor, held: int, lossy: bool
    ) -> tuple[torch.Tensor, Positions, torch.Tensor]:
        wire = self.shared.wire
        come = trip.start(wire.encode(x) if lossy else x, meta, self.owner, self.slot, held)
        if lossy:
            come = wire.decode(come, x.shape[1], x.dtype)
        assert trip.at is not None and trip.weights is not None
        return come, trip.at, trip.weights

    def _judge(self, everyone: list[list[int]]) -> None:
        for rank, each in enumerate(everyone):
            if each[-2]:
                raise MoEError(
                    f"values that are not finite came into experts {self.name} on rank {rank}",
                    "no weight was changed: zero_grad() and skip the batch, lower the learning "
                    "rate, or clip gradients", rank,
                )  # fmt: skip


def _tell(ranks: Ranks, mine: torch.Tensor) -> torch.Tensor:
    """What all ranks told, on the host once the ticket was held."""
    everyone = mine.new_empty(ranks.size * len(mine))
    dist.all_gather_into_tensor(everyone, mine, group=ranks.group)
    if not everyone.is_cuda:
        return everyone
    # Copied here, in the lane: a copy in the computation's stream would come after all that is
    # enqueued there, and tokens would leave when the shared expert is done.
    host = torch.empty(everyone.shape, dtype=everyone.dtype, pin_memory=True)
    return host.copy_(everyone, non_blocking=True)


def _wait_for_all(ranks: Ranks, like: torch.Tensor) -> None:
    dist.all_reduce(like.new_zeros(1), group=ranks.group)


def _slowest(ranks: Ranks, took: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(took, dist.ReduceOp.MAX, group=ranks.group)
    return took
