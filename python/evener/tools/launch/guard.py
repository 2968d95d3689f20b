"""The process on each host that takes everything it started with it when it goes.

    python -m evener.tools.launch.guard [--env] SCRATCH COMMAND...

With --env it first reads a line from its standard input: a JSON object of variables to set. Secrets
come to other hosts this way, because all users of a host can read its command lines.

It runs COMMAND in a session of its own and waits. When its standard input ends (the launcher is
gone: closed it, was interrupted, was killed, the ssh connection broke) or on SIGTERM or SIGHUP, all
descendants get SIGTERM, and after a grace period SIGKILL. The same happens to what COMMAND leaves
behind. As a "child subreaper" (Linux) it is the parent of every orphan below it, so nothing escapes
by forking twice or by a session of its own. SCRATCH is a folder that it makes and removes.

Standard library only, and no import of the rest of Evener: it starts before every rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

GRACE = 5.0
RINGS = "EVENER_LAUNCH_WATCH"
"""The variable that names the folder of the ranks' rings."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def descendants(root: int) -> list[int]:
    """Process ids of all living descendants of `root`, from /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError, IndexError, ValueError):
                # The name in parentheses may hold anything: what follows the last one is fields.
                fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if fields[0] != "Z":
                    children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [root]
    while queue:
        for child in children.get(queue.pop(), []):
            found.append(child)
            queue.append(child)
    return found


def end_descendants(grace: float) -> None:
    """SIGTERM to all, SIGKILL to who is left after `grace` seconds."""
    end = time.monotonic() + grace
    told: set[int] = set()
    while alive := descendants(os.getpid()):
        last = time.monotonic() > end
        for pid in alive:
            if last or pid not in told:
                told.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if last else signal.SIGTERM)
        _reap()
        time.sleep(0.05)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def read_environment(fd: int) -> dict[str, str] | None:
    """The variables in the first line of `fd`; None where it ends before. Reads no further."""
    line = b""
    while not line.endswith(b"\n"):
        # One byte at a time would take a call each; nothing comes after this line but the end.
        chunk = os.read(fd, 65536)
        if not chunk:
            return None
        line += chunk
    return {str(name): str(value) for name, value in json.loads(line).items()}


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[0] == "--env":
        arguments = arguments[1:]
        variables = read_environment(0)
        if variables is None:
            sys.stderr.write("the launcher went before it sent the job's variables\n")
            return 128 + signal.SIGTERM
        os.environ.update(variables)
    scratch, *command = arguments
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ending = threading.Event()

    def on_signal(_number: int, _frame: object) -> None:
        ending.set()

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    # Ctrl-C reaches the whole foreground group; the launcher decides what follows from it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path(scratch).mkdir(mode=0o700, parents=True, exist_ok=True)

    def before_exec() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=before_exec
        )
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        return 127

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        ending.set()

    threading.Thread(target=watch, daemon=True).start()
    status: int | None = None
    try:
        while status is None and not ending.is_set():
            try:
                status = child.wait(0.1)
            except subprocess.TimeoutExpired:  # noqa: S112 - it runs
                continue
    finally:
        end_descendants(GRACE)
        shutil.rmtree(scratch, ignore_errors=True)
        if rings := os.environ.get(RINGS):  # where no launcher is left to do it
            shutil.rmtree(rings, ignore_errors=True)
    if status is None:
        return 128 + signal.SIGTERM
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
