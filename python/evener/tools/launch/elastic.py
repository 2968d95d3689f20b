"""An elastic job: workers come and go, and those that stay go on with what they have in memory.

One process a slot, each under a guard of its own on its host (guard.py). torchrun's elastic agent
is not used for this: it ends all workers of a host and starts new ones at every change, and the
committed state of an elastic Horovod job lives in the workers' memory. What it does share with it
is the store, torch's; evener.comm.world.elastic describes what is written there.

The job is a loop over what happened since the last turn:

    a host was found, or is gone         start workers in its slots; tell the members at the next
                                         commit, once the newcomers wait at the door
    a worker failed                      its host is blacklisted, its generation broken
    every living member asks anew        form the next generation, with the newcomers that wait
    a member ended well                  no more changes; wait for the others
"""

from __future__ import annotations

import collections
import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import click

from evener.tools.launch import horovod_env
from evener.tools.launch.discovery import DiscoveryError, Pool
from evener.tools.launch.hosts import is_local
from evener.tools.launch.job import JobError, end_all, start_guarded, tell_to_end
from evener.tools.launch.output import Output, follow
from evener.tools.launch.plan import Wishes, remote_env

_TICK = 0.05
# A notice may come while a worker is on its way into a generation, and be lost: it is repeated.
_REPEAT = 2.0
REMOVED, ADDED = 1, 2


