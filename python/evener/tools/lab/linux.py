"""The system calls behind namespaces that Python 3.10 does not have, each raising OSError.

Only the standard library: `enter.py` runs from here under `python -I -S`, so that entering a node
costs little.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 2

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
)
_libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int, what: str) -> None:
    """unshare(2); `what` names the namespaces in the error."""
    _check(_libc.unshare(flags), f"unshare({what})")


def setns(fd: int, kind: int = 0) -> None:
    """setns(2): the calling thread enters the namespace that `fd` stands for."""
    _check(_libc.setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    arguments = (source.encode(), target.encode(), kind.encode(), flags, data.encode())
    _check(_libc.mount(*arguments), f"mount({kind or source} on {target})")


def unmount(target: str) -> None:
    """umount2(2), at once, even if a process has a file open there."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount({target})")


def sethostname(name: str) -> None:
    """sethostname(2)."""
    _check(_libc.sethostname(name.encode(), len(name.encode())), f"sethostname({name})")


def fork_bound(number: int = signal.SIGKILL) -> int:
    """fork(2), but the child gets signal `number` when the process ends that called this.

    Only in processes with one thread: otherwise the end of the thread that forked would kill it.
    """
    alive, held = os.pipe()  # the kernel closes `held` with us; the child sees that it is gone
    child = os.fork()
    if child:
        os.close(alive)
        return child
    os.close(held)
    _check(_libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")
    poll = select.poll()
    poll.register(alive, 0)
    if poll.poll(0):  # it ended before we asked for the signal
        os._exit(1)
    os.close(alive)
    return 0


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, to wait for them."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl(PR_SET_CHILD_SUBREAPER)")
