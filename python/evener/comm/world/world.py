"""A world: ranks with process groups of their own, beside torch.distributed's default group.

Programs that use Horovod make a default group of their own, before or after `hvd.init()`, or take
its absence for a fact: torchmetrics computes on one rank alone where there is none, ignite chooses
its backend by it. So the Horovod door leaves it alone, and its groups are not even in
torch.distributed's tables: who destroys all groups does not destroy these. torch's collectives take
such a group (`dist.all_reduce(tensor, group=group)`); what looks a group up in the tables does not
(`dist.get_rank`, a root by its global rank, `monitored_barrier`), and is asked of the group itself.

`new_group`, `ranks_of` and `base_of` take groups of either kind, so that what is built on them need
not know which kind it has.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

_NUMBERS = itertools.count(1)


class World:
    """`size` ranks that share `store`, of which this process is number `rank`.

    group: Gloo, of all ranks. Making a World is collective over them; `timeout`: seconds for it,
    and for each collective of `group`.
    """

    def __init__(self, rank: int, size: int, store: Any, timeout: float) -> None:
        self.rank, self.size = rank, size
        self._store = store
        self._number = next(_NUMBERS)
        # Of the groups that the same ranks have made: a name is never used twice.
        self._made: collections.Counter[tuple[int, ...]] = collections.Counter()
        self._groups: list[dist.ProcessGroup] = []
        self.group = self.new_group(range(size), "gloo", timedelta(seconds=timeout))
        _LIVE.add(self)

    def new_group(
        self, ranks: Sequence[int], backend: str, timeout: timedelta
    ) -> dist.ProcessGroup:
        """A group of these ranks. Collective over them, in the same order; by nobody else.

        backend: "gloo" or "nccl". Raises RuntimeError where the others do not come in time.
        """
        members = tuple(ranks)
        self._made[members] += 1
        name = f"{'.'.join(map(str, members)) if len(members) < self.size else 'all'}"
        name = f"{name}/{self._made[members]}"
        store = PrefixStore(f"{name}/", self._store)
        place = members.index(self.rank)
        label: Any = f"evener.{self._number}/{name}"
        group = dist.ProcessGroup(store, place, len(members))
        own: Any = group  # the steps of torch's own new_group, for which its stubs have no types
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            options.global_ranks_in_group = list(members)
            options.group_name = label
            made: Any = dist.ProcessGroupNCCL(store, place, len(members), options)
            kind, devices = dist.ProcessGroup.BackendType.NCCL, ["cuda"]
        elif backend == "gloo":
            made = dist.ProcessGroupGloo(store, place, len(members), timeout=timeout)
            kind, devices = dist.ProcessGroup.BackendType.GLOO, ["cpu"]
        else:
            raise ValueError(f"backend={backend!r} is neither gloo nor nccl")
        own._set_default_backend(kind)
        made._set_sequence_number_for_group()
        for device in devices:
            own._register_backend(torch.device(device), kind, made)
        own._set_group_name(label)
        _OWNERS[group] = (self, members)
        self._groups.append(group)
        return group

    def groups(self) -> list[dist.ProcessGroup]:
        """All that were made and not destroyed."""
        return list(self._groups)

    def destroy(self) -> None:
        """End all groups: nothing is in flight on them. A second call does nothing."""
        self._end("shutdown")

    def abort(self) -> None:
        """End all groups, whatever is in flight: their peers learn that we have given up."""
        self._end("abort")

    def _end(self, how: str) -> None:
        _LIVE.discard(self)
        # Gloo's threads end with the group, so nothing of ours may hold one; and `_OWNERS`, whose
        # values lead to groups, would keep its own keys.
        self.__dict__.pop("group", None)
        while self._groups:
            group = self._groups.pop()
            _OWNERS.pop(group, None)
            getattr(group, how)()


_OWNERS: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[World, tuple[int, ...]]]
_OWNERS = weakref.WeakKeyDictionary()
_LIVE: weakref.WeakSet[World] = weakref.WeakSet()


def live() -> list[World]:
    """The worlds of this process that have not ended."""
    return list(_LIVE)


def of(group: dist.ProcessGroup) -> World | None:
    """The world to which a group belongs; None for one of torch.distributed's."""
    owner = _OWNERS.get(group)
    return None if owner is None else owner[0]


def base_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group of all ranks to which `group` belongs; torch.distributed's default one for None."""
    world = None if group is None else of(group)
    return dist.group.WORLD if world is None else world.group


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    """The global ranks of a group's members, in its order."""
    owner = _OWNERS.get(group)
    return dist.get_process_group_ranks(group) if owner is None else list(owner[1])


def new_group(
    base: dist.ProcessGroup, ranks: Sequence[int], backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """A group of these (global) ranks beside `base`. Collective over them, and by nobody else."""
    world = of(base)
    if world is not None:
        return world.new_group(ranks, backend, timeout)
    made: dist.ProcessGroup | None = dist.new_group(
        list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True
    )
    assert made is not None  # this process is always one of `ranks`
    return made
