"""Labs that run on this machine, found by the abstract sockets on which their keepers listen.

The kernel lists them in /proc/net/unix and forgets a name with its socket: there is no directory
to keep tidy. Any user may take any free name, so a name proves nothing: what answers is believed
only after the kernel has said who listens (SO_PEERCRED). It must be a process of this user, the one
in the name, and the child of the process that it calls the lab's owner. For the answer holds
environments and namespaces in which a shell is started next. A keeper, too, answers its own user
alone.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.base.log import logger
from evener.errors import UsageError
from evener.tools.lab import wire
from evener.tools.lab.errors import LabError
from evener.tools.lab.spec import Spec

# The number is the format's of what is asked and answered: labs of another Evener are not found.
_PREFIX = "evener-lab/2"
_PEERCRED = socket.SO_PEERCRED
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
    """All labs of this user, the oldest first. Impostors are passed over."""
    found = {}  # a name is listed once for the listener and once for each connection
    listed = Path("/proc/net/unix").read_text(encoding="ascii", errors="replace")
    for uid, keeper in _NAME.findall(listed):
        if int(uid) != os.getuid():
            continue
        with contextlib.suppress(LabError):  # it may be going
            about, fds = _ask(int(keeper), {"do": "about"})
            wire.close(fds)
            if _parent(int(keeper)) != about["owner"]:
                continue
            try:
                spec = Spec(**about["spec"])
            except (TypeError, UsageError):  # of fields that this version does not have
                owner = about["owner"]
                logger.warning(f"the lab of process {owner} is of another Evener: passed over")
                continue
            found[int(keeper)] = Running(
                int(keeper),
                about["owner"],
                spec,
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


def _check(connection: socket.socket, keeper: int) -> None:
    """Raises LabError unless process `keeper` of this user listens at the other end."""
    # struct ucred: pid, uid, gid of who called listen(2), as seen from here.
    pid, uid, _ = struct.unpack("=iII", connection.getsockopt(socket.SOL_SOCKET, _PEERCRED, 12))
    if (pid, uid) != (keeper, os.getuid()):
        raise LabError(
            f"process {pid} of user {uid} listens in the name of the lab of process {keeper}",
            f"it is not your lab, and nothing was asked of it; see `ps -fp {pid}`",
        )


def _parent(pid: int) -> int:
    """Process id of the parent of `pid`; 0 where there is no such process."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        # The name in parentheses may hold anything: what follows the last one is fields.
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[1])
    return 0


def _ask(keeper: int, request: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(10)
            connection.connect(name_of(keeper))
            _check(connection, keeper)
            wire.send(connection, request)
            answer, fds = wire.receive(connection)
    except (OSError, EOFError) as error:
        raise LabError(f"the lab of process {keeper} does not answer: {error}") from None
    if "error" in answer:
        raise LabError(answer["error"])
    return answer, fds
