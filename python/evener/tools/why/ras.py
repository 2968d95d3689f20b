"""NCCL's RAS, asked over its own socket: lines of text, so no program of NCCL's is needed."""

from __future__ import annotations

import contextlib
import os
import socket
import time

_DEFAULT = ("localhost", 28028)


def address(env: str | None = None) -> tuple[str, int]:
    """Where RAS listens: NCCL_RAS_ADDR, or NCCL's default."""
    host, colon, port = (env or os.environ.get("NCCL_RAS_ADDR", "")).rpartition(":")
    return (host.strip("[]"), int(port)) if colon and port.isdecimal() else _DEFAULT


def ask(place: tuple[str, int] | None = None, seconds: float = 3.0) -> str:
    """RAS's verbose status; empty where nobody listens or the answer does not come in time."""
    end, parts = time.monotonic() + seconds, []
    with contextlib.suppress(OSError):
        connection = socket.create_connection(place or address(), timeout=min(1.0, seconds))
        with connection:
            connection.sendall(f"TIMEOUT {max(1, int(seconds))}\nVERBOSE STATUS\n".encode())
            while (left := end - time.monotonic()) > 0:
                connection.settimeout(left)
                part = connection.recv(1 << 16)
                if not part:
                    break
                parts.append(part)
    text = b"".join(parts).decode("utf-8", "replace")
    return text if "Job summary" in text else ""
