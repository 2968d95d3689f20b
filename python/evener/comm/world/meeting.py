"""How the ranks of a job find each other, however started; without torch.

All ranks must know one address. torchrun and `evener launch` give it;
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

from evener.base import settings
from evener.base.log import info0, logger, set_rank
from evener.comm.world import contact, elastic, gloo, libmpi, pmix, stores
from evener.comm.world.ranks import Ranks, detect
from evener.comm.world.topology import host_identity
from evener.errors import EvenerError

_DEFAULT_PORT = 29500
# How long to be silent while waiting for ranks that have not come.
_PATIENCE = 10.0
# How long rank 0 keeps the store for peers that have to read what is wrong.
_READ = 10.0


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


process = _Process()


def met_by(mpi: Any, seconds: float, deadline: float) -> tuple[Ranks, Any]:
    """As `meet`, for the processes of an mpi4py communicator, by its own broadcast."""
    ranks = Ranks(mpi.Get_rank(), mpi.Get_size(), source="mpi4py")
    set_rank(ranks.rank if ranks.size > 1 else None)
    way = _Way("mpi4py", lambda text, _ranks: str(mpi.bcast(text, root=0)))
    process.generation += 1
    store = process.store = (
        stores.alone() if ranks.size == 1 else _store_by(way, ranks, seconds, deadline)
    )
    process.place, process.way = None, way.name
    store = stores.prefixed(f"evener/mpi.{process.generation}", store)
    return check_in(ranks, store, seconds, deadline), store


def meet(ranks: Ranks | None, seconds: float, deadline: float) -> tuple[Ranks, Any]:
    """All ranks of the job have come: the place of this process, and a store for this meeting."""
    if ranks is None and elastic.active():
        ranks, store = _join(seconds)
    else:
        ranks = detect() if ranks is None else ranks
        set_rank(ranks.rank if ranks.size > 1 else None)
        if process.store is None or process.place != (ranks.rank, ranks.size):
            process.store, process.way = _open_store(ranks, seconds, deadline)
            process.place = (ranks.rank, ranks.size)
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = stores.prefixed(f"evener/{restart}.{process.generation + 1}", process.store)
        ranks = check_in(ranks, store, seconds, deadline)
    process.generation += 1
    _remove_file()
    return ranks, store


def _join(seconds: float) -> tuple[Ranks, Any]:
    """A place in the next generation of an elastic job whose members have all come, and its store.

    A member may die on its way: then the others ask anew.
    """
    while True:
        member = elastic.join()
        process.last_joined = member.reached
        set_rank(member.ranks.rank if member.ranks.size > 1 else None)
        try:
            deadline = time.monotonic() + seconds  # what counts is how late the peers are
            return check_in(member.ranks, member.store, seconds, deadline), member.store
        except RendezvousError as error:
            if not elastic.broken():
                raise
            logger.info("asking anew for a rank: %s", error.problem)


# --- the store -----------------------------------------------------------------------------------


def _open_store(ranks: Ranks, seconds: float, deadline: float) -> tuple[Any, str]:
    """The store of this job and the name of the way it was found by."""
    if ranks.size == 1:
        return stores.alone(), "a single process"
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
            raise _UnusableError(f"cannot be imported: {first_line(error)}") from error
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
        process.rendezvous_file = path
        atexit.register(_remove_file)
        return text

    return _Way("a shared file", share, repeats=True)


def _remove_file() -> None:
    if process.rendezvous_file is not None:
        process.rendezvous_file.unlink(missing_ok=True)
        process.rendezvous_file = None


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
        return stores.tcp(
            host,
            int(text),
            ranks.size,
            ranks.rank == 0 and not hosted,
            timedelta(seconds=seconds),
            # A default group that the program makes at this address shares the server.
            multi_tenant=True,
        )
    except (RuntimeError, ValueError) as error:
        if ranks.rank == 0 and not hosted:
            raise RendezvousError(
                f"rank 0 cannot listen on MASTER_ADDR={host} MASTER_PORT={text}: "
                f"{first_line(error)}",
                "set MASTER_ADDR to the host on which rank 0 runs and MASTER_PORT to a free port",
            ) from error
        raise RendezvousError(
            f"rank {ranks.rank} waited {seconds:g} s for rank 0 at MASTER_ADDR={host} "
            f"MASTER_PORT={text}: {first_line(error)}",
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
            process.last_joined = found[1]
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
    if process.last_joined and place[0] != contact.own_place()[0]:
        return list(dict.fromkeys([process.last_joined, *found]))
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
class Entry:
    """What a rank writes into the store. `reached`: the address by which it reached rank 0.

    framework: whose collectives it brings; all ranks must bring the same.
    """

    node: str
    local_rank: int | None
    local_size: int | None
    reached: str
    framework: str = "PyTorch"


def check_in(ranks: Ranks, store: Any, seconds: float, deadline: float) -> Ranks:
    """Wait until every rank has entered itself; fill in what the launcher did not say."""
    if ranks.size == 1:
        return replace(ranks, local_rank=0, local_size=1, cross_rank=0, cross_size=1)
    reached = process.last_joined or os.environ.get("MASTER_ADDR", "")
    with contextlib.suppress(OSError):
        reached = str(socket.getaddrinfo(reached, None)[0][4][0]) if reached else ""
    framework = "TensorFlow" if stores.own() else "PyTorch"
    mine = Entry(host_identity(), ranks.local_rank, ranks.local_size, reached, framework)
    names = [f"rank/{rank}" for rank in range(ranks.size)]
    try:
        store.set(names[ranks.rank], json.dumps(list(vars(mine).values())))
        _wait_for_all(ranks, store, names, seconds, deadline)
        entries = [Entry(*json.loads(value)) for value in store.multi_get(names)]
    except RuntimeError as error:
        raise RendezvousError(
            f"rank {ranks.rank} of {ranks.size} lost the rendezvous store of rank 0: "
            f"{first_line(error)}",
            "look for the first error of rank 0: it ended while its peers were starting",
        ) from error
    for rank, entry in enumerate(entries):
        if entry.framework != framework:
            _wait_until_read(ranks, store)
            raise RendezvousError(
                f"rank {ranks.rank} trains with {framework} and rank {rank} with "
                f"{entry.framework}: their collectives do not fit together",
                "start all ranks of a job with the same framework",
            )
    gloo.choose_interface(ranks.rank, [gloo.Place(each.node, each.reached) for each in entries])
    return complete(ranks, entries)


def _wait_until_read(ranks: Ranks, store: Any) -> None:
    """All ranks are about to raise the same, and rank 0 holds the store: it stays until the others
    have read what is in it, or they would tell of a lost store."""
    keys = [f"read/{rank}" for rank in range(ranks.size)]
    with contextlib.suppress(RuntimeError):
        store.set(keys[ranks.rank], "1")
        if ranks.rank == 0:
            store.wait(keys, timedelta(seconds=_READ))


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


def complete(ranks: Ranks, entries: list[Entry]) -> Ranks:
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


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
