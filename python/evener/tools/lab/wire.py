"""Messages between a lab's processes: JSON with file descriptors, over SOCK_SEQPACKET sockets."""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
from typing import Any

_LARGEST = 1 << 20
_MOST_FDS = 250  # the kernel's SCM_MAX_FD is 253


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends."""
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (one, two):
        _widen(end)
    return one, two


def _widen(end: socket.socket) -> None:
    # Environments travel: the default of 208 KB is less than a full one.
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST)


def send(end: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    """Send `message`, a JSON object, and copies of `fds`."""
    ancillary = []
    if fds:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    end.sendmsg([json.dumps(message).encode()], ancillary)


def receive(end: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One message and its descriptors, which the caller owns. Raises EOFError at the end."""
    space = socket.CMSG_SPACE(_MOST_FDS * array.array("i").itemsize)
    data, ancillary, flags, _ = end.recvmsg(_LARGEST, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    try:
        if not data:
            raise EOFError("the other end closed")
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise OSError("a message was cut off")
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ValueError(f"a message is {type(message).__name__}, not an object")
    except BaseException:
        close(list(fds))
        raise
    return message, list(fds)


def close(fds: list[int]) -> None:
    """Close descriptors, those that are closed already too."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
