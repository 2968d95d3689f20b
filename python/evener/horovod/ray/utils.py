"""Which interfaces the workers use: what Ray Train's Horovod trainer asks for.

Nothing is probed: torch finds the interface that leads to the store, as for a RayExecutor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray


def detect_nics(
    settings: Any, all_host_names: Sequence[str], node_workers: Sequence[Any] | None = None
) -> list[str]:
    """The interfaces that `settings.nics` names; none where it names none."""
    del all_host_names, node_workers
    return sorted(settings.nics or ())


def nics_to_env_var(nics: Iterable[str]) -> dict[str, str]:
    """The variables that hold a worker to `nics`; none for no interfaces."""
    names = list(nics)
    if not names:
        return {}
    joined = ",".join(names)
    return {
        "HOROVOD_GLOO_IFACE": names[0],
        "GLOO_SOCKET_IFNAME": joined,
        "NCCL_SOCKET_IFNAME": joined,
    }


def map_blocking(fn: Callable[[Any], Any], collection: Iterable[Any]) -> list[Any]:
    """`fn` of each element gives a reference; wait for all."""
    return list(ray.get([fn(element) for element in collection]))
