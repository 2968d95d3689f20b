"""Which key-value stores this process meets others in: torch's, or `store`'s where there is none.

torch's process groups want a store of torch's. A process that must not import torch says so first
(`use_own`); the two speak the same protocol.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from evener.comm.world import store

_own = False


def use_own() -> None:
    """From now on no store of torch's is made in this process."""
    global _own
    _own = True


def own() -> bool:
    """Whether `use_own` was called."""
    return _own


def tcp(
    host: str,
    port: int,
    size: int | None,
    hosts: bool,
    timeout: timedelta,
    multi_tenant: bool = False,
) -> Any:
    """A connection to the store at that address; hosts: it is held here. Raises RuntimeError."""
    if _own:
        try:
            kind = store.Host if hosts else store.Client
            return kind(host, port, timeout)
        except OSError as error:
            raise store.StoreError(f"port {port}: {error.strerror or error}") from error
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        host, port, size, hosts, timeout, wait_for_workers=False, multi_tenant=multi_tenant
    )


def prefixed(prefix: str, base: Any) -> Any:
    """A part of a store."""
    if _own:
        return store.Prefixed(prefix, base)
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(prefix, base)


def alone() -> Any:
    """A store for a single process."""
    if _own:
        return store.Alone()
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    return HashStore()
