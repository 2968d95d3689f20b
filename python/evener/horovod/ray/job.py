"""An elastic job whose workers are Ray actors.

The launcher's own loop (evener.tools.launch.elastic) decides who comes and goes; here an actor
takes the place of a process under a guard. A worker ends when its function returns or raises, when
its node is lost, or when it is told to.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import ray

from evener.errors import EvenerError
from evener.horovod.ray.worker import BaseHorovodWorker
from evener.horovod.runner.elastic import driver
from evener.horovod.runner.elastic.discovery import HostDiscovery
from evener.tools.launch.discovery import Cooldown, DiscoveryError, Pool
from evener.tools.launch.elastic import ElasticJob, Limits, Worker
from evener.tools.launch.job import JobError
from evener.tools.launch.output import Output
from evener.tools.launch.plan import Wishes

_LEFT = "evener: left"


class RayJobError(EvenerError, RuntimeError):
    """The job failed."""


class _Found:
    """`HostDiscovery` for the launcher's loop."""

    def __init__(self, discovery: HostDiscovery) -> None:
        self._discovery = discovery

    def find(self) -> dict[str, int]:
        try:
            return {h: int(n) for h, n in self._discovery.find_available_hosts_and_slots().items()}
        except Exception as error:
            raise DiscoveryError(
                f"{type(self._discovery).__name__} failed: {error!r}", "see its error"
            ) from error


def _leaving(function: Callable[[], Any]) -> Callable[[Any], Any]:
    """`function` for an actor: SystemExit, by which a worker leaves, must not end the actor."""

    def call(_: Any) -> Any:
        try:
            return function()
        except SystemExit:
            return _LEFT

    return call


class _Actor:
    """What an actor does, as a process: `poll` gives None while it runs, then an exit status."""

    def __init__(self, actor: Any, future: Any) -> None:
        self._actor, self._future = actor, future
        self.value: Any = None
        self.error = ""
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None and ray.wait([self._future], timeout=0)[0]:
            try:
                self.value = ray.get(self._future)
                self._status = 0
            except Exception as error:  # noqa: BLE001 - whatever the function raised, or Ray did
                self.error, self._status = str(error), 1
        return self._status

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # it may be gone already
            ray.kill(self._actor)


class RayJob(ElasticJob):
    """Calls a function on a changing number of ranks. `results` is there after `run`."""

    def __init__(
        self,
        discovery: HostDiscovery,
        limits: Limits,
        cooldown: Cooldown | None,
        function: Callable[[], Any],
        resources: Mapping[str, Any],
        env: Mapping[str, str],
        queue: Any,
    ) -> None:
        """resources: `num_cpus` and `num_gpus` of a worker. env: its variables."""
        super().__init__(
            _Found(discovery), limits, Pool(cooldown), Wishes(("ray",)), os.environ, Output()
        )
        self._function, self._resources, self._queue = function, resources, queue
        self._given = env
        self._ended_well: list[Worker] = []

    @property
    def discover_every(self) -> float:  # type: ignore[override]
        return float(driver.DISCOVER_HOSTS_FREQUENCY_SECS)

    def call(self) -> list[Any]:
        """Run; gives what the function returned, by rank. Raises RayJobError."""
        try:
            self.run()
        except JobError as error:
            raise RayJobError(error.problem, error.fix) from error
        last = [w for w in self._ended_well if w.generation == self._generation]
        return [worker.process.value for worker in sorted(last, key=lambda w: w.rank or 0)]

    def _start(self, host: str, slot: int) -> None:
        number, self._started = self._started, self._started + 1
        slots = dict(self._wanted_slots())
        env = {
            "OMP_NUM_THREADS": "1",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            **self._variables(number, host, slot),
            **self._given,
        }
        if self._resources.get("num_gpus"):
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(slots.get(host, slot + 1))))
        kind: Any = ray.remote(BaseHorovodWorker)
        actor = kind.options(**self._resources, resources={f"node:{host}": 0.01}).remote()
        actor.update_env_vars.remote(env)
        if self._queue is not None:
            actor.set_queue.remote(self._queue)
        future = actor.execute.remote(_leaving(self._function))
        self._workers[number] = Worker(number, host, slot, _Actor(actor, future), [])

    def _wanted_slots(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for host, slot in self._wanted():
            found[host] = max(found.get(host, 0), slot + 1)
        return found

    def _has_ended(self, worker: Worker, status: int) -> None:
        if status:
            worker.last.extend(worker.process.error.rstrip().splitlines())
        elif worker.process.value != _LEFT:
            self._ended_well.append(worker)

    def _tell_to_end(self, worker: Worker) -> None:
        worker.process.kill()

    def _end_all(self, workers: list[Worker]) -> None:
        for worker in workers:
            worker.process.kill()
