"""The actor in which a rank lives."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from evener.horovod.ray import ray_logger
from evener.tools.launch import horovod_path


class BaseHorovodWorker:
    """One rank. `ray.remote(BaseHorovodWorker)` makes it an actor."""

    executable: Any = None

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        # The driver has Evener's Horovod, so its workers have it too.
        if importlib.util.find_spec("horovod") is None:
            sys.path.insert(0, str(horovod_path.ALIAS))
        os.environ["HOROVOD_HOSTNAME"] = self.node_id()
        os.environ["HOROVOD_RANK"], os.environ["HOROVOD_SIZE"] = str(world_rank), str(world_size)

    def node_id(self) -> str:
        """Ray's name for the node."""
        return str(ray.get_runtime_context().get_node_id())

    def hostname(self) -> str:
        """The host's name."""
        return socket.gethostname()

    def get_gpu_ids(self) -> list[Any]:
        """The GPUs that Ray gave to this actor."""
        return list(ray.get_gpu_ids())

    def update_env_vars(self, env_vars: Mapping[str, Any]) -> None:
        """Set variables in this process."""
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """This process's variables."""
        return dict(os.environ)

    def start_executable(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the object that `execute` hands to functions; without a class that is None."""
        if executable_cls is not None:
            self.executable = executable_cls(*(executable_args or ()), **(executable_kwargs or {}))

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """Call a function with that object."""
        return func(self.executable)

    def set_queue(self, queue: Any) -> None:
        """Send what `ray_logger.log` is given into `queue`."""
        ray_logger.configure(queue)
