"""What a host is like, asked before a job starts on it: `python -m evener.tools.launch.probe`.

It answers two questions on its standard input, a line of JSON each, and ends with it: what is here,
and who answers from here. Meanwhile it listens on the port where ranks are to meet and on a free
one, so that the other hosts can try both. Standard library alone, and no torch: a probe takes half
a second.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

from evener.base import interfaces
from evener.base.ports import free_port

# Before each answer: what a shell prints when it starts is none.
MARK = "evener-probe "
_SCRATCH = "/tmp"


def dial(name: str, port: int, seconds: float) -> str:
    """Try one connection: "" where it came to be; else resolve, refused or silent."""
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except OSError:
        return "resolve"
    why = "silent"
    for family, kind, protocol, _, target in found[:3]:
        with socket.socket(family, kind, protocol) as connection:
            connection.settimeout(seconds / len(found[:3]))
            try:
                connection.connect(target)
                return ""
            except ConnectionRefusedError:
                why = "refused"
            except OSError:  # noqa: S110 - silent, as the next may not be
                pass
    return why


def facts(question: dict[str, Any], listening: list[socket.socket]) -> dict[str, Any]:
    """What is here. The sockets that listen are added to `listening`."""
    script = question["script"]
    gpus = gpu_count()
    port, error = _listen(question["port"] or free_port(), listening)
    program = shutil.which(question["program"], path=question["path"])
    ours = program is not None and Path(program).parent == Path(sys.executable).parent
    return {
        "hostname": socket.gethostname(),
        "evener": _version("evener"),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "nccl": next(
            filter(None, map(_installed, ("nvidia-nccl-cu13", "nvidia-nccl-cu12"))), "none"
        ),
        "script": script,
        "digest": digest(script) if script else None,
        "program": program,
        "no_module": question["module"] if ours and lacks(question["module"]) else "",
        "gpus": gpus,
        "gpu": "present" if gpus else "none",
        "free_mb": shutil.disk_usage(_SCRATCH).free // 1_000_000,
        "scratch": _scratch(),
        "interfaces": sorted({name for name, _ in interfaces.addresses()}),
        "addresses": [address for _, address in interfaces.addresses()],
        "port": port,
        "port_error": error,
        "open": _listen(free_port(), listening)[0],
    }


def digest(path: str) -> str | None:
    """Return the digest of a file's content; None where it cannot be read."""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError:
        return None


def lacks(module: str) -> bool:
    """Whether Python here, in this folder, surely has no such module. Nothing of it is imported."""
    top, *rest = module.split(".") if module else [""]
    if not top:
        return False
    with contextlib.suppress(ImportError, ValueError):  # a finder of others may say anything
        there = importlib.machinery.PathFinder.find_spec(top, [str(Path.cwd())])
        there = there or importlib.util.find_spec(top)
        for name in rest:
            places = list((there and there.submodule_search_locations) or ())
            if there is not None and not (places and all(map(os.path.isdir, places))):
                return False  # in an archive, or put there by what is above it
            there = there and importlib.machinery.PathFinder.find_spec(name, places)
        return there is None
    return False


def gpu_count() -> int:
    """The number of NVIDIA GPUs that a rank here would see."""
    with contextlib.suppress(OSError):
        there = len(list(Path("/proc/driver/nvidia/gpus").iterdir()))
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        return there if shown is None else min(there, len([x for x in shown.split(",") if x]))
    return 0


def _version(name: str) -> str:
    return _installed(name) or "none"


def _installed(name: str) -> str:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return ""


def _scratch() -> str:
    """Why nothing can be written where torchrun writes; "" where it can."""
    try:
        with tempfile.TemporaryFile(dir=_SCRATCH) as file:
            file.write(b"evener")
    except OSError as error:
        return f"{_SCRATCH} cannot be written to: {error.strerror}"
    return ""


def _listen(port: int, listening: list[socket.socket]) -> tuple[int, str]:
    """(the port that listens now, ""), for IPv4 and IPv6; (0, why) where it cannot be."""
    why = ""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        both = family == socket.AF_INET6
        try:
            server = socket.create_server(
                (address, port), family=family, backlog=128, dualstack_ipv6=both
            )
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            if getattr(error, "errno", 0) in (errno.EADDRINUSE, errno.EACCES):
                break
        else:
            listening.append(server)
            return int(server.getsockname()[1]), ""
    return 0, why


def _answer(what: Any) -> None:
    sys.stdout.write(MARK + json.dumps(what) + "\n")
    sys.stdout.flush()


def _dialled(wanted: dict[str, Any]) -> dict[str, str]:
    """What came of each name, all tried at once."""
    names = wanted["names"]
    with ThreadPoolExecutor(max(len(names), 1)) as pool:
        found = pool.map(lambda name: dial(name, wanted["port"], 2.0), names)
        return dict(zip(names, found, strict=True))


def main() -> None:
    """Answer what comes on standard input, until it ends."""
    listening: list[socket.socket] = []
    first = sys.stdin.readline()
    if not first:
        return
    _answer(facts(json.loads(first), listening))
    if second := sys.stdin.readline():
        wanted = json.loads(second)
        with ThreadPoolExecutor(max(len(wanted), 1)) as pool:
            _answer(list(pool.map(_dialled, wanted)))
    sys.stdin.read()


if __name__ == "__main__":
    main()
