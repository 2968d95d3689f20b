"""This host's addresses and interfaces."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Collection, Iterable
from typing import Any

from evener.base import interfaces
from evener.tools.launch.hosts import is_local


def get_local_host_addresses() -> list[str]:
    """All IPv4 addresses of this host."""
    return [address for _, address in interfaces.addresses() if ":" not in address]


def get_local_intfs(nic: str | None = None) -> set[str]:
    """Names of this host's interfaces that have an address, or `nic` if it is one of them."""
    names = {name for name, _ in interfaces.addresses()}
    return names if nic is None else names & {nic}


def resolve_host_address(host_name: str) -> str | None:
    """The IPv4 address of a host; None where it has none."""
    try:
        return socket.gethostbyname(host_name)
    except OSError:
        return None


def filter_local_addresses(all_host_names: Iterable[str]) -> list[str]:
    """The hosts that are not this one."""
    return [name for name in all_host_names if not is_local(name)]


def find_port(server_factory: Callable[[tuple[str, int]], Any]) -> tuple[Any, int]:
    """(server, port) of `server_factory((address, port))` at a free port. OSError without one."""
    for _ in range(200):
        port = random.randint(1024, 65535)
        try:
            return server_factory(("", port)), port
        except OSError:  # noqa: S112 - taken: the next one
            continue
    raise OSError("no port is free")


def get_driver_ip(nics: Collection[str] | None) -> str:
    """The IPv4 address of this host on one of `nics`. RuntimeError where none has one."""
    for name, address in interfaces.addresses():
        if ":" not in address and (not nics or name in nics):
            return address
    raise RuntimeError(f"no interface of {', '.join(nics or ())} has an IPv4 address")
