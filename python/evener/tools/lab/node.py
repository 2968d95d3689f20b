"""The two processes that hold a node: a holder, and its child, the node's process 1.

The holder is forked by the keeper, which has one thread, so PR_SET_PDEATHSIG is safe here. When the
keeper ends, however it ends, the kernel kills the holder; when the holder ends it kills process 1;
and with process 1 the kernel ends everything that runs in the node's PID namespace. Nothing has a
name in a file system, so nothing is left.
"""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from evener.tools.lab import linux, wire

NAMESPACES = ("net", "uts", "ipc", "pid", "mnt")  # mnt last: paths change with it
# Where the keeper has its private tmpfs; in nodes it is found at LAB_DIRECTORY.
STAGE = Path("/dev/shm")
LAB_DIRECTORY = Path("/tmp/.evener-lab")
_COVERED = (Path("/tmp"), Path("/dev/shm"))


@dataclass(frozen=True)
class Held:
    """A node that is up: its holder's process id and descriptors of its NAMESPACES."""

    holder: int
    namespaces: tuple[int, ...]
    notes: tuple[str, ...]


def start(hostname: str, hosts: str, keep: list[str]) -> tuple[int, socket.socket]:
    """Fork the holder of a node; `finish` waits until the node is up."""
    ours, theirs = wire.pair()
    holder = linux.fork_bound()
    if holder:
        theirs.close()
        return holder, ours
    status = 1
    try:
        ours.close()
        status = _hold(hostname, hosts, keep, theirs)
    finally:
        os._exit(status)


def finish(holder: int, ours: socket.socket) -> Held:
    """The node that `start` began. Raises OSError with what the kernel refused."""
    try:
        message, fds = wire.receive(ours)
    except EOFError:
        raise OSError("a node's process ended while it was being built") from None
    finally:
        ours.close()
    if "refused" in message:
        raise OSError(message["number"], message["refused"])
    return Held(holder, tuple(fds), tuple(message["notes"]))


def _hold(hostname: str, hosts: str, keep: list[str], report: socket.socket) -> int:
    flags = linux.CLONE_NEWNET | linux.CLONE_NEWUTS | linux.CLONE_NEWIPC
    flags |= linux.CLONE_NEWNS | linux.CLONE_NEWPID
    try:
        linux.unshare(flags, "net, uts, ipc, mount, pid")
    except OSError as error:
        wire.send(report, {"refused": str(error), "number": error.errno or 0})
        return 1
    first = linux.fork_bound()
    if first == 0:
        try:
            _be_first(hostname, hosts, keep, report)
        finally:
            os._exit(1)
    report.close()
    os.waitpid(first, 0)
    return 0


def _be_first(hostname: str, hosts: str, keep: list[str], report: socket.socket) -> NoReturn:
    """Process 1 of the node: set it up, report, then wait and let the kernel reap orphans."""
    try:
        linux.sethostname(hostname)
        # Opened before /proc is replaced; a process may always open its own.
        fds = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in NAMESPACES]
        notes = _mount(hosts, keep)
    except OSError as error:
        wire.send(report, {"refused": str(error), "number": error.errno or 0})
        os._exit(1)
    wire.send(report, {"notes": notes}, fds)
    report.close()
    wire.close(fds)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        signal.pause()


def _mount(hosts: str, keep: list[str]) -> list[str]:
    """Own /proc, /sys, /tmp, /dev/shm, hosts and resolver. Returns what could not be done."""
    notes = []
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    kept = {path: _open(path) for path in map(Path, keep) if _covered(path) == Path("/tmp")}
    stage = os.open(STAGE / "lab", os.O_PATH)
    _tmpfs("/tmp")
    LAB_DIRECTORY.mkdir()
    _bind(stage, LAB_DIRECTORY, is_directory=True)
    linux.unmount(str(STAGE))
    kept |= {path: _open(path) for path in map(Path, keep) if _covered(path) == Path("/dev/shm")}
    _tmpfs("/dev/shm")
    for path, fd in kept.items():
        if fd is not None:
            _bind(fd, path, is_directory=path.is_dir() or _is_directory(fd))
    for fd in (stage, *kept.values()):
        if fd is not None:
            os.close(fd)
    private = Path("/tmp/.evener-node")
    private.mkdir(mode=0o755)
    for name, text in (("hosts", hosts), ("resolv.conf", "")):
        (private / name).write_text(text, encoding="ascii")
        try:
            linux.mount(str(private / name), f"/etc/{name}", "", linux.MS_BIND)
        except OSError as error:
            notes.append(f"/etc/{name} is the host's ({error.strerror})")
    shared = LAB_DIRECTORY / "ssh_config"  # rewritten by `sshd`, for all nodes at once
    if shared.exists():
        linux.mount(str(shared), "/etc/ssh/ssh_config", "", linux.MS_BIND)
    linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    try:
        linux.mount("sysfs", "/sys", "sysfs", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    except OSError as error:
        notes.append(f"/sys shows the host's NICs ({error.strerror})")
    return notes


def _covered(path: Path) -> Path | None:
    """Which of the directories that a node has for itself holds `path`."""
    for root in _COVERED:
        if root in path.parents:
            return root
    return None


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_PATH)
    except FileNotFoundError:
        return None


def _is_directory(fd: int) -> bool:
    return os.stat(fd).st_mode & 0o170000 == 0o040000


def _bind(fd: int, target: Path, *, is_directory: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if is_directory:
        target.mkdir(exist_ok=True)
    else:
        target.touch()
    linux.mount(f"/proc/self/fd/{fd}", str(target), "", linux.MS_BIND | linux.MS_REC)


def _tmpfs(target: str) -> None:
    linux.mount("tmpfs", target, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=1777")
