"""torch.distributed's groups for the ranks of a job, however started.

`init_process_group` makes torch.distributed's default group, `make_world` groups beside it. How the
ranks find each other before that is `meeting`'s business.
"""

from __future__ import annotations

import gc
import importlib
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evener.base import settings
from evener.base.log import set_rank
from evener.comm import transport
from evener.comm.world import abort, elastic, gloo, meeting, stores
from evener.comm.world.meeting import RendezvousError, addresses_of
from evener.comm.world.ranks import Ranks, detect
from evener.comm.world.world import World

__all__ = [
    "RendezvousError",
    "addresses_of",
    "end_world",
    "generation",
    "init_process_group",
    "make_world",
    "shutdown",
]


def init_process_group(
    ranks: Ranks | None = None,
    *,
    backend: str | None = None,
    timeout: float | None = None,
    set_device: bool = True,
) -> Ranks:
    """Make torch.distributed's default group if there is none, and say who this process is.

    ranks: the place of this process; default: what the launcher says (`ranks.detect`).
    backend: default `cpu:gloo,cuda:nccl` where CUDA is there, else `gloo`.
    timeout: seconds, for the rendezvous and then for each collective; default EVENER_TIMEOUT.
    set_device: with CUDA, make the GPU of this local rank the current one.

    Returns Ranks with every field known. Where a default group exists it is used as it is.
    Raises RankError for contradicting variables, RendezvousError where the ranks do not find each
    other: it names what was waited for, and from whom.
    """
    seconds = settings.EVENER_TIMEOUT.get() if timeout is None else timeout
    deadline = time.monotonic() + seconds
    if dist.is_initialized():
        return _adopt(ranks, deadline)
    ranks, store = meeting.meet(ranks, seconds, deadline)

    cuda = torch.cuda.is_available() and dist.is_nccl_available()
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if set_device and cuda and "nccl" in backend:
        _set_device(ranks)
    # Its functions have today's default group for a default argument: imported later, as torch's
    # FSDP does, it would keep this one for ever, and Gloo's threads with it (`shutdown`).
    importlib.import_module("torch.distributed.nn.functional")
    try:
        dist.init_process_group(
            backend,
            store=stores.prefixed("group", store),
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=timedelta(seconds=seconds),
        )
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        raise RendezvousError(
            f"rank {ranks.rank} of {ranks.size} found its peers, but torch.distributed could not "
            f"connect them with backend {backend!r}: {meeting.first_line(error)}",
            "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that leads to the "
            "other nodes",
        ) from error
    meeting.process.ours, meeting.process.ranks = True, ranks
    gloo.settle_at_exit()
    return ranks


def make_world(timeout: float | None = None, mpi: Any = None) -> tuple[Ranks, World]:
    """Groups of all ranks of the job beside torch.distributed's, whose default group stays as it
    is, or stays away; and the place of this process, with every field known. Collective.

    timeout: as of `init_process_group`. mpi: an mpi4py communicator, whose processes are then the
    job. Without it, and where there is a default group of all ranks, the ranks are that group's.
    Raises what `init_process_group` raises.
    """
    seconds = settings.EVENER_TIMEOUT.get() if timeout is None else timeout
    deadline = time.monotonic() + seconds
    if mpi is not None:
        ranks, store = meeting.met_by(mpi, seconds, deadline)
    elif dist.is_initialized() and not elastic.active() and _is_the_jobs():
        ranks, store = _adopted(None, deadline)
    else:
        ranks, store = meeting.meet(None, seconds, deadline)
    try:
        made = World(ranks.rank, ranks.size, stores.prefixed("world", store), seconds)
    except (RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"rank {ranks.rank} of {ranks.size} found its peers, but Gloo could not connect them: "
            f"{meeting.first_line(error)}",
            "set GLOO_SOCKET_IFNAME to the interface that leads to the other nodes",
        ) from error
    gloo.settle_at_exit()
    return ranks, made


def end_world(made: World) -> None:
    """Destroy the groups of a world. Another one can be made afterwards."""
    transport.end_all(made.group)
    # What is left of reducers holds groups. A group that nobody holds waits for its threads when
    # it is destroyed; others' run on.
    gc.collect()
    if abort.aborted():
        made.abort()
    else:
        made.destroy()


def shutdown() -> None:
    """Destroy the default group if `init_process_group` made it. A later init works again."""
    if meeting.process.ours and dist.is_initialized():
        transport.end_all(dist.group.WORLD)
        # What is left of reducers holds groups. A group that nobody holds waits for its threads
        # when it is destroyed; others' run on.
        gc.collect()
        if abort.aborted():
            abort.forget_groups()
        else:
            dist.destroy_process_group()
    meeting.process.ours, meeting.process.ranks = False, None


def generation() -> int:
    """How many times this process has entered a group: what was made for an earlier one is void."""
    return meeting.process.generation


def _adopt(ranks: Ranks | None, deadline: float) -> Ranks:
    """The place of this process in a default group that is there already."""
    known = meeting.process.ranks
    if meeting.process.ours and known is not None and ranks in (None, known):
        return known
    return _adopted(ranks, deadline)[0]


def _is_the_jobs() -> bool:
    """Whether the default group is of all ranks of the job, and not of a program's own choice."""
    ranks = detect()
    return ranks.size == 1 or (ranks.rank, ranks.size) == (dist.get_rank(), dist.get_world_size())


def _adopted(ranks: Ranks | None, deadline: float) -> tuple[Ranks, Any]:
    """The place of this process in the default group, and a store of its ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if ranks is None:
        ranks = detect()
        if (ranks.rank, ranks.size) != (rank, size):
            ranks = Ranks(rank, size, source="torch.distributed")
    elif (ranks.rank, ranks.size) != (rank, size):
        raise RendezvousError(
            f"rank {ranks.rank} of {ranks.size} was asked for, but torch.distributed's default "
            f"group says rank {rank} of {size}",
            "leave the ranks out, or destroy the group first",
        )
    set_rank(rank if size > 1 else None)
    meeting.process.generation += 1
    gloo.settle_at_exit()
    # The group's own store: torch keeps it, and has no public way to it.
    parent = dist.distributed_c10d._get_default_store()
    store = stores.prefixed(f"evener/adopted.{meeting.process.generation}", parent)
    seconds = max(deadline - time.monotonic(), 0.001)
    return meeting.check_in(ranks, store, seconds, deadline), store


def _set_device(ranks: Ranks) -> None:
    count, local = torch.cuda.device_count(), ranks.local_rank or 0
    if count > 1 and local >= count:
        raise RendezvousError(
            f"rank {ranks.rank} has local rank {local}, but this node shows {count} GPUs",
            "start at most one rank per GPU, or give each rank its own CUDA_VISIBLE_DEVICES",
        )
    # One visible GPU: the launcher has chosen it for this rank.
    torch.cuda.set_device(0 if count == 1 else local)
