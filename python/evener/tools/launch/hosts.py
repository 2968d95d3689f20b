"""Hosts and slots: `-H gpu1:2,gpu2:2`, host files, and which host runs how many ranks."""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass
from pathlib import Path

from evener.base import interfaces
from evener.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@%-]*|\[[0-9A-Fa-f:.]+\]")


@dataclass(frozen=True)
class Host:
    """A host and the number of its slots; a plan's hosts have the slots that are used."""

    name: str
    slots: int


def parse_hosts(text: str) -> list[Host]:
    """`gpu1:2,gpu2:4,gpu3` (1 slot where none is given). Raises UsageError naming the entry."""
    return _unique([_entry(part, "-H") for part in text.split(",") if part.strip()], "-H")


def parse_hostfile(path: Path) -> list[Host]:
    """One line per host: `gpu1 slots=2`, `gpu1:2` or `gpu1`; `#` starts a comment.

    The formats of Open MPI and Horovod. Raises UsageError naming the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UsageError(
            f"the host file {path} cannot be read: {error.strerror}", "name a file that exists"
        ) from error
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        host = _entry(words[0], where)
        for word in words[1:]:
            key, _, value = word.partition("=")
            if key == "slots":
                host = Host(host.name, _slots(value, word, where))
            elif key not in ("max_slots", "max-slots"):
                raise UsageError(f"{where}: {word!r} is not understood", "write `HOST slots=N`")
        hosts.append(host)
    if not hosts:
        raise UsageError(f"the host file {path} names no host", "write a line `HOST slots=N`")
    return _unique(hosts, str(path))


def place(hosts: list[Host], ranks: int | None) -> list[Host]:
    """The hosts that run `ranks` ranks (None: all slots), filled in their order.

    Raises UsageError where the slots are too few.
    """
    total = sum(host.slots for host in hosts)
    ranks = total if ranks is None else ranks
    if ranks > total:
        given = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise UsageError(
            f"-np {ranks} needs {ranks} slots, but there are {total} ({given})",
            f"lower -np to {total}, or give the hosts more slots",
        )
    placed, left = [], ranks
    for host in hosts:
        if left:
            placed.append(Host(host.name, min(host.slots, left)))
            left -= placed[-1].slots
    return placed


def is_local(name: str) -> bool:
    """Whether `name` is this host."""
    own = socket.gethostname()
    if name.strip("[]") in ("localhost", "127.0.0.1", "::1", own, own.partition(".")[0]):
        return True
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(name.strip("[]"), None)}
    except OSError:
        return False
    return bool(found & {address for _, address in interfaces.addresses()})


def _entry(text: str, where: str) -> Host:
    text = text.strip()
    name, colon, slots = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        name, slots = text, "1"
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where}: {text!r} is not a host", "write HOST or HOST:SLOTS")
    return Host(name, _slots(slots, text, where))


def _slots(value: str, text: str, where: str) -> int:
    if not (value.isascii() and value.isdecimal() and int(value) > 0):
        raise UsageError(
            f"{where}: {text!r} has {value!r} slots", "write HOST:SLOTS with 1 or more slots"
        )
    return int(value)


def _unique(hosts: list[Host], where: str) -> list[Host]:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"{where}: {name} stands there twice", "name it once, with all slots")
    return hosts
