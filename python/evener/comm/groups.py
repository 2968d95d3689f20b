"""The process groups of a reduction, and the scaling that goes with their backend.

Reduce-scatter and all-gather of a node have a communicator each, although their ranks are the same:
on one communicator the all-gather of a bucket would wait for the reduce-scatter of the next.

Where nodes differ in size (`world.topology`), shards are reduced to their owners one by one, and
sent from there to the node: no library's reduce-scatter knows ranks that get nothing. Every rank
makes all three groups, some of itself alone, because groups are named by how many there are.

Groups are made once and lent: torch names a group of some ranks by the number of groups that exist,
so a group made after another was destroyed can get its name, and then finds the addresses of the
dead one in the store. What a closed reducer gives back is lent again, and all of them end with the
default process group.

Ranks collect garbage at different moments, so what a dropped reducer had is lent again only once
all its ranks have dropped it: that is asked where the next reducer is made (`_meet_parent`).
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evener.base import settings
from evener.comm import transport
from evener.comm.buckets import padded
from evener.comm.codecs import sums
from evener.comm.errors import CommError
from evener.comm.options import Options
from evener.comm.scratch import Scratch
from evener.comm.transport import Carrier, Transport
from evener.comm.world import gloo, world
from evener.comm.world.topology import Levels, host_identity, levels

logger = logging.getLogger("evener.comm")
_CAPTURED: list[bool] = []  # that it was said

# A sum over a transport is taken in pieces of this many bytes, so that its scratch memory stays
# within twice that on each lane.
PIECE = 128 << 20


@dataclass(frozen=True)
class Group:
    """A communicator. `rank` and `size` are this process's in it.

    An outer group may have a `transport`; then its operations go there. All of them enqueue on the
    current stream on a GPU, and block on a CPU.
    """

    handle: dist.ProcessGroup
    rank: int
    size: int
    transport: Transport | None = None
    # What is received, what is sent, and this rank's part of the sum.
    _scratch: tuple[Scratch, Scratch, Scratch] = field(
        default_factory=lambda: (Scratch(), Scratch(), Scratch()), compare=False, repr=False
    )

    def _carries(self, tensor: torch.Tensor) -> Transport | None:
        """The transport, but not into a CUDA graph: a host's thread cannot be replayed."""
        if self.transport is None or not tensor.is_cuda:
            return self.transport
        if not torch.cuda.is_current_stream_capturing():
            return self.transport
        if not _CAPTURED:
            _CAPTURED.append(True)
            logger.info("a CUDA graph is captured: NCCL carries what is in it between nodes")
        return None

    def gathers_sums(self, tensor: torch.Tensor) -> bool:
        """Whether a sum of `tensor` is each of two ranks having both, over the transport."""
        small = tensor.nbytes <= PIECE
        return self.size == 2 and small and self._carries(tensor) is not None

    def room(self, received: torch.Tensor) -> torch.Tensor | None:
        """Where in `received` [size * n] this rank's payload of an all-gather may be written.

        None where it needs memory of its own, which costs a copy: Gloo.
        """
        if received.device.type == "cpu" and self._carries(received) is None:
            return None
        n = received.numel() // self.size
        return received[self.rank * n : (self.rank + 1) * n]

    def all_gather(self, received: torch.Tensor, payload: torch.Tensor) -> None:
        """`received` [size * n] <- every rank's `payload` [n], contiguous, in rank order.

        `payload` may be what `room` gives.
        """
        if (transport := self._carries(payload)) is None:
            dist.all_gather_into_tensor(received, payload, group=self.handle)
        else:
            transport.all_gather(received, payload)

    def all_to_all(self, received: torch.Tensor, payload: torch.Tensor) -> None:
        """Part r of `payload` [size * n] goes to rank r; part r of `received` came from there."""
        if (transport := self._carries(payload)) is None:
            dist.all_to_all_single(received, payload, group=self.handle)
        else:
            transport.all_to_all(received, payload)

    def all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """`tensor`, contiguous, becomes the sum (SUM) or mean (AVG) over the ranks, in place.

        Over a transport all ranks end with the same bits: parts are added in rank order, 16-bit
        ones in float32 and rounded once (`codecs.sums`). Raises ValueError for another `op`.
        """
        if self._carries(tensor) is None:
            dist.all_reduce(tensor, op, group=self.handle)
            return
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"{op} is neither SUM nor AVG")
        scale = 1 / self.size if op == dist.ReduceOp.AVG else 1.0
        reduce = self._sum_of_two if self.size == 2 else self._sum_by_parts
        for piece in tensor.view(-1).split(max(1, PIECE // tensor.element_size())):
            reduce(piece, scale)

    def _sum_of_two(self, tensor: torch.Tensor, scale: float) -> None:
        """Each has both: as many bytes as by parts, in one exchange."""
        n = tensor.numel()
        received = self._scratch[0].get(2 * n, tensor.dtype, tensor.device)
        self.all_gather(received, tensor)
        sums.add_in_order(received.view(2, n), scale, tensor)

    def _sum_by_parts(self, tensor: torch.Tensor, scale: float) -> None:
        """Each rank adds up one part of it (all-to-all), and all gather the sums.

        What one rank sends, 2 (size - 1) / size of the tensor, is the least there is (Patarasuk and
        Yuan, doi 10.1016/j.jpdc.2008.09.002), but for the padding to equal parts.
        """
        n, whole = tensor.numel(), tensor
        part = padded(-(-n // self.size), 16)  # entries: every part is aligned
        received, payload, own = self._scratch
        if part * self.size != n:
            whole = payload.get(part * self.size, tensor.dtype, tensor.device)
            whole[:n].copy_(tensor)
            whole[n:].zero_()
        parts = received.get(part * self.size, tensor.dtype, tensor.device)
        self.all_to_all(parts, whole)
        mine = own.get(part, tensor.dtype, tensor.device)
        sums.add_in_order(parts.view(self.size, part), scale, mine)
        self.all_gather(whole, mine)
        if whole is not tensor:
            tensor.copy_(whole[:n])

    def check(self) -> None:
        """Raise CommError when the transport's network has failed. (NCCL has a watchdog.)"""
        if self.transport is not None:
            self.transport.check()

    def release(self) -> None:
        """Give scratch memory back: between steps."""
        for scratch in self._scratch:
            scratch.clear()


@dataclass(frozen=True)
class Scaling:
    """Where the division of an average happens: once, and without a pass of its own if possible.

    `pack` multiplies gradients on their way into the bucket, `op` is the collectives' reduction,
    `outer` multiplies what is exchanged between nodes in a form that no collective can sum up, and
    `final` the result, before it is spread in the node.
    """

    pack: float
    op: dist.ReduceOp.RedOpType
    outer: float
    final: float

    @classmethod
    def of(cls, options: Options, size: int, outer_size: int, divides: bool) -> Scaling:
        """`divides`: averages of averages are right, and the backend has them: NCCL, even nodes."""
        total = dist.ReduceOp.SUM
        if not options.average:
            return cls(1.0, total, 1.0, 1.0)
        if options.predivide != 1.0:
            return cls(1 / options.predivide, total, 1.0, options.predivide / size)
        if divides:
            return cls(1.0, dist.ReduceOp.AVG, 1 / outer_size, 1.0)
        return cls(1 / size, total, 1.0, 1.0)


@dataclass(frozen=True)
class Route:
    """One way for a bucket: `scatter` and `gather` are None where there is no inner level.

    `carrier`: what carries the exchange of `outer`, and why.
    """

    levels: Levels
    scatter: Group | None
    outer: Group
    gather: Group | None
    scaling: Scaling
    carrier: Carrier

    @property
    def shards(self) -> int:
        """Into how many parts the inner level cuts a bucket."""
        return self.levels.shards

    def place(self, numel: int) -> tuple[int, int]:
        """Start and end of this rank's shard in `numel` entries; nothing for who owns none."""
        length = numel // self.shards
        rank = 0 if self.scatter is None else min(self.scatter.rank, self.shards)
        return rank * length, min((rank + 1) * length, numel)

    def reduce_inside(self, whole: torch.Tensor) -> None:
        """This rank's shard of `whole` <- its sum over the node; the rest is not to be read."""
        assert self.scatter is not None
        start, end = self.place(whole.numel())
        if not self.levels.uneven:
            dist.reduce_scatter_tensor(
                whole[start:end], whole, self.scaling.op, group=self.scatter.handle
            )
            return
        for owner, shard in enumerate(whole.split(whole.numel() // self.shards)):
            dist.reduce(shard, op=self.scaling.op, group=self.scatter.handle, group_dst=owner)

    def spread_inside(self, whole: torch.Tensor) -> None:
        """All shards of `whole` on every rank of the node, from those that own them."""
        assert self.gather is not None
        start, end = self.place(whole.numel())
        if not self.levels.uneven:
            dist.all_gather_into_tensor(whole, whole[start:end], group=self.gather.handle)
            return
        for owner, shard in enumerate(whole.split(whole.numel() // self.shards)):
            dist.broadcast(shard, group=self.gather.handle, group_src=owner)


def _base(parent: dist.ProcessGroup | None) -> dist.ProcessGroup:
    base = world.base_of(parent)
    if base is None:
        raise CommError(
            "torch.distributed has no default process group", "call init_process_group() first"
        )
    return base


# Whose communicators a group is part of, its ranks, its backend: those of one kind are made in the
# same order on all ranks, so that all find a free one or none does.
Key = tuple[tuple[int, ...], tuple[int, ...], str, timedelta]
# Which communicators of a process: their ranks, and how many of these ranks were made before.
Serial = tuple[tuple[int, ...], int]


@dataclass
class _Pool:
    """What belongs to one default process group, or world, and is not in use."""

    free: dict[Key, list[dist.ProcessGroup]] = field(default_factory=dict)
    made: dict[tuple[int, ...], int] = field(default_factory=dict)
    # Given back by this rank, not yet by all.
    dropped: dict[Serial, Communicators] = field(default_factory=dict)


_POOLS: weakref.WeakKeyDictionary[dist.ProcessGroup, _Pool] = weakref.WeakKeyDictionary()


def _pool(base: dist.ProcessGroup) -> _Pool:
    return _POOLS.setdefault(base, _Pool())


@dataclass(frozen=True)
class _Told:
    """What a rank says of itself before groups are made."""

    groups: int
    made: int
    dropped: frozenset[Serial]
    place: gloo.Place


def _meet_parent(base: dist.ProcessGroup, parent: dist.ProcessGroup, timeout: timedelta) -> Serial:
    """Make all ranks of `parent` ready to make groups; the number of this meeting. Collective.

    torch names a group that only its own ranks make by their numbers and the number of groups that
    exist in the process, and so the ranks would not meet after some of them made one without the
    others (a Horovod process set). Groups of one rank fill the difference; they connect nothing.
    (A world of our own names its groups by their ranks alone, and has chosen Gloo's interface.)
    """
    pool, ranks = _pool(base), tuple(world.ranks_of(parent))
    own = world.of(parent) is not None
    names = {} if own else dist.distributed_c10d._world.pg_names
    place = gloo.Place("", "") if own else gloo.own_place()
    mine = _Told(len(names), pool.made.get(ranks, 0), frozenset(pool.dropped), place)
    told: list[_Told] = [mine] * len(ranks)
    dist.all_gather_object(told, mine, group=parent)
    if not own:
        gloo.choose_interface(dist.get_rank(parent), [each.place for each in told])
    by_rank = dict(zip(ranks, told, strict=True))
    for serial in sorted(pool.dropped):
        if all(rank in by_rank and serial in by_rank[rank].dropped for rank in serial[0]):
            pool.dropped.pop(serial).close()
    while len(names) < max(each.groups for each in told):
        dist.new_group(
            [dist.get_rank()], timeout=timeout, backend="gloo", use_local_synchronization=True
        )
    pool.made[ranks] = 1 + max(each.made for each in told)
    return ranks, pool.made[ranks]


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """For how long a collective of `group` may take."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        if isinstance(limit := getattr(options, "_timeout", None), timedelta):
            return limit
    return timedelta(seconds=settings.EVENER_TIMEOUT.default)


class Communicators:
    """All groups of one reducer. `control` is Gloo on the CPU, for agreement; never for data."""

    def __init__(
        self, options: Options, device: torch.device, parent: dist.ProcessGroup | None = None
    ) -> None:
        """Collective over `parent` (default: all ranks). CommError when a rank is missing."""
        self.options, self.device = options, device
        base = _base(parent)
        parent = parent or base
        own = timedelta(seconds=options.timeout)
        self.timeout = own if options.timeout else timeout_of(parent)
        self.ranks = world.ranks_of(parent)
        self.rank = parent.rank()
        self.size = len(self.ranks)
        # Not those of a default group that is made later.
        self._pool, self._world = _pool(base), weakref.ref(base)
        self._lent: list[tuple[Key, dist.ProcessGroup]] = []
        self._carriers: list[tuple[object, Carrier]] = []
        gloo.settle_at_exit()
        try:
            self._serial = _meet_parent(base, parent, self.timeout)
            self.control = self._group(tuple(range(self.size)), "gloo")
            self.hosts = self._meet()
        except RuntimeError as error:
            raise CommError(
                f"rank {self.rank} of {self.size} waited {self.waits} for its peers "
                f"to build a reducer: {error}",
                "look at the log of the missing ranks; EVENER_TIMEOUT sets how long to wait",
            ) from error
        self.route = self._route(
            levels(self.rank, self.hosts, options.algorithm, options.intra_size)
        )
        self._flat: Route | None = None
        self._library: Route | None = None

    @property
    def waits(self) -> str:
        """For how long a rank waits for its peers, and who says so."""
        seconds = f"{self.timeout.total_seconds():g} s"
        return f"{seconds} (EVENER_TIMEOUT)" if self.options.timeout else f"{seconds} (its group's)"

    @property
    def handles(self) -> list[dist.ProcessGroup]:
        """The process groups that it has now, for who ends waits after an error."""
        return [handle for _, handle in self._lent]

    def flat(self) -> Route:
        """The one-level route, for buckets over LIGHT_HIERARCHICAL_THRESHOLD. Collective."""
        if self._flat is None:
            one_level = self.route.levels.two_level
            self._flat = (
                self._route(levels(self.rank, self.hosts, "flat")) if one_level else self.route
            )
        return self._flat

    def library(self) -> Route:
        """The one-level route over the collective library alone, as DDP's own reducer takes it.

        Collective, as `flat` is.
        """
        if self._library is None:
            route = self.flat()
            if route.outer.transport is not None:
                name = "nccl" if self.device.type == "cuda" else "gloo"
                carrier = transport.Carrier(name, "as DDP's own reducer does")
                outer = replace(route.outer, transport=None)
                route = replace(route, outer=outer, carrier=carrier)
            self._library = route
        return self._library

    def check(self) -> None:
        """Raise CommError when the network below a transport has failed."""
        self.route.outer.check()
        if self._flat is not None:
            self._flat.outer.check()

    @property
    def _base(self) -> dist.ProcessGroup:
        base = self._world()
        if base is None:
            raise CommError(
                "the process groups of this reducer have been destroyed", "make it anew"
            )
        return base

    def close(self) -> None:
        """Give the groups back, healthy: call it in the same order on all ranks.

        A second call does nothing. After an error do not call it: what is in flight is unknown.
        """
        base = self._world()
        for key, handle in self._lent:
            self._pool.free.setdefault(key, []).append(handle)
        self._lent.clear()
        for place, carrier in self._carriers:
            if base is not None:
                transport.give_back(base, place, carrier)
        self._carriers.clear()

    def drop(self) -> None:
        """`close`, once all ranks have dropped them: at any moment."""
        if self._lent:
            self._pool.dropped[self._serial] = self

    def _meet(self) -> list[str]:
        """Wait for all ranks, learn their hosts."""
        control: Any = self.control.handle  # torch's stubs do not know its barrier
        control.monitored_barrier(self.timeout, wait_all_ranks=True)
        hosts: list[str] = [""] * self.size
        dist.all_gather_object(hosts, host_identity(), group=self.control.handle)
        return hosts

    def _route(self, shape: Levels) -> Route:
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        inner = shape.two_level
        scatter = self._group(shape.inner, backend) if inner else None
        outer = self._group(shape.outer, backend)
        gather = self._group(shape.inner, backend) if inner else None
        for group in (scatter, outer, gather):
            if group is not None:  # connect now: a network that fails should fail at start
                dist.all_reduce(torch.zeros(1, device=self.device), group=group.handle)
        carrier = self._carrier(shape, outer)
        outer = replace(outer, transport=carrier.transport)
        divides = backend == "nccl" and not shape.uneven
        scaling = Scaling.of(self.options, self.size, outer.size, divides)
        return Route(shape, scatter, outer, gather, scaling, carrier)

    def _carrier(self, shape: Levels, outer: Group) -> Carrier:
        ranks = [self.ranks[place] for place in shape.outer]
        everyone = tuple(self.ranks)
        key = (everyone, tuple(ranks), self.device, self.options.outer, self.timeout)
        carrier = transport.lend(
            self._base,
            key,
            lambda: transport.connect(
                outer,
                self.control,
                self.device,
                replace(self.options, timeout=self.timeout.total_seconds()),
                hosts=len({self.hosts[place] for place in shape.outer}),
                meeting=lambda: self._new(ranks, "gloo"),
            ),
        )
        self._carriers.append((key, carrier))
        return carrier

    def _group(self, places: tuple[int, ...], backend: str) -> Group:
        ranks = [self.ranks[place] for place in places]
        key = (tuple(self.ranks), tuple(ranks), backend, self.timeout)
        free = self._pool.free.get(key)
        handle = free.pop(0) if free else self._new(ranks, backend)
        self._lent.append((key, handle))
        return Group(handle, places.index(self.rank), len(ranks))

    def _new(self, ranks: list[int], backend: str) -> dist.ProcessGroup:
        return world.new_group(self._base, ranks, backend, self.timeout)
