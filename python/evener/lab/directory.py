"""Labs that run on this machine, found by the abstract sockets on which their keepers listen.

The kernel lists them in /proc/net/unix and forgets a name with its socket: there is no directory
to keep tidy. A keeper answers its own user alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.errors import UsageError
from evener.lab import wire
from evener.lab.errors import LabError
from evener.lab.spec import Spec

# The number is the format's of what is asked and answered: labs of another Evener are not found.
_PREFIX = "evener-lab/2"
_NAME = re.compile(rf"@{_PREFIX}/(\d+)/(\d+)$", re.MULTILINE)


def name_of(keeper: int) -> str:
    """The abstract socket of the keeper with process id `keeper`."""
    return f"\0{_PREFIX}/{os.getuid()}/{keeper}"


@dataclass(frozen=True)
class Running:
    """A lab that someone else holds. `owner`: process id of who built it."""

    keeper: int
    owner: int
    spec: Spec
    mode: str
    inherited: dict[str, str]
    variables: tuple[dict[str, str], ...]

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        """One request to its keeper. Raises LabError."""
        return _ask(self.keeper, request)


def running() -> list[Running]:
    """All labs of this user, the oldest first."""
    found = {}  # a name is listed once for the listener and once for each connection
    listed = Path("/proc/net/unix").read_text(encoding="ascii", errors="replace")
    for uid, keeper in _NAME.findall(listed):
        if int(uid) != os.getuid():
            continue
        with contextlib.suppress(LabError):  # it may be going
            about, fds = _ask(int(keeper), {"do": "about"})
            wire.close(fds)
            found[int(keeper)] = Running(
                int(keeper),
                about["owner"],
                Spec(**about["spec"]),
                about["mode"],
                about["inherited"],
                tuple(about["variables"]),
            )
    return sorted(found.values(), key=lambda lab: lab.keeper)


def choose(owner: int | None) -> Running:
    """The lab that runs, or the one of process `owner`. Raises UsageError where that is not one."""
    labs = running()
    if owner is not None:
        labs = [lab for lab in labs if owner in (lab.owner, lab.keeper)]
    if len(labs) == 1:
        return labs[0]
    names = ", ".join(f"{lab.owner} ({lab.spec})" for lab in labs)
    if labs:
        raise UsageError(f"several labs run: {names}", "choose one with --lab PID")
    raise UsageError(
        "no lab runs" if owner is None else f"no lab of process {owner} runs",
        "start one in another terminal: evener lab up --nodes 2",
    )


def _ask(keeper: int, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(10)
            connection.connect(name_of(keeper))
            wire.send(connection, request)
            answer, fds = wire.receive(connection)
    except (OSError, EOFError) as error:
        raise LabError(f"the lab of process {keeper} does not answer: {error}") from None
    if "error" in answer:
        raise LabError(answer["error"])
    return answer, fds
