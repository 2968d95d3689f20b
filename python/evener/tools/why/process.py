"""What Linux says of a process from outside: a stopped one need not answer for it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_PY_SPY_SECONDS = 5.0


@dataclass
class Process:
    """One process. `state` is /proc's letter, X where the process is gone."""

    pid: int
    state: str = "X"
    command: str = ""
    wchan: str = ""
    kernel: list[str] = field(default_factory=list)
    rss: int = 0
    swap: int = 0
    threads: int = 0
    cpu: float = 0.0
    """Seconds of CPU so far."""
    tracer: int = 0

    def document(self) -> dict[str, Any]:
        return asdict(self)


def look(pid: int, since: float = float("inf"), proc: Path = Path("/proc")) -> Process:
    """The process `pid` now. Never raises: what cannot be read stays empty.

    since: seconds of the monotonic clock at which it ran already; a process that began later has
    got its number, and the one that is asked for is gone.
    """
    found, own = Process(pid), proc / str(pid)
    try:
        fields = (own / "stat").read_text(errors="replace").rpartition(")")[2].split()
        found.state = fields[0]
        found.cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        found.threads = int(fields[17])
        if int(fields[19]) / os.sysconf("SC_CLK_TCK") > since + 5.0:
            return Process(pid)
    except (OSError, IndexError, ValueError):
        return found
    with contextlib.suppress(OSError):
        found.command = (own / "cmdline").read_bytes()[:4096].replace(b"\0", b" ").decode(
            "utf-8", "replace"
        ).strip()[:300]  # fmt: skip
    with contextlib.suppress(OSError):
        for line in (own / "status").read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            with contextlib.suppress(ValueError, IndexError):
                if name == "VmRSS":
                    found.rss = int(value.split()[0]) << 10
                elif name == "VmSwap":
                    found.swap = int(value.split()[0]) << 10
                elif name == "TracerPid":
                    found.tracer = int(value)
    with contextlib.suppress(OSError):
        found.wchan = (own / "wchan").read_text(errors="replace").strip("0 \n")
    with contextlib.suppress(OSError):  # root only
        lines = (own / "stack").read_text(errors="replace").splitlines()[:20]
        found.kernel = [line.partition("] ")[2] or line for line in lines]
    return found


def py_spy(pid: int) -> list[dict[str, Any]]:
    """Stacks by py-spy, innermost frame first; empty where it is not installed or not allowed."""
    tool = shutil.which("py-spy")
    if tool is None:
        return []
    command = [tool, "dump", "--pid", str(pid), "--json", "--nonblocking"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PY_SPY_SECONDS, check=False)
        threads = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return []
    return [
        {
            "name": str(thread.get("thread_name") or "?"),
            "main": str(thread.get("thread_name")) == "MainThread",
            "frames": [
                f"{f.get('filename')}:{f.get('line')} {f.get('name')}"
                for f in thread.get("frames", [])[:40]
            ],
        }
        for thread in threads
        if isinstance(thread, dict)
    ]


def faulthandler(text: str) -> list[dict[str, Any]]:
    """What Python's faulthandler wrote, as the same; it writes the current thread last."""
    found: list[dict[str, Any]] = []
    for line in text.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")):
            found.append({"name": line.split(" (")[0], "main": False, "frames": []})
        elif line.startswith('  File "') and found:
            path, _, rest = line[8:].partition('", line ')
            number, _, name = rest.partition(" in ")
            found[-1]["frames"].append(f"{path}:{number} {name}")
    if found:
        # The main thread was started first, so it is listed last but for the current one.
        found[-1]["main"] = True
        found.reverse()
    return found


def sockets(pid: int, proc: Path = Path("/proc")) -> list[dict[str, Any]]:
    """The process's TCP connections: both ends, bytes not acknowledged, and how often the oldest of
    them was sent again. /proc shows those of the process's own network namespace."""
    own = set()
    with contextlib.suppress(OSError):
        for entry in (proc / str(pid) / "fd").iterdir():
            with contextlib.suppress(OSError):
                target = str(entry.readlink())
                if target.startswith("socket:["):
                    own.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / str(pid) / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if len(fields) > 9 and fields[3] == "01" and fields[9] in own:
                    found.append(
                        {
                            "local": _address(fields[1]), "remote": _address(fields[2]),
                            "unacked": int(fields[4].partition(":")[0], 16),
                            # Timer 1 waits for an acknowledgement, 4 for room at the receiver.
                            "again": int(fields[6], 16) if fields[5].startswith("01") else 0,
                        }
                    )  # fmt: skip
    return found[:2000]


def _address(text: str) -> str:
    """`0100007F:1F90` is 127.0.0.1:8080."""
    raw, _, port = text.partition(":")
    words = [bytes.fromhex(raw[i : i + 8])[::-1] for i in range(0, len(raw), 8)]
    packed = b"".join(words)
    if len(packed) == 16 and packed[:12] == b"\0" * 10 + b"\xff\xff":
        packed = packed[12:]
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return f"{socket.inet_ntop(family, packed)}:{int(port, 16)}"


def variables(pid: int, proc: Path = Path("/proc")) -> dict[str, str]:
    """The variables that a process was started with; empty where they may not be read."""
    with contextlib.suppress(OSError):
        raw = (proc / str(pid) / "environ").read_bytes().decode("utf-8", "replace")
        return dict(part.split("=", 1) for part in raw.split("\0") if "=" in part)
    return {}


def family(root: int, proc: Path = Path("/proc")) -> set[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in proc.iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, left = {root}, [root]
    while left:
        more = [child for child in children.get(left.pop(), []) if child not in found]
        found.update(more)
        left += more
    return found


def memory_kills(pid: int, proc: Path = Path("/proc")) -> Path | None:
    """The file in which the memory cgroup of a process counts who was killed for memory."""
    root = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        for line in (proc / str(pid) / "cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if names == "memory":
                places = [root / "memory" / path.lstrip("/"), root / "memory"]
                files = [place / "memory.oom_control" for place in places]
            elif not names:
                files = [root / path.lstrip("/") / "memory.events", root / "memory.events"]
            else:
                continue
            for file in files:
                if counted(file) is not None:
                    return file
    return None


def memory(pid: int, proc: Path = Path("/proc")) -> dict[str, int]:
    """Bytes of programs in the process's memory cgroup, and its limit; empty without a limit."""
    file = memory_kills(pid, proc)
    if file is None:
        return {}
    place = file.parent
    for limit, name in (("memory.max", "anon"), ("memory.limit_in_bytes", "rss")):
        with contextlib.suppress(OSError, ValueError):
            most = int((place / limit).read_text())
            for line in (place / "memory.stat").read_text().splitlines():
                if line.split()[0] == name and most < 1 << 60:
                    return {"used": int(line.split()[1]), "limit": most}
    return {}


def counted(file: Path) -> int | None:
    """How many that file counts; None where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
    return None
