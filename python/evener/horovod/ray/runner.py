"""`RayExecutor`: functions, or objects that live in the workers, on the ranks of a Ray cluster."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray

from evener.comm.world import contact
from evener.horovod.ray import ray_logger
from evener.horovod.ray.elastic_v2 import ElasticAdapter
from evener.horovod.ray.strategy import Strategy
from evener.horovod.runner.common.util import secret
from evener.horovod.runner.common.util.timeout import Timeout
from evener.tools.launch.horovod_env import variables


@dataclass
class MiniSettings:
    """What an executor goes by. Times are in seconds; ssh is not needed."""

    nics: Any = None
    verbose: int = 1
    key: Any = field(default_factory=secret.make_secret_key)
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    timeout_s: float = 300
    placement_group_timeout_s: float = 100
    elastic: bool = False
    discovery: Any = None

    @property
    def start_timeout(self) -> Timeout:
        """`timeout_s` from now."""
        return Timeout(self.timeout_s, "{activity} took more than {timeout} s")


class Coordinator:
    """Gives each rank its place on its node."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.node_id_by_rank: dict[str, list[int]] = collections.defaultdict(list)
        self.hostnames: set[str] = set()
        self._store: Any = None

    @property
    def world_size(self) -> int:
        """How many ranks are registered."""
        return sum(map(len, self.node_id_by_rank.values()))

    @property
    def node_id_string(self) -> str:
        """`node:ranks,...`"""
        return ",".join(f"{node}:{len(ranks)}" for node, ranks in self.node_id_by_rank.items())

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """A rank lives on that node."""
        self.hostnames.add(hostname)
        self.node_id_by_rank[node_id].append(world_rank)

    def finalize_registration(self) -> dict[int, dict[str, int]]:
        """HOROVOD_LOCAL_* and HOROVOD_CROSS_* of each rank."""
        nodes = list(self.node_id_by_rank.values())
        found = {}
        for index, ranks in enumerate(nodes):
            for local, rank in enumerate(ranks):
                peers = [len(other) > local for other in nodes]
                found[rank] = {
                    "HOROVOD_CROSS_RANK": sum(peers[:index]),
                    "HOROVOD_CROSS_SIZE": sum(peers),
                    "HOROVOD_LOCAL_RANK": local,
                    "HOROVOD_LOCAL_SIZE": len(ranks),
                }
        return found

    def establish_rendezvous(self) -> dict[str, str]:
        """Serve the store at which the ranks meet, as long as this object lives: its variables."""
        self._store, place = contact.serve(self.settings.timeout_s)
        address, port = ray.util.get_node_ip_address(), str(place.port)
        return {
            "MASTER_ADDR": address,
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # it is there already, and no rank's
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": port,
        }


