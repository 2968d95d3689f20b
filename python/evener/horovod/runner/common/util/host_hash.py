"""A name for this host, by which ranks that share it know that they do."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

NAMESPACE_PATH = "/proc/self/ns"


def _namespaces() -> str:
    """The namespaces of this process: containers of one host are different hosts."""
    folder = Path(NAMESPACE_PATH)
    if not folder.is_dir():
        return ""
    return " ".join(str(entry.readlink()) for entry in sorted(folder.iterdir()))


def _hash(string: str) -> str:
    return hashlib.md5(string.encode(), usedforsecurity=False).hexdigest()


def host_hash(salt: str | None = None) -> str:
    """The host's name and a hash of that, of the namespaces and of `salt`."""
    name = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    text = f"{name}-{_namespaces()}" + (f"-{salt}" if salt else "")
    return f"{name.partition('.')[0]}-{_hash(text)}"
