"""The process groups of a reduction, and the scaling that goes with their backend.

Reduce-scatter and all-gather of a node have a communicator each, although their ranks are the same:
on one communicator the all-gather of a bucket would wait for the reduce-scatter of the next.

Groups are made once and lent: torch names a group of some ranks by the number of groups that exist,
so a group made after another was destroyed can get its name, and then finds the addresses of the
dead one in the store. What a closed reducer gives back is lent again, and all of them end with the
default process group.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from evener.comm.errors import CommError
from evener.comm.options import Options
from evener.comm.topology import Levels, host_identity, levels


@dataclass(frozen=True)
class Group:
    """A communicator. `rank` and `size` are this process's in it."""

    handle: dist.ProcessGroup
    rank: int
    size: int


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
        """`divides`: the backend has an averaging reduction (NCCL has, Gloo has not)."""
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
    """One way for a bucket: `scatter` and `gather` are None where there is no inner level."""

    levels: Levels
    scatter: Group | None
    outer: Group
    gather: Group | None
    scaling: Scaling

    @property
    def shards(self) -> int:
        """Into how many parts the inner level cuts a bucket."""
        return len(self.levels.inner)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise CommError(
            "torch.distributed has no default process group", "call init_process_group() first"
        )
    return world


Key = tuple[tuple[int, ...], str, timedelta]
# Free groups, by the default process group to which they belong.
_FREE: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Key, list[dist.ProcessGroup]]]
_FREE = weakref.WeakKeyDictionary()


def _level_counts(parent: dist.ProcessGroup, timeout: timedelta) -> None:
    """Make all ranks of `parent` have the same number of groups. Collective over them.

    torch names a group that only its own ranks make by their numbers and the number of groups that
    exist in the process, and so the ranks would not meet after some of them made one without the
    others (a Horovod process set). Groups of one rank fill the difference; they connect nothing.
    """
    names = dist.distributed_c10d._world.pg_names
    counts = [0] * dist.get_world_size(parent)
    dist.all_gather_object(counts, len(names), group=parent)
    while len(names) < max(counts):
        dist.new_group(
            [dist.get_rank()], timeout=timeout, backend="gloo", use_local_synchronization=True
        )


class Communicators:
    """All groups of one reducer. `control` is Gloo on the CPU, for agreement; never for data."""

    def __init__(
        self, options: Options, device: torch.device, parent: dist.ProcessGroup | None = None
    ) -> None:
        """Collective over `parent` (default: all ranks). CommError when a rank is missing."""
        self.options, self.device = options, device
        self.timeout = timedelta(seconds=options.timeout)
        self.ranks = dist.get_process_group_ranks(parent or _world())
        self.rank = self.ranks.index(dist.get_rank())
        self.size = len(self.ranks)
        self._lent: list[tuple[Key, dist.ProcessGroup]] = []
        try:
            _level_counts(parent or _world(), self.timeout)
            self.control = self._group(tuple(range(self.size)), "gloo")
            self.hosts = self._meet()
        except RuntimeError as error:
            raise CommError(
                f"rank {self.rank} of {self.size} waited {options.timeout:g} s for its peers "
                f"to build a reducer: {error}",
                "look at the log of the missing ranks; EVENER_TIMEOUT sets how long to wait",
            ) from error
        self.route = self._route(
            levels(self.rank, self.hosts, options.algorithm, options.intra_size)
        )
        self._flat: Route | None = None

    def flat(self) -> Route:
        """The one-level route, for buckets over LIGHT_HIERARCHICAL_THRESHOLD. Collective."""
        if self._flat is None:
            one_level = self.route.levels.two_level
            self._flat = (
                self._route(levels(self.rank, self.hosts, "flat")) if one_level else self.route
            )
        return self._flat

    def close(self) -> None:
        """Give the groups back, healthy: call it in the same order on all ranks.

        A second call does nothing. After an error do not call it: what is in flight is unknown.
        """
        free = _FREE.setdefault(_world(), {})
        for key, handle in self._lent:
            free.setdefault(key, []).append(handle)
        self._lent.clear()

    def _meet(self) -> list[str]:
        """Wait for all ranks, learn their hosts."""
        dist.monitored_barrier(self.control.handle, self.timeout, wait_all_ranks=True)
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
        scaling = Scaling.of(self.options, self.size, outer.size, divides=backend == "nccl")
        return Route(shape, scatter, outer, gather, scaling)

    def _group(self, places: tuple[int, ...], backend: str) -> Group:
        ranks = [self.ranks[place] for place in places]
        key = (tuple(ranks), backend, self.timeout)
        free = _FREE.setdefault(_world(), {}).get(key)
        handle = (
            free.pop(0)
            if free
            else dist.new_group(
                ranks, timeout=self.timeout, backend=backend, use_local_synchronization=True
            )
        )
        assert handle is not None  # this process is always one of `ranks`
        self._lent.append((key, handle))
        return Group(handle, ranks.index(dist.get_rank()), len(ranks))
