"""A worker's side of an elastic job, in which processes come and go while the others go on.

`evener launch --min-np ...` (evener.tools.launch.elastic) starts the workers and holds a key-value
store; EVENER_ELASTIC tells a worker where. Workers live in **generations**: a generation is a fixed
set of ranks with process groups of its own. A worker that calls init asks for the next one and
waits; when every living member of the current generation has asked, the launcher forms the next one
from them and from the newcomers that wait, and tells each its rank. The oldest member is rank 0, so
that its state is the one that others get.

Keys of the store:

    ask/WORKER/N        the worker's N-th request: whether it wants a sync
    assign/WORKER/N     the launcher's answer to it
    broken/G            why generation G cannot go on: a member died
    hosts/N             the N-th notice that hosts were added or removed, with its generation

A worker writes no key that another one counts on: one that dies in the middle of a request leaves
nothing behind which the others' would wait for.

A thread watches the last two. When a generation is broken it aborts NCCL's communicators, which
would otherwise wait for the dead peer until their timeout; Gloo's fail by themselves when its
connections close. Notices are handed to whoever listens (`evener.horovod.common.elastic`).
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from evener.base import settings
from evener.base.log import logger
from evener.comm.world import stores
from evener.comm.world.contact import Contact, connect
from evener.comm.world.ranks import Ranks
from evener.errors import EvenerError

_POLL = 0.2
_CONNECT_TIMEOUT = 60.0

# (number of the notice, 1: hosts were removed, 2: hosts were added, 3: both)
Listener = Callable[[int, int], None]


# Ends what is under way when a generation is broken, where that is not torch's.
ender: Callable[[str], None] | None = None


class ElasticError(EvenerError):
    """The launcher of the elastic job is gone, or cannot be reached."""


@dataclass(frozen=True)
class Member:
    """A place in a generation. sync: a rank in it has no state yet, or an older one.

    store: for the generation alone. reached: the launcher's address as seen from here.
    """

    ranks: Ranks
    generation: int
    sync: bool
    store: Any
    reached: str


class _Worker:
    """This process in its job; made by the first `join`."""

    def __init__(self) -> None:
        self.number = settings.EVENER_ELASTIC_WORKER.get()
        self._contact = Contact.parse(settings.EVENER_ELASTIC.get())
        self._store, self._reached = self._connect()
        self._requests = 0
        self.member: Member | None = None
        self.broken = ""
        self.wants_sync = True
        self.listeners: list[Listener] = []
        self.lock = threading.Lock()
        self._ends = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="evener-elastic", daemon=True)
        self._watcher.start()
        # A thread that is inside torch when the interpreter goes takes the process down with it.
        atexit.register(self._stop)

    def _connect(self) -> tuple[Any, str]:
        found = connect(self._contact, time.monotonic() + _CONNECT_TIMEOUT)
        if found is None:
            raise ElasticError(
                f"worker {self.number} cannot reach the launcher at port {self._contact.port} of "
                f"{', '.join(self._contact.addresses) or 'localhost'}",
                "open the firewall of the launcher's host to the other hosts",
            )
        return found

    def join(self) -> Member:
        """Ask for a place in the next generation, and wait for it."""
        self._requests += 1
        key = f"assign/{self.number}/{self._requests}"
        try:
            request = json.dumps({"sync": self.wants_sync})
            self._store.set(f"ask/{self.number}/{self._requests}", request)
            while True:
                try:
                    self._store.wait([key], timedelta(seconds=10))
                    break
                except RuntimeError:  # nothing yet: a newcomer waits until the others commit
                    if self._store.check([key]):
                        break
            answer = json.loads(self._store.get(key))
        except RuntimeError as error:
            raise ElasticError(
                f"worker {self.number} lost the launcher of its elastic job: {error}",
                "look at the launcher's own output",
            ) from error
        if "leave" in answer:
            logger.info("worker %d ends: %s", self.number, answer["leave"])
            raise SystemExit(0)
        ranks = Ranks(
            answer["rank"],
            answer["size"],
            answer["local_rank"],
            answer["local_size"],
            source="the elastic launcher",
        )
        generation = answer["generation"]
        store = stores.prefixed(f"generation/{generation}", self._store)
        with self.lock:
            self.member = Member(ranks, generation, answer["sync"], store, self._reached)
            self.broken, self.wants_sync = "", True
        return self.member

    def _stop(self) -> None:
        self._ends.set()
        self._watcher.join(2.0)

    # --- the watching thread ---

    def _watch(self) -> None:
        notice = 1
        try:
            store, _ = self._connect()  # a connection of its own: the other one may be waiting
            while not self._ends.wait(_POLL):
                with self.lock:
                    member, broken = self.member, self.broken
                if member is None:
                    continue
                key = f"broken/{member.generation}"
                if not broken and store.check([key]):
                    self._break(member, store.get(key).decode())
                while store.check([f"hosts/{notice}"]):
                    generation, change = json.loads(store.get(f"hosts/{notice}"))
                    if generation == member.generation:
                        for listener in list(self.listeners):
                            listener(notice, change)
                    notice += 1
        except (RuntimeError, ElasticError) as error:
            logger.debug("no more news of the elastic job: %s", error)

    def _break(self, member: Member, why: str) -> None:
        with self.lock:
            if self.member is not member:
                return
            self.broken = why
        logger.debug("generation %d is broken: %s", member.generation, why)
        if ender is not None:
            ender(why)
            return
        from evener.comm.world import abort

        try:
            abort.end_collectives()
        except abort.AbortError as error:  # whoever goes on from here finds the same
            logger.debug("%s", error)


_worker: _Worker | None = None


def active() -> bool:
    """Whether this process is a worker of an elastic job."""
    return bool(settings.EVENER_ELASTIC.get())


def join() -> Member:
    """A place in the next generation. Blocks until it is formed.

    Raises ElasticError where the launcher is gone, SystemExit where this worker is not needed any
    more.
    """
    global _worker
    if _worker is None:
        _worker = _Worker()
    return _worker.join()


def member() -> Member | None:
    """The place of this process; None outside an elastic job, or before `join`."""
    return None if _worker is None else _worker.member


def broken() -> str:
    """Why the current generation cannot go on; "" where it can."""
    return "" if _worker is None else _worker.broken


def await_broken(seconds: float) -> str:
    """`broken`, or what it is within `seconds`: an error can be here before its reason is."""
    deadline = time.monotonic() + seconds
    while _worker is not None and not _worker.broken and time.monotonic() < deadline:
        time.sleep(_POLL / 4)
    return broken()


def keep_state() -> None:
    """The next `join` is by a worker whose state is that of all others: it asks for no sync."""
    if _worker is not None:
        _worker.wants_sync = False


def listen(listener: Listener) -> None:
    """Call `listener`, from a thread, with each notice for the current generation."""
    if _worker is not None and listener not in _worker.listeners:
        _worker.listeners.append(listener)


def unlisten(listener: Listener) -> None:
    """Undo `listen`."""
    if _worker is not None and listener in _worker.listeners:
        _worker.listeners.remove(listener)
