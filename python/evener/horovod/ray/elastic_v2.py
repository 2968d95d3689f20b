"""Elastic jobs of `RayExecutor`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from evener.errors import UsageError
from evener.horovod.ray.discovery import NodeDiscovery
from evener.horovod.ray.elastic import run_job


class RayHostDiscovery(NodeDiscovery):
    """The living nodes of the cluster, with as many slots as workers fit."""

    def __init__(
        self, use_gpu: bool = False, cpus_per_worker: float = 1, gpus_per_worker: float = 1
    ) -> None:
        super().__init__(use_gpu, cpus_per_worker, gpus_per_worker)


@dataclass
class ElasticAdapter:
    """What `RayExecutor` does where `min_workers` is given."""

    settings: Any
    min_workers: int
    max_workers: int | None
    reset_limit: int | None
    cooldown_range: Sequence[float] | None
    elastic_timeout: float
    override_discovery: bool
    cpus_per_worker: int
    use_gpu: bool
    gpus_per_worker: int | None

    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Keep the workers' class and variables for the runs, which start the workers."""
        self._env = dict(extra_env_vars or {})
        self._make = executable_cls and partial(
            executable_cls, *(executable_args or ()), **(executable_kwargs or {})
        )

    def _run(
        self, function: Callable[[], Any], callbacks: Sequence[Callable[[Any], Any]] | None
    ) -> list[Any]:
        gpus = self.gpus_per_worker or int(self.use_gpu)
        given = self.settings
        discovery = getattr(given, "discovery", None)
        if self.override_discovery or discovery is None:
            discovery = RayHostDiscovery(self.use_gpu, self.cpus_per_worker, gpus or 1)
        settings = SimpleNamespace(
            discovery=discovery,
            num_proc=self.min_workers,
            min_num_proc=self.min_workers,
            max_num_proc=self.max_workers,
            elastic_timeout=self.elastic_timeout,
            reset_limit=self.reset_limit,
            cooldown_range=self.cooldown_range,
            nics=given.nics,
        )
        resources = {"num_cpus": self.cpus_per_worker, "num_gpus": gpus}
        return run_job(settings, function, callbacks, resources, self._env)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """See RayExecutor.run."""
        return self._run(partial(fn, *(args or ()), **(kwargs or {})), callbacks)

    def execute(
        self,
        fn: Callable[[Any], Any],
        callbacks: Sequence[Callable[[Any], Any]] | None = None,
    ) -> list[Any]:
        """See RayExecutor.execute. Each call starts its workers anew."""
        make = self._make
        return self._run(lambda: fn(make() if make else None), callbacks)

    def run_remote(self, *_: Any, **__: Any) -> Any:
        """Raises UsageError: which workers there will be is not known before."""
        raise UsageError("run_remote of an elastic job", "use run")

    def execute_single(self, *_: Any, **__: Any) -> Any:
        """Raises UsageError: there are no workers between the runs of an elastic job."""
        raise UsageError("execute_single of an elastic job", "use run, and ask for hvd.rank()")

    def shutdown(self) -> None:
        """Nothing: a run ends its workers itself."""
