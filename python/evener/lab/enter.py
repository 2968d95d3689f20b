"""Run one program inside a node: `python -I -S enter.py FD,FD,... DIRECTORY PROGRAM ARGUMENT...`.

The descriptors stand for the node's namespaces. A process cannot move itself into a PID namespace,
only children that it makes afterwards: so this stays outside as the program's parent, hands
signals on, and ends as the program ended. Standard library only, for a quick start.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

if __package__:
    from evener.lab import linux
else:  # run as a file, without site-packages
    sys.path.insert(0, str(Path(__file__).parent))
    import linux  # type: ignore[import-not-found,no-redef]

_FORWARDED = ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "CONT", "WINCH")
_SI_KERNEL = 0x80


def command(namespaces: Sequence[int], directory: str, argv: Sequence[str]) -> list[str]:
    """The command line that runs `argv` inside; the descriptors must be passed on to it."""
    fds = ",".join(map(str, namespaces))
    return [sys.executable, "-I", "-S", str(Path(__file__)), fds, directory, *argv]


def main(arguments: list[str]) -> int:
    """Returns an exit status: 127 not found, 126 not to be run, as a shell would."""
    for fd in arguments[0].split(","):
        linux.setns(int(fd))
        os.close(int(fd))
    directory, argv = arguments[1], arguments[2:]
    try:
        os.chdir(directory)  # entering a mount namespace went to its root
    except OSError as error:
        _say(f"{directory} is not there in the node: {error.strerror}")
        return 126
    forwarded = {getattr(signal, f"SIG{name}") for name in _FORWARDED}
    signal.pthread_sigmask(signal.SIG_BLOCK, {*forwarded, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        linux.die_with_parent()
        # Python ignores the first and catches the second; a program expects a shell's settings.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*forwarded, signal.SIGCHLD})
        try:
            os.execvp(argv[0], argv)
        except OSError as error:
            _say(f"{argv[0]}: {error.strerror}")
            os._exit(127 if isinstance(error, FileNotFoundError) else 126)
    return _follow(child, forwarded)


def _say(text: str) -> None:
    sys.stderr.write(f"evener lab: {text}\n")
    sys.stderr.flush()


def _follow(child: int, forwarded: set[signal.Signals]) -> int:
    """Hand signals on to `child` until it ends, then end as it did."""
    while True:
        signalled = signal.sigwaitinfo({*forwarded, signal.SIGCHLD})
        if signalled.si_signo != signal.SIGCHLD:
            # What the terminal sends, it sends to the whole process group: the child has it.
            if signalled.si_code != _SI_KERNEL:
                os.kill(child, signalled.si_signo)
            continue
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
