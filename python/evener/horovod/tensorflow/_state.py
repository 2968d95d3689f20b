"""What lives between `hvd.init()` and `hvd.shutdown()` in a TensorFlow process. No torch.

The ranks meet as those of torch do (`evener.comm.world.meeting`), tell each other where their
sockets are, and connect: the negotiation to rank 0, the data each to each. The engine is native
(`crates/collectives`), in the library of ops.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from evener._native import Negotiator
from evener.base import settings
from evener.base.log import logger
from evener.comm.world import contact, elastic, meeting, stores
from evener.comm.world.ranks import Ranks
from evener.horovod.common import beginning, current
from evener.horovod.common import process_sets as process_sets_module
from evener.horovod.common.exceptions import (
    HorovodInternalError,
    NotInitializedError,
)
from evener.horovod.tensorflow import light
from evener.horovod.tensorflow._library import call
from evener.horovod.timeline import Timeline

# Numbers of operations without data: crates/negotiate/src/wire.rs.
_BARRIER, _ADD_SET, _REMOVE_SET = 6, 8, 9
# A larger step is not frozen: what agreement costs is nothing beside its data.
_FROZEN_BYTES = 1 << 20
# Seconds in which rank 0 waits for the others to end too, and the others for it to hear of it.
_TOGETHER, _HEARD = 0.3, 5.0


@dataclass
class Set:
    """A process set: its global ranks in order, this process's place."""

    ranks: list[int]
    place: int | None


class Engine:
    """The native engine as the rest of `horovod.common` sees it."""

    def __init__(self, ranks: Ranks, store: Any, timeout: float, sets: list[list[int]]) -> None:
        """Collective over the job's ranks."""
        self._ranks = ranks
        self._barriers = itertools.count(1)
        warn = settings.HOROVOD_STALL_CHECK_TIME_SECONDS.get()
        ports = call(
            "open",
            rank=ranks.rank,
            size=ranks.size,
            sets=sets,
            fusion=settings.HOROVOD_FUSION_THRESHOLD.get(),
            cache=settings.HOROVOD_CACHE_CAPACITY.get(),
            repeats=settings.EVENER_FREEZE_AFTER.get(),
            frozen_bytes=_FROZEN_BYTES,
            stall_warn=0.0 if settings.HOROVOD_STALL_CHECK_DISABLE.get() else warn,
            stall_abort=settings.HOROVOD_STALL_SHUTDOWN_TIME_SECONDS.get() or timeout,
            cycle=settings.HOROVOD_CYCLE_TIME.get() / 1e3,
            timeout=timeout,
        )
        told = _told(ranks, store, timeout, ports)
        first = told[0]
        places = [(meeting.addresses_of(each["place"]), each["data"]) for each in told]
        seat = {
            "rank": ranks.rank,
            "local_rank": ranks.local_rank or 0,
            "local_size": ranks.local_size or 1,
        }
        call(
            "connect",
            places=places,
            control=first["control"],
            token=first["token"],
            seat=seat,
            light=light.plan(ranks.rank, told),
        )
        self.homogeneous = len({each["local_size"] for each in told}) == 1
        self._open_gate(store, timeout)
        self.timeline = Timeline(lambda: float(call("now")["now"]))
        self._ends = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="evener-news", daemon=True)
        if ranks.rank == 0:
            self._watcher.start()
        path = settings.HOROVOD_TIMELINE.get()
        if path and path != "DYNAMIC":
            self.start_timeline(path, settings.HOROVOD_TIMELINE_MARK_CYCLES.get())

    def _open_gate(self, store: Any, timeout: float) -> None:
        """Share memory for a frozen schedule's flag, where all ranks are on one machine."""
        ranks = self._ranks
        if ranks.size == 1 or ranks.local_size != ranks.size:
            return
        folder = Path("/dev/shm")
        path = folder if folder.is_dir() else Path(tempfile.gettempdir())
        path /= f"evener-gate-{secrets.token_hex(16)}"
        try:
            problem = ""
            if ranks.rank == 0:
                try:
                    path.touch(mode=0o600)
                    with path.open("r+b") as file:
                        file.truncate(Negotiator.gate_bytes(ranks.size))
                except OSError as error:
                    problem = str(error)
            shared = _gather(ranks, store, timeout, "gate", str(path))[0]
            if not problem:
                try:
                    call("open_gate", path=shared)
                except (HorovodInternalError, ValueError) as error:
                    problem = str(error)
            problems = _gather(ranks, store, timeout, "gated", problem)
        finally:
            path.unlink(missing_ok=True)
        if any(problems):
            logger.debug("frozen schedules share no memory: %s", next(filter(None, problems)))
            return
        call("use_gate")

    # --- process sets ---

    @property
    def sets(self) -> dict[int, Set]:
        """All that exist, by number."""
        mine = self._ranks.rank
        return {
            number: Set(ranks, ranks.index(mine) if mine in ranks else None)
            for number, ranks in call("sets")["sets"]
        }

    def set_of(self, number: int | None) -> Set:
        """The process set of that number. ValueError where there is none."""
        found = None if number is None else self.sets.get(number)
        if found is None:
            raise ValueError(
                f"process set {number} does not exist: give it to hvd.init(process_sets=...) or "
                "hvd.add_process_set() first"
            )
        return found

    def add_set(self, ranks: Sequence[int]) -> int:
        """Make a set, collectively; its number, or -1 where there is one of these ranks."""
        return self._run(_ADD_SET, "add_process_set", splits=list(ranks))

    def remove_set(self, number: int) -> bool:
        """Forget a set, collectively; whether it was there."""
        return self._run(_REMOVE_SET, "remove_process_set", root=number) == number

    def barrier(self, number: int) -> None:
        """Wait for all members of that set."""
        self._run(_BARRIER, "barrier", number=number)

    def _run(
        self, kind: int, name: str, *, number: int = 0, root: int = 0, splits: Sequence[int] = ()
    ) -> int:
        answer = call("run", kind=kind, name=name, set=number, root=root, splits=list(splits))
        return int(answer["value"])

    # --- news ---

    def start_timeline(self, path: str, mark_cycles: bool) -> None:
        """Write a timeline into `path` from now on. Only rank 0 does."""
        if self._ranks.rank == 0:
            self.timeline.start(path, mark_cycles)
            call("record", on=True)

    def stop_timeline(self) -> None:
        """Complete the file."""
        if self._ranks.rank == 0 and self.timeline.active:
            call("record", on=False)
            self._news()
            self.timeline.stop()

    def _watch(self) -> None:
        with contextlib.suppress(NotInitializedError):
            while not self._ends.wait(0.5):
                self._news()

    def _news(self) -> None:
        news = call("news")
        for text in news["warnings"]:
            logger.warning("Horovod operations are %s", text)
        for mark, step, ratio, limit in news["falls"]:
            logger.warning("%s", light.fell(mark, step, ratio, limit))
        if self.timeline.active:
            self.timeline.negotiated([tuple(event) for event in news["events"]])

    def frozen(self) -> tuple[bool, int]:
        """Whether a frozen schedule holds, and how many launches there were without agreement."""
        holds, launches = call("frozen")["frozen"]
        return bool(holds), int(launches)

    def lightened(self) -> tuple[int, int]:
        """How many sums went in two levels, and how many gradients as top-k."""
        two_level, sparse = call("lightened")["lightened"]
        return int(two_level), int(sparse)

    def close(self) -> None:
        """Finish what is agreed. The others go on without this rank."""
        self._ends.set()
        with contextlib.suppress(NotInitializedError):
            self.stop_timeline()
        call("close", linger=_HEARD if self._ranks.rank else _TOGETHER)


