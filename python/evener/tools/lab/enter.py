"""Run one program inside a node: `python -I -S enter.py FD,FD,... DIRECTORY PROGRAM ARGUMENT...`.

The descriptors stand for the node's namespaces. A process cannot move itself into a PID namespace,
only children that it makes afterwards, so there is always one outside that is the program's parent,
hands signals on, and ends as the program ended. Here there are two:

    caller > guard > parent | program      (| is the border of the namespaces)

Were the guard left out, then a caller that kills its child would leave the program's remains to the
host's process 1, and a node cannot be taken down before those are collected: where process 1 does
not collect (in many containers), never. As it is, the parent outlives the guard long enough to kill
the program and collect it. Standard library only, for a quick start.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__:
    from evener.tools.lab import linux
else:  # run as a file, without site-packages
    sys.path.insert(0, str(Path(__file__).parent))
    import linux  # type: ignore[import-not-found,no-redef]

_FORWARDED = ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "CONT", "WINCH")
_SI_KERNEL = 0x80
_GUARD_ENDED = signal.SIGRTMIN


def command(namespaces: Sequence[int], directory: str, argv: Sequence[str]) -> list[str]:
    """The command line that runs `argv` inside; the descriptors must be passed on to it."""
    fds = ",".join(map(str, namespaces))
    return [sys.executable, "-I", "-S", str(Path(__file__)), fds, directory, *argv]


def main(arguments: list[str]) -> int:
    """Returns an exit status: 127 not found, 126 not to be run, as a shell would."""
    fds = [int(fd) for fd in arguments[0].split(",")]
    handed = {getattr(signal, f"SIG{name}") for name in _FORWARDED}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*handed, signal.SIGCHLD, _GUARD_ENDED})
    parent = linux.fork_bound(_GUARD_ENDED)
    if parent:
        for fd in fds:
            os.close(fd)
        return _follow(parent, handed)
    for fd in fds:
        linux.setns(fd)
        os.close(fd)
    directory, argv = arguments[1], arguments[2:]
    try:
        os.chdir(directory)  # entering a mount namespace went to its root
    except OSError as error:
        _say(f"{directory} is not there in the node: {error.strerror}")
        return 126
    program = linux.fork_bound()
    if program:
        return _follow(program, handed)
    # Python ignores or catches these; a program expects to find them as a shell leaves them.
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        _say(f"{argv[0]}: {error.strerror}")
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _say(text: str) -> None:
    sys.stderr.write(f"evener lab: {text}\n")
    sys.stderr.flush()


def _follow(child: int, handed: set[signal.Signals]) -> int:
    """Hand signals on to `child` until it ends, then end as it did."""
    while True:
        came = signal.sigwaitinfo({*handed, signal.SIGCHLD, _GUARD_ENDED})
        if came.si_signo == _GUARD_ENDED:
            os.kill(child, signal.SIGKILL)
        # What the terminal sends, it sends to the whole process group: the child has it.
        elif came.si_signo != signal.SIGCHLD and came.si_code != _SI_KERNEL:
            os.kill(child, came.si_signo)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended == child:
            break
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