@dataclass
class StaticAdapter:
    """What `RayExecutor` does with a fixed number of workers."""

    settings: Any
    num_workers: int | None
    num_hosts: int | None
    num_workers_per_host: int
    cpus_per_worker: int
    use_gpu: bool
    gpus_per_worker: int | None
    use_current_placement_group: bool

    def __post_init__(self) -> None:
        if self.gpus_per_worker and not self.use_gpu:
            raise ValueError("gpus_per_worker is set, but use_gpu is False")
        self.workers: list[Any] = []
        self.strategy = Strategy(
            self.num_workers,
            self.num_hosts,
            self.num_workers_per_host,
            self.cpus_per_worker,
            self.gpus_per_worker or int(self.use_gpu),
            self.settings.placement_group_timeout_s,
            self.use_current_placement_group,
        )

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """See RayExecutor.start."""
        self.workers = self.strategy.create_workers()
        nodes = ray.get([worker.node_id.remote() for worker in self.workers])
        hosts = ray.get([worker.hostname.remote() for worker in self.workers])
        self.coordinator = Coordinator(self.settings)
        for rank, (node, host) in enumerate(zip(nodes, hosts, strict=True)):
            self.coordinator.register(host, node, rank)
        places = self.coordinator.finalize_registration()
        shared = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        shared |= self.coordinator.establish_rendezvous()
        if self.settings.nics:
            names = ",".join(self.settings.nics)
            shared |= {"GLOO_SOCKET_IFNAME": names, "NCCL_SOCKET_IFNAME": names}
        cards: dict[str, list[str]] = collections.defaultdict(list)
        if self.use_gpu:  # a rank sees all of its node's, so that its local rank is its GPU
            for node, own in zip(
                nodes, ray.get([w.get_gpu_ids.remote() for w in self.workers]), strict=True
            ):
                cards[node] += [str(card) for card in own]
        waits = []
        for rank, (worker, node) in enumerate(zip(self.workers, nodes, strict=True)):
            at = places[rank]
            own = variables(
                rank,
                len(self.workers),
                at["HOROVOD_LOCAL_RANK"],
                at["HOROVOD_LOCAL_SIZE"],
                (at["HOROVOD_CROSS_RANK"], at["HOROVOD_CROSS_SIZE"]),
                node,
            )
            if cards[node]:
                own["CUDA_VISIBLE_DEVICES"] = ",".join(sorted(set(cards[node]), key=int))
            given = {**shared, **own, **(extra_env_vars or {})}
            waits.append(worker.update_env_vars.remote(given))
        ray.get(waits)
        arguments = (executable_cls, executable_args, executable_kwargs)
        ray.get([worker.start_executable.remote(*arguments) for worker in self.workers])

    def execute(
        self,
        fn: Callable[[Any], Any],
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """See RayExecutor.execute."""
        with ray_logger.heard(callbacks) as queue:
            ray.get([worker.set_queue.remote(queue) for worker in self.workers])
            return list(ray.get([worker.execute.remote(fn) for worker in self.workers]))

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """See RayExecutor.run."""
        call = partial(fn, *(args or ()), **(kwargs or {}))
        return self.execute(lambda _: call(), callbacks)

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """See RayExecutor.run_remote."""
        call = partial(fn, *(args or ()), **(kwargs or {}))
        return [worker.execute.remote(lambda _: call()) for worker in self.workers]

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """See RayExecutor.execute_single."""
        return ray.get(self.workers[0].execute.remote(fn))

    def shutdown(self) -> None:
        """See RayExecutor.shutdown."""
        for worker in self.workers:
            ray.kill(worker)
        self.workers = []
        self.strategy.shutdown()


class RayExecutor:
    """Horovod ranks as Ray actors.

    num_workers: ranks in all; or num_hosts with num_workers_per_host each. min_workers,
    max_workers: an elastic job, instead of both. cpus_per_worker, gpus_per_worker: what Ray keeps
    for a rank. Raises ValueError for arguments that contradict each other.
    """

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100,
        nics: Any = None,
    ) -> MiniSettings:
        """Settings for the constructor. ssh_str is written to ssh_identity_file; Ray needs none."""
        if ssh_str and ssh_identity_file and not Path(ssh_identity_file).exists():
            file = os.open(ssh_identity_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(file, "w") as written:
                written.write(ssh_str)
        return MiniSettings(
            ssh_identity_file=ssh_identity_file,
            timeout_s=timeout_s,
            placement_group_timeout_s=placement_group_timeout_s,
            nics=nics,
        )

    def __init__(
        self,
        settings: Any,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        elastic_timeout: float = 600,
        override_discovery: bool = True,
    ) -> None:
        if max_workers and not min_workers:
            raise ValueError("`max_workers` provided without any positive `min_workers`")
        if min_workers and num_workers:
            raise ValueError("Both `min_workers` and `num_workers` provided.")
        if num_workers and num_hosts:
            raise ValueError("Both `num_workers` and `num_hosts` provided.")
        self.settings = settings
        self.settings.elastic = min_workers is not None
        self._kind: Any
        if min_workers is not None:
            self._kind = ElasticAdapter
            self._arguments: dict[str, Any] = {
                "min_workers": min_workers,
                "max_workers": max_workers,
                "reset_limit": reset_limit,
                "cooldown_range": cooldown_range,
                "elastic_timeout": elastic_timeout,
                "override_discovery": override_discovery,
            }
        else:
            self._kind = StaticAdapter
            self._arguments = {
                "num_workers": num_workers,
                "num_hosts": num_hosts,
                "num_workers_per_host": num_workers_per_host,
                "use_current_placement_group": use_current_placement_group,
            }
        self._arguments |= {
            "cpus_per_worker": cpus_per_worker,
            "use_gpu": use_gpu,
            "gpus_per_worker": gpus_per_worker,
        }
        self._remote = False

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the workers, and in each of them an object of `executable_cls`, if it is given.

        extra_env_vars: set before that. Raises TimeoutError where the cluster has no room.
        """
        # A client outside the cluster leaves the work to an actor inside.
        self._remote = ray.util.client.ray.is_connected()
        kind = ray.remote(self._kind).options(num_cpus=0).remote if self._remote else self._kind
        self.adapter = kind(settings=self.settings, **self._arguments)
        self._call("start", executable_cls, executable_args, executable_kwargs, extra_env_vars)

    def _call(self, name: str, *arguments: Any) -> Any:
        method = getattr(self.adapter, name)
        return ray.get(method.remote(*arguments)) if self._remote else method(*arguments)

    def execute(
        self,
        fn: Callable[[Any], Any],
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """`fn(object)` on all workers; gives what it returned, by rank.

        callbacks: get each dictionary that a worker gives to `horovod.ray.ray_logger.log`.
        """
        return list(self._call("execute", fn, callbacks))

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """`fn(*args, **kwargs)` on all workers; gives what it returned, by rank."""
        return list(self._call("run", fn, args, kwargs, callbacks))

    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """As `run`, without waiting: references, by rank, for ray.get."""
        return list(self._call("run_remote", fn, args, kwargs))

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """`fn(object)` on rank 0."""
        return self._call("execute_single", fn)

    def shutdown(self) -> None:
        """End the workers."""
        self._call("shutdown")
        del self.adapter