class Discovery(Protocol):
    """Something that knows the hosts."""

    def find(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class Fixed:
    """Hosts that were named once."""

    hosts: Mapping[str, int]

    def find(self) -> dict[str, int]:
        return dict(self.hosts)


@dataclass(frozen=True)
class Limits:
    """least..most ranks, `first` to begin with; resets: how often the world may change."""

    first: int
    least: int
    most: int | None
    timeout: float
    resets: int | None = None


@dataclass
class Worker:
    """One process. rank: in `generation`; both None before it was a member."""

    number: int
    host: str
    slot: int
    process: Any
    threads: list[threading.Thread]
    rank: int | None = None
    generation: int | None = None
    born: int = sys.maxsize  # the first generation it was in
    read: int = 0  # how many of its requests were read
    asked: int = 0  # the number of its request that is not answered yet
    sync: bool = True
    ended: bool = False  # we ended it: its exit status means nothing
    last: collections.deque[str] = field(default_factory=lambda: collections.deque(maxlen=20))

    @property
    def where(self) -> str:
        rank = "a worker" if self.rank is None else f"rank {self.rank}"
        return f"{rank} on {self.host} (slot {self.slot})"


class ElasticJob:
    """An elastic job that runs. `run` may be called once.

    Workers are processes under guards. Who has another kind overrides `_start`, `_has_ended`,
    `_tell_to_end` and `_end_all` (evener.horovod.ray.job).
    """

    # Seconds between two looks at the hosts.
    discover_every = 1.0

    def __init__(
        self,
        discovery: Discovery,
        limits: Limits,
        pool: Pool,
        wishes: Wishes,
        env: Mapping[str, str],
        output: Output,
        verbose: bool = False,
    ) -> None:
        self._discovery, self._limits, self._pool = discovery, limits, pool
        self._wishes, self._env, self._output, self._verbose = wishes, env, output, verbose
        self._workers: dict[int, Worker] = {}
        self._ending: list[Worker] = []  # told to end, not yet waited for
        self._started = 0
        self._store: Any = None
        self._contact = ""
        self._notices = 0
        self._told: tuple[int, float] = (0, 0.0)  # the last notice: what, and when
        self._generation = 0
        self._finishing = False
        self._failed: JobError | None = None  # the first worker's failure
        self._found: dict[str, int] | None = None
        self._discovery_error: DiscoveryError | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._waiting_since: float | None = None

    def run(self) -> None:
        """Until the job has ended. Raises JobError where it failed."""
        self._found = self._discovery.find()  # what is wrong at the start is an error at once
        from evener.comm.world import contact  # imports torch

        self._store, address = contact.serve(self._limits.timeout)
        self._contact = address.text()
        signals: list[int] = []
        previous = {}
        if threading.current_thread() is threading.main_thread():
            previous = {
                number: signal.signal(number, lambda n, _frame: signals.append(n))
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
            }
        threading.Thread(target=self._discover, name="discover", daemon=True).start()
        try:
            while not signals and self._turn():
                time.sleep(_TICK)
        finally:
            self._stop.set()
            self._end_all([*self._workers.values(), *self._ending])
            self._output.close()
            for number, handler in previous.items():
                signal.signal(number, handler)
        if signals:
            name = signal.Signals(signals[0]).name
            raise JobError(f"ended by {name}; all ranks were ended", "", 128 + signals[0])

    def _discover(self) -> None:
        while not self._stop.wait(self.discover_every):
            try:
                found = self._discovery.find()
            except DiscoveryError as error:
                self._say(f"{error.problem}; the hosts stay as they were")
                continue
            with self._lock:
                self._found = found

    def _say(self, text: str) -> None:
        click.echo(f"evener launch: {text}", err=True)

    # --- one turn of the loop ---

    def _turn(self) -> bool:
        """False when the job has ended well."""
        with self._lock:
            found, self._found = self._found, None
        if found is not None:
            self._pool.update(found)
        self._reap()
        if self._finishing:
            return any(self._is_member(worker) for worker in self._workers.values())
        self._listen()
        wanted = self._wanted()
        self._settle(wanted)
        if self._may_form():
            self._form(wanted)
        else:
            self._tell(wanted)
        return True

    def _wanted(self) -> list[tuple[str, int]]:
        hosts = self._pool.available(time.monotonic(), self._limits.most)
        return [(host.name, slot) for host in hosts for slot in range(host.slots)]

    def _is_member(self, worker: Worker) -> bool:
        """Whether it is of the current generation. Before the first, every worker counts."""
        return not self._generation or worker.generation == self._generation

    def _reap(self) -> None:
        for worker in list(self._workers.values()):
            status = worker.process.poll()
            if status is None:
                continue
            self._has_ended(worker, status)
            self._end_all([worker])
            if self._workers.pop(worker.number, None) is None or worker.ended:
                continue  # with its host, a moment ago; or asked to leave
            if status == 0 and self._is_member(worker):
                self._finishing = True
            else:
                self._fail(worker, status)

    def _has_ended(self, worker: Worker, status: int) -> None:
        """Called once for each worker that ended by itself."""

    def _fail(self, worker: Worker, status: int) -> None:
        how = f"exit status {status}"
        if status > 128:
            with contextlib.suppress(ValueError):
                how = f"signal {status - 128} ({signal.Signals(status - 128).name})"
        lines = "\n".join(f"    {line}" for line in worker.last) or "    (it printed nothing)"
        error = JobError(
            f"{worker.where} failed: {how}. Its last lines:\n{lines}",
            "",
            status if 0 < status < 256 else 1,
        )
        self._failed = self._failed or error
        if self._finishing:
            raise error
        listed = any(host == worker.host for host, _ in self._wanted())
        seconds = self._pool.blacklist(worker.host, time.monotonic())
        if listed:
            stays = "for good" if seconds == float("inf") else f"for {seconds:.0f} s"
            self._say(f"{worker.where} failed ({how}); {worker.host} is left out {stays}")
        others = [other for other in self._workers.values() if other.host == worker.host]
        if any(self._is_member(one) for one in [worker, *others]):
            self._store.set(f"broken/{self._generation}", f"{worker.where} failed: {how}")
        for other in others:
            self._end(other)
        alive = [w for w in self._workers.values() if self._is_member(w)]
        if not alive:
            what = "that has the job's state" if self._generation else "to begin with"
            raise JobError(
                f"no worker is left {what}. The first failure: {self._failed.problem}",
                "",
                error.exit_code,
            )
        self._give_up_if_hopeless()

    def _end(self, worker: Worker) -> None:
        worker.ended = True
        self._workers.pop(worker.number, None)
        self._ending.append(worker)
        self._tell_to_end(worker)

    def _listen(self) -> None:
        for worker in self._workers.values():
            key = f"ask/{worker.number}/{worker.read + 1}"
            if not self._store.check([key]):
                continue
            worker.read += 1
            worker.asked, worker.sync = worker.read, True
            try:
                worker.sync = bool(json.loads(self._store.get(key))["sync"])
            except (ValueError, TypeError, KeyError) as error:
                self._say(f"{worker.where} asked in words that are not understood: {error!r}")

    def _settle(self, wanted: list[tuple[str, int]]) -> None:
        """A worker in every wanted slot; none of no generation elsewhere."""
        places = {(worker.host, worker.slot): worker for worker in self._workers.values()}
        for place, worker in places.items():
            if place not in wanted and worker.generation != self._generation and not worker.ended:
                self._end(worker)
        enough = self._generation > 0 or len(wanted) >= self._limits.first or self._failed
        if not enough:
            self._wait_for(f"{self._limits.first} slots; there are {len(wanted)}")
            return
        for place in wanted:
            if place not in places:
                self._start(*place)

    # --- changes ---

    def _tell(self, wanted: list[tuple[str, int]]) -> None:
        """Tell the members of what changed, so that they come back at their next commit."""
        members = [w for w in self._workers.values() if self._is_member(w)]
        change = 0
        gone = sum((w.host, w.slot) not in wanted for w in members)
        if 0 < gone < len(members):  # where all are gone, the state would be: rather wait
            change |= REMOVED
        if self._newcomers(wanted):
            change |= ADDED
        now = time.monotonic()
        repeated = self._told[0] == change and now < self._told[1] + _REPEAT
        if not self._generation or not members or not change or repeated:
            return
        if self._told[0] != change and self._verbose:
            self._say(f"hosts {'added' if change & ADDED else ''}{' removed' * (change & 1)}")
        self._told = (change, now)
        self._notices += 1
        self._store.set(f"hosts/{self._notices}", json.dumps([self._generation, change]))

    def _newcomers(self, wanted: list[tuple[str, int]]) -> list[Worker]:
        """Workers that wait to be taken in. All workers of their hosts have come.

        A host comes as a whole: a worker's local rank, by which it took its GPU, never changes.
        """
        here = {(w.host, w.slot): w for w in self._workers.values() if not w.ended}
        late = {
            host
            for host, slot in wanted
            if (host, slot) not in here
            or not (here[host, slot].asked or self._is_member(here[host, slot]))
        }
        return [
            worker
            for place, worker in here.items()
            if worker.asked
            and worker.generation != self._generation
            and place in wanted
            and worker.host not in late
        ]

    def _may_form(self) -> bool:
        members = [w for w in self._workers.values() if self._is_member(w)]
        if self._generation:
            return bool(members) and all(worker.asked for worker in members)
        asked = [worker for worker in self._workers.values() if worker.asked]
        least = self._limits.least if self._failed else self._limits.first
        if len(asked) == len(self._workers) and len(asked) >= least:
            return True
        self._wait_for(f"{len(self._workers)} workers; {len(asked)} have called hvd.init()")
        return False

    def _form(self, wanted: list[tuple[str, int]]) -> None:
        current = [w for w in self._workers.values() if w.generation == self._generation]
        old = [worker for worker in current if (worker.host, worker.slot) in wanted]
        chosen = [*old, *self._newcomers(wanted)]
        if self._generation and not old:
            self._wait_for("one of the hosts that have the job's state; discovery names none")
            return
        if len(chosen) < self._limits.least:
            self._give_up_if_hopeless()
            self._wait_for(f"{self._limits.least} ranks (--min-np); {len(chosen)} are there")
            return
        self._waiting_since = None
        resets = self._limits.resets
        if resets is not None and self._generation > resets:
            raise JobError(
                f"the job has changed {resets} times, --reset-limit is {resets}"
                + (f". The first failure: {self._failed.problem}" if self._failed else ""),
                "raise --reset-limit",
                1,
            )
        for worker in current:
            if worker not in chosen:
                self._answer(worker, {"leave": f"{worker.host} is not a host of this job any more"})
                worker.ended = True
        self._generation += 1
        ages: dict[str, int] = {}
        for worker in chosen:
            ages[worker.host] = min(ages.get(worker.host, sys.maxsize), worker.born)
        names = list(dict.fromkeys(host for host, _ in wanted))
        chosen.sort(key=lambda w: (ages[w.host], names.index(w.host), w.slot))
        sync = any(worker.sync for worker in chosen)
        local = collections.Counter(worker.host for worker in chosen)
        places: collections.Counter[str] = collections.Counter()
        for rank, worker in enumerate(chosen):
            worker.rank, worker.generation = rank, self._generation
            worker.born = min(worker.born, self._generation)
            self._output.rename(worker.number, rank, worker.host)
            answer = {
                "generation": self._generation,
                "rank": rank,
                "size": len(chosen),
                "local_rank": places[worker.host],
                "local_size": local[worker.host],
                "sync": sync,
            }
            places[worker.host] += 1
            self._answer(worker, answer)
        if self._generation > 1 or self._verbose:
            hosts = ", ".join(f"{host}:{count}" for host, count in local.items())
            self._say(f"{len(chosen)} ranks now: {hosts}")

    def _answer(self, worker: Worker, answer: dict[str, Any]) -> None:
        self._store.set(f"assign/{worker.number}/{worker.asked}", json.dumps(answer))
        worker.asked = 0

    def _wait_for(self, what: str) -> None:
        now = time.monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
            if self._verbose:
                self._say(f"waiting for {what}")
        if now > self._waiting_since + self._limits.timeout:
            raise JobError(
                f"waited {self._limits.timeout:g} s for {what}"
                + (f". The first failure: {self._failed.problem}" if self._failed else ""),
                "raise --elastic-timeout, or see why hosts or workers do not come",
                1,
            )

    def _give_up_if_hopeless(self) -> None:
        if not isinstance(self._discovery, Fixed):
            return
        if self._pool.hopeless(self._limits.least, time.monotonic()) and self._failed is not None:
            raise JobError(
                f"fewer than {self._limits.least} slots (--min-np) are left, and no host comes "
                f"back. The first failure: {self._failed.problem}",
                "lower --min-np, or let hosts come back: --blacklist-cooldown-range 10 300",
                self._failed.exit_code,
            )

    # --- processes ---

    def _tell_to_end(self, worker: Worker) -> None:
        tell_to_end(worker.process)

    def _end_all(self, workers: list[Worker]) -> None:
        """End them, and wait until they are gone."""
        end_all([(worker.process, worker.threads) for worker in workers])

    def _variables(self, number: int, host: str, slot: int) -> dict[str, str]:
        """What a worker finds in its environment, beside what its host has."""
        return {
            **self._place(host, slot),
            "HOROVOD_ELASTIC": "1",
            "EVENER_ELASTIC": self._contact,
            "EVENER_ELASTIC_WORKER": str(number),
            "PYTHONUNBUFFERED": self._env.get("PYTHONUNBUFFERED") or "1",
        }

    def _place(self, host: str, slot: int) -> dict[str, str]:
        """Horovod's variables as they are before the world is formed; hvd.init() says them anew."""
        hosts: dict[str, int] = {}
        for name, at in self._wanted():
            hosts[name] = max(hosts.get(name, 0), at + 1)
        if slot >= hosts.get(host, 0):
            return {"HOROVOD_HOSTNAME": host}
        slots = list(hosts.values())
        rank = sum(slots[: list(hosts).index(host)]) + slot
        _, local, size, *cross = horovod_env.place(rank, slots)
        return horovod_env.variables(rank, sum(slots), local, size, (cross[0], cross[1]), host)

    def _start(self, host: str, slot: int) -> None:
        number, self._started = self._started, self._started + 1
        env = {
            **self._wishes.env,
            **{name: self._env[name] for name in self._wishes.forward if name in self._env},
            **self._variables(number, host, slot),
        }
        # torch's watchdog would end a process whose peer has died; that is `comm.world.elastic`'s.
        for name, value in (("OMP_NUM_THREADS", "1"), ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")):
            if name not in self._env:
                env.setdefault(name, value)
        remote = not is_local(host)
        if remote:
            env = {**remote_env(self._env), **env}
        process = start_guarded(
            self._wishes.command,
            f"{self._wishes.scratch}-{number}",
            host if remote else None,
            env,
            self._env,
            self._wishes.rsh,
            Path.cwd(),
        )
        worker = Worker(number, host, slot, process, [])
        self._workers[number] = worker
        for name in ("stdout", "stderr"):
            thread = threading.Thread(target=self._follow, args=(worker, name), daemon=True)
            thread.start()
            worker.threads.append(thread)

    def _follow(self, worker: Worker, name: str) -> None:
        def take(line: str) -> None:
            text = line.rstrip("\n")
            worker.last.append(text)
            self._output.write(worker.number, name, text, f"{worker.host}/{worker.slot}")

        follow(getattr(worker.process, name), take)
