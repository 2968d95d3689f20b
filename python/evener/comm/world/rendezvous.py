"""How the ranks of a job find each other, however started, and their first groups.

`init_process_group` makes torch.distributed's default group, `make_world` groups beside it.

torch.distributed needs one address that all ranks know. torchrun and `evener launch` give it;
plain `mpirun python train.py` does not. So rank 0 opens a key-value store on a free port, and its
address reaches the others by the first way that is there:

    MASTER_ADDR       the address was given; nothing to share
    mpi4py            where it is installed and its world is the launcher's
    PMIx              the launcher's own key-value server, by ctypes   (evener.comm.world.pmix)
    libmpi            an MPI broadcast, by ctypes                      (evener.comm.world.libmpi)
    a shared file     EVENER_RENDEZVOUS_FILE

Which one was taken, and why the ones before it were not, is logged. Then every rank enters its host
and its launcher's local rank into the store, and waits for those of all others: a rank that does
not come is named before any collective can hang on it, and local and cross ranks are known even
where the launcher did not give them.

In an elastic job the launcher holds the store, and says anew at each init who this process is
(evener.comm.world.elastic).

The store lives as long as the process. Groups that are made again after `shutdown` use it under a
new prefix, because the old and the new server could not share a port while ranks come and go.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from evener import settings
from evener.comm import transport
from evener.comm.world import abort, contact, elastic, gloo, libmpi, pmix
from evener.comm.world.ranks import Ranks, detect
from evener.comm.world.topology import host_identity
from evener.comm.world.world import World
from evener.errors import EvenerError
from evener.log import info0, logger, set_rank

_DEFAULT_PORT = 29500
# How long to be silent while waiting for ranks that have not come.
_PATIENCE = 10.0


class RendezvousError(EvenerError):
    """The ranks did not find each other."""


@dataclass(frozen=True)
class _Way:
    """A way to bring rank 0's contact to all.

    share(text or None, ranks) blocks and gives rank 0's text; it may be called again where
    `repeats`, because what it found may have been left behind by an earlier job.
    """

    name: str
    share: Callable[[str | None, Ranks], str]
    repeats: bool = False


@dataclass
class _Process:
    """What this process keeps between groups."""

    store: Any = None
    place: tuple[int, int] | None = None  # rank and size for which the store was made
    way: str = ""
    generation: int = 0
    ours: bool = False  # the default group was made here
    ranks: Ranks | None = None
    last_joined: str = ""
    rendezvous_file: Path | None = None


_process = _Process()


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
    ranks, store = _meet(ranks, seconds, deadline)

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
            store=PrefixStore("group", store),
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=timedelta(seconds=seconds),
        )
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        raise RendezvousError(
            f"rank {ranks.rank} of {ranks.size} found its peers, but torch.distributed could not "
            f"connect them with backend {backend!r}: {_first_line(error)}",
            "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that leads to the "
            "other nodes",
        ) from error
    _process.ours, _process.ranks = True, ranks
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
        ranks, store = _met_by(mpi, seconds, deadline)
    elif dist.is_initialized() and not elastic.active() and _is_the_jobs():
        ranks, store = _adopted(None, deadline)
    else:
        ranks, store = _meet(None, seconds, deadline)
    try:
        made = World(ranks.rank, ranks.size, PrefixStore("world", store), seconds)
    except (RuntimeError, ValueError) as error:
        raise RendezvousError(
            f"rank {ranks.rank} of {ranks.size} found its peers, but Gloo could not connect them: "
            f"{_first_line(error)}",
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


def _met_by(mpi: Any, seconds: float, deadline: float) -> tuple[Ranks, Any]:
    """As `_meet`, for the processes of an mpi4py communicator, by its own broadcast."""
    ranks = Ranks(mpi.Get_rank(), mpi.Get_size(), source="mpi4py")
    set_rank(ranks.rank if ranks.size > 1 else None)
    way = _Way("mpi4py", lambda text, _ranks: str(mpi.bcast(text, root=0)))
    _process.generation += 1
    store = _process.store = (
        HashStore() if ranks.size == 1 else _store_by(way, ranks, seconds, deadline)
    )
    _process.place, _process.way = None, way.name
    store = PrefixStore(f"evener/mpi.{_process.generation}", store)
    return _check_in(ranks, store, seconds, deadline), store


def _meet(ranks: Ranks | None, seconds: float, deadline: float) -> tuple[Ranks, Any]:
    """All ranks of the job have come: the place of this process, and a store for this meeting."""
    if ranks is None and elastic.active():
        ranks, store = _join(seconds)
    else:
        ranks = detect() if ranks is None else ranks
        set_rank(ranks.rank if ranks.size > 1 else None)
        if _process.store is None or _process.place != (ranks.rank, ranks.size):
            _process.store, _process.way = _open_store(ranks, seconds, deadline)
            _process.place = (ranks.rank, ranks.size)
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"evener/{restart}.{_process.generation + 1}", _process.store)
        ranks = _check_in(ranks, store, seconds, deadline)
    _process.generation += 1
    _remove_file()
    return ranks, store


def _join(seconds: float) -> tuple[Ranks, Any]:
    """A place in the next generation of an elastic job whose members have all come, and its store.

    A member may die on its way: then the others ask anew.
    """
    while True:
        member = elastic.join()
        _process.last_joined = member.reached
        set_rank(member.ranks.rank if member.ranks.size > 1 else None)
        try:
            deadline = time.monotonic() + seconds  # what counts is how late the peers are
            return _check_in(member.ranks, member.store, seconds, deadline), member.store
        except RendezvousError as error:
            if not elastic.broken():
                raise
            logger.info("asking anew for a rank: %s", error.problem)


def shutdown() -> None:
    """Destroy the default group if `init_process_group` made it. A later init works again."""
    if _process.ours and dist.is_initialized():
        transport.end_all(dist.group.WORLD)
        # What is left of reducers holds groups. A group that nobody holds waits for its threads
        # when it is destroyed; others' run on.
        gc.collect()
        if abort.aborted():
            abort.forget_groups()
        else:
            dist.destroy_process_group()
    _process.ours, _process.ranks = False, None


def generation() -> int:
    """How many times this process has entered a group: what was made for an earlier one is void."""
    return _process.generation


def _adopt(ranks: Ranks | None, deadline: float) -> Ranks:
    """The place of this process in a default group that is there already."""
    if _process.ours and _process.ranks is not None and ranks in (None, _process.ranks):
        return _process.ranks
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
    _process.generation += 1
    gloo.settle_at_exit()
    # The group's own store: torch keeps it, and has no public way to it.
    parent = dist.distributed_c10d._get_default_store()
    store = PrefixStore(f"evener/adopted.{_process.generation}", parent)
    seconds = max(deadline - time.monotonic(), 0.001)
    return _check_in(ranks, store, seconds, deadline), store


# --- the store -----------------------------------------------------------------------------------


def _open_store(ranks: Ranks, seconds: float, deadline: float) -> tuple[Any, str]:
    """The store of this job and the name of the way it was found by."""
    if ranks.size == 1:
        return HashStore(), "a single process"
    if os.environ.get("MASTER_ADDR"):
        info0(
            "rendezvous by MASTER_ADDR=%s (ranks from %s)", os.environ["MASTER_ADDR"], ranks.source
        )
        return _store_at_master(ranks, seconds), "MASTER_ADDR"
    reasons: list[str] = ["MASTER_ADDR is unset"]
    way = _choose(ranks, os.environ, reasons)
    while way is not None:
        try:
            store = _store_by(way, ranks, seconds, deadline)
        except _UnusableError as error:
            reasons.append(f"{way.name}: {error}")
            way = _choose(ranks, os.environ, reasons, after=way.name)
            continue
        info0("rendezvous by %s (ranks from %s): %s", way.name, ranks.source, "; ".join(reasons))
        return store, way.name
    raise RendezvousError(
        f"rank {ranks.rank} of {ranks.size} (from {ranks.source}) has no way to find its peers: "
        + "; ".join(reasons),
        "name the host of rank 0: `mpirun -x MASTER_ADDR=HOST ...`, or export MASTER_ADDR before "
        "srun; or set EVENER_RENDEZVOUS_FILE to a file that all nodes share",
    )


class _UnusableError(Exception):
    """This way does not work here; the next one may."""


_WAYS = ("mpi4py", "PMIx", "libmpi", "a shared file")


def _choose(
    ranks: Ranks, env: Mapping[str, str], reasons: list[str], after: str = ""
) -> _Way | None:
    """The first way after `after` that this process has; why not the others goes to `reasons`."""
    start = _WAYS.index(after) + 1 if after else 0
    for name in _WAYS[start:]:
        made = _MAKERS[name](ranks, env)
        if isinstance(made, _Way):
            return made
        reasons.append(made)
    return None


def _mpi4py(ranks: Ranks, _env: Mapping[str, str]) -> _Way | str:
    import importlib.util

    if ranks.source not in ("Open MPI", "MVAPICH2", "PALS", "PMI", "Slurm"):
        return f"MPI did not start this process (ranks from {ranks.source})"
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"

    def share(text: str | None, ranks: Ranks) -> str:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise _UnusableError(f"cannot be imported: {_first_line(error)}") from error
        world = MPI.COMM_WORLD
        if (world.rank, world.size) != (ranks.rank, ranks.size):
            raise _UnusableError(
                f"its world says rank {world.rank} of {world.size}, {ranks.source} says "
                f"{ranks.rank} of {ranks.size}: it was built for another MPI"
            )
        return str(world.bcast(text, root=0))

    return _Way("mpi4py", share)


def _pmix(ranks: Ranks, env: Mapping[str, str]) -> _Way | str:
    if "PMIX_NAMESPACE" not in env:
        return "no PMIx server started this process (PMIX_NAMESPACE is unset)"
    if env.get("PMIX_RANK", "") != str(ranks.rank):
        return f"PMIX_RANK={env.get('PMIX_RANK')} is not rank {ranks.rank} of {ranks.source}"
    library = pmix.load()
    if library is None:
        return f"{pmix.LIBRARY} is not found (package libpmix2)"

    def share(text: str | None, _ranks: Ranks) -> str:
        try:
            return pmix.share(text, library)
        except pmix.PmixError as error:
            raise _UnusableError(str(error)) from error

    return _Way("PMIx", share)


def _libmpi(ranks: Ranks, _env: Mapping[str, str]) -> _Way | str:
    if ranks.source not in ("Open MPI", "MVAPICH2", "PALS", "PMI"):
        return "libmpi: MPI did not start this process"
    library = libmpi.load(open_mpi_first=ranks.source == "Open MPI")
    if library is None:
        return "libmpi.so is not found"

    def share(text: str | None, ranks: Ranks) -> str:
        try:
            return libmpi.share(text, library, ranks.rank, ranks.size)
        except libmpi.MpiError as error:
            raise _UnusableError(str(error)) from error

    return _Way("libmpi", share)


_JOB_NAMES = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID", "LSB_JOBID")


def _file(_ranks: Ranks, env: Mapping[str, str]) -> _Way | str:
    text = settings.EVENER_RENDEZVOUS_FILE.get(env)
    if not text:
        return "EVENER_RENDEZVOUS_FILE is unset"
    path = Path(text).absolute()
    job = "-".join(env[name] for name in _JOB_NAMES if env.get(name))
    if path.is_dir():
        if not job:
            return f"EVENER_RENDEZVOUS_FILE={text} is a folder, and the launcher names no job"
        path = path / f"evener-{job}.json"

    def share(text: str | None, ranks: Ranks) -> str:
        if text is None:
            while True:
                with contextlib.suppress(FileNotFoundError):
                    return path.read_text(encoding="utf-8")
                time.sleep(0.05)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            raise RendezvousError(
                f"rank {ranks.rank} cannot write {path}: {error.strerror}",
                "set EVENER_RENDEZVOUS_FILE to a file in a folder that all nodes can write",
            ) from error
        # Gone when all have come, and also where rank 0 ends before: an address left behind would
        # mislead the next job.
        _process.rendezvous_file = path
        atexit.register(_remove_file)
        return text

    return _Way("a shared file", share, repeats=True)


def _remove_file() -> None:
    if _process.rendezvous_file is not None:
        _process.rendezvous_file.unlink(missing_ok=True)
        _process.rendezvous_file = None


_MAKERS: dict[str, Callable[[Ranks, Mapping[str, str]], _Way | str]] = {
    "mpi4py": _mpi4py,
    "PMIx": _pmix,
    "libmpi": _libmpi,
    "a shared file": _file,
}


def _store_at_master(ranks: Ranks, seconds: float) -> Any:
    host = os.environ["MASTER_ADDR"]
    text = os.environ.get("MASTER_PORT", "").strip() or str(_DEFAULT_PORT)
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise RendezvousError(f"MASTER_PORT={text!r} is not a port", "set it to 1 .. 65535")
    # Under torchrun the agent holds the store at this address, also for rank 0.
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        return TCPStore(
            host,
            int(text),
            ranks.size,
            ranks.rank == 0 and not hosted,
            timedelta(seconds=seconds),
            wait_for_workers=False,
            # A default group that the program makes at this address shares the server.
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        if ranks.rank == 0 and not hosted:
            raise RendezvousError(
                f"rank 0 cannot listen on MASTER_ADDR={host} MASTER_PORT={text}: "
                f"{_first_line(error)}",
                "set MASTER_ADDR to the host on which rank 0 runs and MASTER_PORT to a free port",
            ) from error
        raise RendezvousError(
            f"rank {ranks.rank} waited {seconds:g} s for rank 0 at MASTER_ADDR={host} "
            f"MASTER_PORT={text}: {_first_line(error)}",
            "check that rank 0 was started, that it runs on that host, and that no firewall "
            "closes the port",
        ) from error


def _store_by(way: _Way, ranks: Ranks, seconds: float, deadline: float) -> Any:
    mine: contact.Contact | None = None
    store: Any = None
    if ranks.rank == 0:
        store, mine = contact.serve(seconds)
    text = None if mine is None else mine.text()
    while True:
        shared = _within(
            lambda: way.share(text, ranks),
            deadline,
            f"rank {ranks.rank} waited {seconds:g} s for "
            + (f"the other {ranks.size - 1} ranks" if mine else "rank 0")
            + f" in the exchange of addresses by {way.name}",
        )
        if mine is not None:
            return store
        try:
            theirs = contact.Contact.parse(shared)
        except (ValueError, TypeError) as error:
            if not way.repeats:
                raise _UnusableError(f"gave {shared[:60]!r}, which is no address") from error
            time.sleep(0.1)  # another job's file: rank 0 replaces it
            continue
        found = contact.connect(theirs, deadline, once=way.repeats)
        if found is not None:
            _process.last_joined = found[1]
            return found[0]
        if time.monotonic() > deadline:
            raise RendezvousError(
                f"rank {ranks.rank} waited {seconds:g} s for rank 0's store at port "
                f"{theirs.port} of {', '.join(theirs.addresses)} (address by {way.name})",
                "open the nodes' firewalls to each other, or set MASTER_ADDR and MASTER_PORT",
            )


def addresses_of(place: tuple[str, list[str]]) -> list[str]:
    """By which addresses to try the process whose `contact.own_place` that is, the best first."""
    found = contact.addresses_of(place)
    # By this one rank 0's store was reached.
    if _process.last_joined and place[0] != contact.own_place()[0]:
        return list(dict.fromkeys([_process.last_joined, *found]))
    return found


def _within(function: Callable[[], str], deadline: float, waited: str) -> str:
    """function(), in a thread of its own: C libraries that wait cannot be told for how long."""
    result: list[str] = []
    failure: list[BaseException] = []

    def call() -> None:
        try:
            result.append(function())
        except BaseException as error:  # noqa: BLE001 - it is raised again below
            failure.append(error)

    thread = threading.Thread(target=call, name="evener-rendezvous", daemon=True)
    thread.start()
    thread.join(max(deadline - time.monotonic(), 0.0))
    if failure:
        raise failure[0]
    if not result:
        raise RendezvousError(
            waited,
            "check that every rank was started and calls init; set MASTER_ADDR to do without this "
            "exchange, EVENER_TIMEOUT to wait longer",
        )
    return result[0]


# --- who is where --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    """What a rank writes into the store. `reached`: the address by which it reached rank 0."""

    node: str
    local_rank: int | None
    local_size: int | None
    reached: str


def _check_in(ranks: Ranks, store: Any, seconds: float, deadline: float) -> Ranks:
    """Wait until every rank has entered itself; fill in what the launcher did not say."""
    if ranks.size == 1:
        return replace(ranks, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
    reached = _process.last_joined or os.environ.get("MASTER_ADDR", "")
    with contextlib.suppress(OSError):
        reached = str(socket.getaddrinfo(reached, None)[0][4][0]) if reached else ""
    mine = _Entry(host_identity(), ranks.local_rank, ranks.local_size, reached)
    names = [f"rank/{rank}" for rank in range(ranks.size)]
    try:
        store.set(names[ranks.rank], json.dumps(list(vars(mine).values())))
        _wait_for_all(ranks, store, names, seconds, deadline)
        entries = [_Entry(*json.loads(value)) for value in store.multi_get(names)]
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {ranks.rank} of {ranks.size} lost the rendezvous store of rank 0: "
            f"{_first_line(error)}",
            "look for the first error of rank 0: it ended while its peers were starting",
        ) from error
    gloo.choose_interface(ranks.rank, [gloo.Place(each.node, each.reached) for each in entries])
    return _complete(ranks, entries)


def _wait_for_all(
    ranks: Ranks, store: Any, names: list[str], seconds: float, deadline: float
) -> None:
    warned = False
    while True:
        left = deadline - time.monotonic()
        try:
            patience = 1.0 if elastic.active() else _PATIENCE
            store.wait(names, timedelta(seconds=max(min(left, patience), 0.01)))
            return
        except RuntimeError:
            missing = [rank for rank, name in enumerate(names) if not store.check([name])]
            if not missing:
                return
            if why := elastic.broken():
                raise RendezvousError(f"{_ranks_text(missing)} did not come: {why}") from None
        if deadline - time.monotonic() <= 0:
            raise RendezvousError(
                f"rank {ranks.rank} of {ranks.size} waited {seconds:g} s for "
                f"{_ranks_text(missing)}, which did not come to the rendezvous",
                "look for the first error of those ranks, or set EVENER_TIMEOUT to wait longer",
            )
        if not warned:
            info0("waiting for %s", _ranks_text(missing))
            warned = True


def _ranks_text(missing: list[int]) -> str:
    shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return f"rank {shown}" if len(missing) == 1 else f"{len(missing)} ranks ({shown})"


def _complete(ranks: Ranks, entries: list[_Entry]) -> Ranks:
    """Local and cross values: the launcher's where all ranks have them, else from the hosts.

    Pure; the same on every rank because the entries are.
    """
    told = all(e.local_rank is not None and e.local_size is not None for e in entries)
    locals_ = [e.local_rank or 0 for e in entries]
    sizes = [e.local_size or 0 for e in entries]
    if not told:
        nodes = [entry.node for entry in entries]
        locals_ = [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
        sizes = [nodes.count(node) for node in nodes]
    mine = locals_[ranks.rank]
    return replace(
        ranks,
        local_rank=mine,
        local_size=sizes[ranks.rank],
        cross_rank=locals_[: ranks.rank].count(mine),
        cross_size=locals_.count(mine),
    )


def _set_device(ranks: Ranks) -> None:
    count, local = torch.cuda.device_count(), ranks.local_rank or 0
    if count > 1 and local >= count:
        raise RendezvousError(
            f"rank {ranks.rank} has local rank {local}, but this node shows {count} GPUs",
            "start at most one rank per GPU, or give each rank its own CUDA_VISIBLE_DEVICES",
        )
    # One visible GPU: the launcher has chosen it for this rank.
    torch.cuda.set_device(0 if count == 1 else local)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
