"""`ElasticRayExecutor`: upstream's older interface to elastic jobs; RayExecutor has them too."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evener.horovod.ray import ray_logger
from evener.horovod.ray.discovery import ChangingHosts, NodeDiscovery
from evener.horovod.ray.job import RayJob
from evener.horovod.runner.common.util.timeout import Timeout
from evener.horovod.runner.elastic.settings import ElasticSettings
from evener.tools.launch.discovery import Cooldown
from evener.tools.launch.elastic import Limits

TestDiscovery = ChangingHosts  # upstream's name


class RayHostDiscovery(NodeDiscovery):
    """The living nodes of the cluster, with as many slots as workers fit."""

    def __init__(
        self, use_gpu: bool = False, cpus_per_slot: float = 1, gpus_per_slot: float = 1
    ) -> None:
        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)


def run_job(
    settings: Any,
    function: Callable[[], Any],
    callbacks: Sequence[Callable[[Any], Any]] | None,
    resources: Mapping[str, Any],
    env: Mapping[str, str],
) -> list[Any]:
    """Run an elastic job as `settings` has it; gives the function's results, by rank.

    Raises RayJobError, a RuntimeError.
    """
    if settings.discovery is None:
        raise ValueError("settings.discovery is None: set it, or leave override_discovery True")
    least = settings.min_num_proc
    limits = Limits(
        settings.num_proc or least,
        least,
        settings.max_num_proc,
        float(settings.elastic_timeout or 600),
        settings.reset_limit,
    )
    cooldown = Cooldown(*settings.cooldown_range) if settings.cooldown_range else None
    variables = {name: str(value) for name, value in env.items()}
    if settings.nics:
        names = [settings.nics] if isinstance(settings.nics, str) else list(settings.nics)
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            variables.setdefault(name, ",".join(names))
    with ray_logger.heard(callbacks) as queue:
        job = RayJob(settings.discovery, limits, cooldown, function, resources, variables, queue)
        return job.call()


class ElasticRayExecutor:
    """An elastic job on all of a Ray cluster.

    use_gpu, cpus_per_slot, gpus_per_slot: what a worker needs. env_vars: its variables.
    override_discovery: ask Ray for the nodes, and not `settings.discovery`.
    """

    @staticmethod
    def create_settings(
        min_num_proc: int = 1,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30,
        ssh_identity_file: str | None = None,
        nics: Any = None,
        min_np: int | None = None,
        max_np: int | None = None,
        **given: Any,
    ) -> ElasticSettings:
        """Settings for the constructor. Times are in seconds; ssh is not needed."""
        for old, new in (("min_np", min_np), ("max_np", max_np)):
            if new is not None:
                full = old.replace("np", "num_proc")
                warnings.warn(f"{old} is deprecated, use {full}", DeprecationWarning, stacklevel=2)
        return ElasticSettings(
            discovery=None,
            min_num_proc=min_num_proc if min_np is None else min_np,
            max_num_proc=max_num_proc if max_np is None else max_np,
            elastic_timeout=elastic_timeout,
            reset_limit=reset_limit,
            num_proc=min_num_proc if min_np is None else min_np,
            ssh_identity_file=ssh_identity_file,
            nics=nics,
            start_timeout=Timeout(timeout_s, "{activity} took more than {timeout} s"),
            **given,
        )

    def __init__(
        self,
        settings: ElasticSettings,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
    ) -> None:
        if gpus_per_slot and not use_gpu:
            raise ValueError("gpus_per_slot is set, but use_gpu is False")
        gpus = gpus_per_slot or int(use_gpu)
        if override_discovery:
            settings.discovery = RayHostDiscovery(use_gpu, cpus_per_slot, gpus)
        self.settings = settings
        self._resources = {"num_cpus": cpus_per_slot, "num_gpus": gpus}
        self._env = dict(env_vars or {})

    def start(self) -> None:
        """Nothing: `run` starts the workers, and waits for min_num_proc slots."""

    def run(
        self,
        worker_fn: Callable[[], Any],
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """Call `worker_fn` on all workers; gives what it returned, by rank.

        callbacks: get each dictionary that a worker gives to `ray_logger.log`.
        """
        return run_job(self.settings, worker_fn, callbacks, self._resources, self._env)
