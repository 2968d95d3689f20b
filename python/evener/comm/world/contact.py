"""The address of a key-value store, as text that one process can hand to another on any host.

A host has several addresses, and which of them a peer can reach only the peer can find out; a port
may belong to a stranger by the time the text arrives. So a contact names all addresses, and a token
that the store holds.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from evener.base import interfaces
from evener.base.log import logger
from evener.comm.world import stores

_TOKEN = "evener/token"


@dataclass(frozen=True)
class Contact:
    """Where a store is. `token` tells it from a stranger's that has the same address."""

    namespace: str
    addresses: list[str]
    port: int
    token: str

    def text(self) -> str:
        return json.dumps([self.namespace, self.addresses, self.port, self.token])

    @staticmethod
    def parse(text: str) -> Contact:
        """Raises ValueError or TypeError where `text` is no contact."""
        return Contact(*json.loads(text))


def serve(seconds: float) -> tuple[Any, Contact]:
    """A new store in this process, on a free port. seconds: how long its operations may wait."""
    store = stores.tcp("localhost", 0, None, True, timedelta(seconds=seconds))
    contact = Contact(*own_place(), store.port, secrets.token_hex(8))
    store.set(_TOKEN, contact.token)
    return store, contact


def connect(contact: Contact, deadline: float, once: bool = False) -> tuple[Any, str] | None:
    """The store and the address at which it was reached; None where none answers in time.

    Every address is tried, again and again until `deadline` (time.monotonic()), or once.
    """
    addresses = addresses_of((contact.namespace, contact.addresses))
    while True:
        for address in addresses:
            left = max(deadline - time.monotonic(), 0.1)
            try:
                socket.create_connection((address, contact.port), min(left, 2.0)).close()
                limit = timedelta(seconds=min(left, 5.0))
                store = stores.tcp(address, contact.port, None, False, limit)
                if store.get(_TOKEN).decode() == contact.token:
                    return store, address
            except (OSError, RuntimeError) as error:
                logger.debug("store at %s port %d: %s", address, contact.port, error)
        if once or time.monotonic() > deadline:
            time.sleep(0.1)
            return None
        time.sleep(0.2)


def own_place() -> tuple[str, list[str]]:
    """Where this process can be reached, for `addresses_of`: a namespace, and addresses."""
    return _namespace(), _own_addresses()


def addresses_of(place: tuple[str, list[str]]) -> list[str]:
    """By which addresses to try the process whose `own_place` that is, the best first."""
    namespace, addresses = place
    return ["127.0.0.1", "::1"] if namespace == _namespace() else addresses


def _own_addresses() -> list[str]:
    """Addresses by which other hosts may reach this one, the asked-for interface's first."""
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    found = [
        (name not in wanted, index, address)
        for index, (name, address) in enumerate(interfaces.addresses())
        if not interfaces.is_loopback(address)
    ]
    return [address for _, _, address in sorted(found)]


def _namespace() -> str:
    """Equal for two processes exactly where 127.0.0.1 is the same place for both."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return socket.gethostname()