def _told(ranks: Ranks, store: Any, timeout: float, ports: dict[str, Any]) -> list[dict[str, Any]]:
    """What every rank says of itself, in order."""
    mine = {
        "place": contact.own_place(),
        "token": secrets.token_hex(16) if ranks.rank == 0 else "",
        "local_size": ranks.local_size,
        **light.said(),
        **ports,
    }
    return _gather(ranks, store, timeout, "engine", mine)


def _gather(ranks: Ranks, store: Any, timeout: float, name: str, mine: Any) -> list[Any]:
    keys = [f"{name}/{rank}" for rank in range(ranks.size)]
    try:
        store.set(keys[ranks.rank], json.dumps(mine))
        store.wait(keys, timedelta(seconds=timeout))
        return [json.loads(value) for value in store.multi_get(keys)]
    except RuntimeError as error:
        raise meeting.RendezvousError(
            f"rank {ranks.rank} of {ranks.size} met the others, and then lost one of them: {error}",
            "look for the first error of the other ranks",
        ) from error


class State(beginning.Begun[Engine]):
    """One for the process: `STATE`."""

    def __init__(self) -> None:
        super().__init__()
        self._at_exit = False

    def init(self, comm: Any = None, process_sets: Any = None) -> None:
        """Collective. Does nothing where it is done already."""
        if self._engine is not None:
            return
        current.begin(self)
        stores.use_own()
        elastic.ender = self._broken
        beginning.until_met(lambda: self._enter(comm, process_sets), self.leave)
        if not self._at_exit:
            self._at_exit = True
            atexit.register(self._on_exit)

    def _enter(self, comm: Any, process_sets: Any) -> None:
        mpi = beginning.communicator(comm)
        seconds = settings.EVENER_TIMEOUT.get()
        deadline = time.monotonic() + seconds
        if mpi is None:
            ranks, store = meeting.meet(None, seconds, deadline)
        else:
            ranks, store = meeting.met_by(mpi, seconds, deadline)
        beginning.refuse_a_part(comm, ranks.size)
        sets = process_sets_module.at_init(process_sets, ranks.size)
        self._engine = Engine(ranks, stores.prefixed("tensorflow", store), seconds, sets)
        self._ranks = ranks

    def shutdown(self) -> None:
        """End the engine. Does nothing where nothing runs."""
        engine, self._engine, self._ranks = self._engine, None, None
        if engine is not None:
            engine.close()

    def leave(self) -> None:
        """End what `init` began, also where it came only half of its way."""
        self.shutdown()
        call("close", linger=0.0)

    def end_collectives(self) -> None:
        """End what is under way, after a rank has died."""
        call("abort", reason=elastic.broken() or "a rank has failed")

    def _broken(self, why: str) -> None:
        call("abort", reason=why)

    def _on_exit(self) -> None:
        # After an error the peers may wait for us: ending tells them.
        if getattr(sys, "last_value", None) is None:
            self.shutdown()
            while call("serve", linger=0.5)["serving"]:
                pass


STATE = State()
