"""Run a plan: stream the output by rank, name the first rank that failed, leave nothing behind.

Each command runs under a guard (guard.py) whose standard input is a pipe held here. Closing the
pipe ends that host's part of the job, and it closes by itself however this process ends.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from evener.base import settings
from evener.errors import EvenerError
from evener.tools.launch import guard
from evener.tools.launch.hosts import is_local
from evener.tools.launch.output import Files, emit, follow, stamp
from evener.tools.launch.plan import FORWARDED, RANK_MARK, HostCommand, Launch, Wishes
from evener.tools.why import Watch

_LAST_LINES = 20
_KEPT_LINES = 200
# After this long a guard that does not answer is killed; it needs GRACE for its own children.
_END_TIMEOUT = guard.GRACE + 10.0

_TORCHRUN_TAG = re.compile(re.escape(RANK_MARK) + r"(\d+)>>")
_MPIRUN_TAG = re.compile(r"\[[^\[\]\s]*,(\d+)\]<std(?:out|err|diag)>:")
_MPIRUN_5_TAG = re.compile(_MPIRUN_TAG.pattern + " ")


class JobError(EvenerError):
    """The job failed; the exit code is that of the first rank that failed."""

    def __init__(self, problem: str, fix: str, exit_code: int) -> None:
        super().__init__(problem, fix)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Failure:
    """What a launcher reported. status: exit status, or minus the signal's number."""

    rank: int
    status: int


class Tagged:
    """Takes a launcher's tags off a stream and gives whole lines of one rank each.

    Open MPI 4 tags whatever a rank wrote at once, which may be half a line: what follows a tag in
    the middle of a line goes on where that rank stopped. A line that is too long comes in pieces,
    and only the first has a tag.
    """

    def __init__(self, tag: re.Pattern[str]) -> None:
        self._tag = tag
        self._open: dict[int, str] = {}
        self._torn: int | None = None  # whose line the last piece was a part of

    def feed(self, line: str) -> list[tuple[int | None, str]]:
        """(rank or None for the launcher, text) of the lines that are complete with `line`."""
        parts = self._tag.split(line.rstrip("\n"))
        lines: list[tuple[int | None, str]] = [(self._torn, parts[0])] if parts[0] else []
        for index in range(1, len(parts), 2):
            rank, text = int(parts[index]), parts[index + 1]
            text = self._open.pop(rank, "") + text
            if index == len(parts) - 2:
                lines.append((rank, text))
            else:
                self._open[rank] = text
        if len(parts) == 1 and not parts[0]:
            lines.append((None, ""))
        if line.endswith("\n"):
            self._torn = None
        elif len(parts) > 1:
            self._torn = int(parts[-2])
        return lines

    def rest(self) -> list[tuple[int | None, str]]:
        """What was never ended by a newline."""
        left, self._open = list(self._open.items()), {}
        return list(left)


def torchrun_failure(text: str) -> Failure | None:
    """The root cause in torchrun's summary."""
    match = re.search(
        r"Root Cause.*?rank\s*:\s*(\d+) \(local_rank.*?exitcode\s*:\s*(-?\d+)", text, re.DOTALL
    )
    return Failure(int(match[1]), int(match[2])) if match else None


def mpirun_failure(text: str) -> Failure | None:
    """The first process that failed, as Open MPI 4 and 5 say it."""
    text = " ".join(text.split())
    match = re.search(r"Process name: \[.*?,(\d+)\] Exit code: (\d+)", text)
    if match:
        return Failure(int(match[1]), int(match[2]))
    match = re.search(r"noticed that process rank (\d+) .*? exited on signal (\d+)", text)
    return Failure(int(match[1]), -int(match[2])) if match else None


@dataclass
class _Running:
    command: HostCommand
    process: subprocess.Popen[str]
    threads: list[threading.Thread] = field(default_factory=list)
    launcher_lines: collections.deque[str] = field(
        default_factory=lambda: collections.deque(maxlen=400)
    )


class Job:
    """A plan that runs. `run` may be called once."""

    def __init__(
        self,
        plan: Launch,
        wishes: Wishes,
        cwd: Path,
        env: Mapping[str, str],
        *,
        output_dir: Path | None = None,
        verbose: bool = False,
        tag: bool = True,
        timestamps: bool = False,
        watch: str = "",
    ) -> None:
        """watch: the folder of the ranks' rings on each host; empty where nobody watches."""
        self._plan, self._wishes, self._cwd, self._env = plan, wishes, cwd, env
        self._verbose, self._tag = verbose, tag
        self._timestamps = timestamps
        self._torchrun = plan.launcher == "torchrun"
        old = plan.launcher.endswith("4)")
        self._pattern = _TORCHRUN_TAG if self._torchrun else _MPIRUN_TAG if old else _MPIRUN_5_TAG
        self._last: dict[int, collections.deque[str]] = {}
        self._files = Files(output_dir, len(plan.rank_hosts))
        self._lock = threading.Lock()
        self._watch = self._watcher(watch, output_dir or cwd) if watch else None

    def run(self) -> None:
        """Start all, wait for all. Raises JobError naming the first rank that failed.

        SIGINT, SIGTERM and SIGHUP end the job on all hosts; the error's exit code is then 130 or
        128 + signal.
        """
        running: list[_Running] = []
        stop: list[int] = []
        previous = {
            number: signal.signal(number, lambda n, _frame: stop.append(n))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        try:
            for command in self._plan.commands:
                running.append(self._start(command))
            if self._watch:
                self._watch_from(self._watch)
            failed = self._wait(running, stop)
        finally:
            if self._watch:
                self._watch.end()  # ranks that are ended make no progress
            self._end(running)
            if self._watch:
                self._watch.close()
            for number, handler in previous.items():
                signal.signal(number, handler)
            with self._lock:
                self._files.close()
        if stop:
            name = signal.Signals(stop[0]).name
            raise JobError(f"ended by {name}; all ranks were ended", "", 128 + stop[0])
        if failed is not None:
            raise self._error(failed, running)

    # --- the watch ---

    def _watcher(self, folder: str, keep_in: Path) -> Watch:
        return Watch(
            folder,
            len(self._plan.rank_hosts),
            settings.EVENER_WATCH_FLOOR.get(self._env),
            lambda text: emit(sys.stderr, f"evener launch: {text}"),
            keep_in,
            self._outputs,
        )

    def _watch_from(self, watch: Watch) -> None:
        """Watch the hosts on which ranks run, this one in any case."""
        env = {**self._env, **self._wishes.env}
        passed = {name: env[name] for name in FORWARDED if name in env}
        others = {command.host for command in self._plan.commands if command.remote}
        if not self._torchrun:
            others = {host for host in self._plan.rank_hosts if host and not is_local(host)}
        watch.start(sorted(others), self._wishes.rsh, self._cwd, passed)

    def _outputs(self) -> dict[str, str]:
        """The last lines of every rank, as files of a bundle."""
        with self._lock:
            return {
                f"rank{rank}.stderr": "\n".join(lines) + "\n" for rank, lines in self._last.items()
            }

    # --- one host ---

    def _start(self, command: HostCommand) -> _Running:
        scratch = f"{self._wishes.scratch}-{command.first_rank}"
        argv = [part.replace(f"={self._wishes.scratch}", f"={scratch}") for part in command.argv]
        # The guard removes the rings, whichever engine it runs.
        rings = {k: v for k, v in self._wishes.env.items() if k == guard.RINGS}
        process = start_guarded(
            argv,
            scratch,
            command.host if command.remote else None,
            {**rings, **command.env},
            self._env,
            self._wishes.rsh,
            self._cwd,
        )
        running = _Running(command, process)
        for name, stream in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert stream is not None
            thread = threading.Thread(
                target=self._read, args=(running, name, stream), daemon=True, name=f"read-{name}"
            )
            thread.start()
            running.threads.append(thread)
        return running

    def _read(self, running: _Running, name: str, stream: IO[str]) -> None:
        tagged = Tagged(self._pattern)
        follow(stream, lambda line: self._take(running, name, tagged.feed(line)))
        self._take(running, name, tagged.rest())

    def _take(self, running: _Running, name: str, lines: list[tuple[int | None, str]]) -> None:
        out = sys.stdout if name == "stdout" else sys.stderr
        for rank, text in lines:
            with self._lock:
                if rank is None or rank >= len(self._plan.rank_hosts):
                    running.launcher_lines.append(text)
                    if not self._verbose:
                        continue
                    tag = f"[{self._plan.launcher.partition(' ')[0]}@{running.command.host}] "
                else:
                    self._last.setdefault(rank, collections.deque(maxlen=_KEPT_LINES)).append(text)
                    self._files.write(rank, name, text)
                    host = self._plan.host_of(rank)
                    tag = f"[{rank}@{host}] " if host else f"[{rank}] "
                time_of_day = stamp() if self._timestamps else ""
                emit(out, f"{time_of_day}{tag if self._tag else ''}{text}")

    # --- all hosts ---

    def _wait(self, running: list[_Running], stop: list[int]) -> _Running | None:
        """Until all ended well (None), one failed, or a signal came."""
        left = list(running)
        while left and not stop:
            for one in list(left):
                status = one.process.poll()
                if status is None:
                    continue
                left.remove(one)
                if status != 0:
                    return one
            time.sleep(0.05)
        return None

    def _end(self, running: list[_Running]) -> None:
        end_all([(one.process, one.threads) for one in running])

    def _error(self, failed: _Running, running: list[_Running]) -> JobError:
        said = "\n".join(failed.launcher_lines)
        failure = torchrun_failure(said) if self._torchrun else mpirun_failure(said)
        if self._watch:
            lines = [line for one in running for line in one.launcher_lines]
            first = [{"rank": failure.rank, "status": failure.status}] if failure else []
            with contextlib.suppress(Exception):  # what follows says the failure in any case
                files = {"launcher.log": "\n".join(lines) + "\n"}
                self._watch.failed(files, self._files.folder, first)
        status = failed.process.returncode
        if failure is None or failure.rank >= len(self._plan.rank_hosts):
            tail = "\n".join(f"    {line}" for line in list(failed.launcher_lines)[-_LAST_LINES:])
            return JobError(
                f"{self._plan.launcher} on {failed.command.host} ended with status {status} and "
                f"named no rank; it said:\n{tail or '    (nothing)'}",
                "run again with --verbose to see the launcher's own output",
                status if 0 < status < 256 else 1,
            )
        host = self._plan.host_of(failure.rank)
        how = (
            f"exit status {failure.status}"
            if failure.status >= 0
            else f"signal {-failure.status} ({_signal_name(-failure.status)})"
        )
        lines = list(self._last.get(failure.rank, ()))[-_LAST_LINES:]
        tail = "\n".join(f"    {line}" for line in lines) or "    (it printed nothing)"
        return JobError(
            f"rank {failure.rank}{f' on {host}' if host else ''} failed first: {how}; the others "
            f"were ended. Its last lines:\n{tail}",
            "",
            failure.status if 0 < failure.status < 256 else 128 - min(failure.status, 0),
        )


def start_guarded(
    argv: Sequence[str],
    scratch: str,
    host: str | None,
    env: Mapping[str, str],
    here: Mapping[str, str],
    rsh: Sequence[str],
    cwd: Path,
) -> subprocess.Popen[str]:
    """Start `argv` under a guard, on `host` by `rsh` or here (None), with pipes for all streams.

    env: variables to set; `here`, our own environment, is what they are added to on this host. On
    another host only what Python needs to start stands in the command line, which all users there
    can read; the rest goes over the guard's standard input.

    Raises JobError where the variables are larger than a pipe.
    """
    guarded = [sys.executable, "-m", "evener.tools.launch.guard"]
    sent = b""
    if host is not None:
        # FORWARDED decides which Python and which Evener are found.
        assigned = [f"{name}={value}" for name, value in env.items() if name in FORWARDED]
        rest = {name: value for name, value in env.items() if name not in FORWARDED}
        sent = json.dumps(rest).encode() + b"\n"
        argv = [*guarded, "--env", scratch, *argv]
        inner = f"cd {shlex.quote(str(cwd))} && exec {shlex.join(['env', *assigned, *argv])}"
        argv, full = [*rsh, host, inner], dict(here)
    else:
        argv = [*guarded, scratch, *argv]
        full = {**here, **env}
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        env=full,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        # Out of the terminal's foreground group: Ctrl-C comes here, and goes on from here.
        start_new_session=True,
    )
    if sent:
        _send(process, sent)
    return process


def _send(process: subprocess.Popen[str], data: bytes) -> None:
    """Put `data` into the pipe to a guard without waiting for a host that is slow to read."""
    assert process.stdin is not None
    pipe = process.stdin.fileno()
    size = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
    if len(data) > size:
        with contextlib.suppress(OSError):  # above the system's limit for a user: said below
            size = fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, len(data))
    if len(data) > size:
        tell_to_end(process)
        raise JobError(
            f"the variables for another host take {len(data)} bytes; a pipe here holds {size}",
            "pass on fewer or shorter variables (-x), or put them into a file",
            2,
        )
    with contextlib.suppress(BrokenPipeError):  # it ended at once; its status says why
        os.write(pipe, data)


def tell_to_end(process: subprocess.Popen[str]) -> None:
    """Close the pipe that keeps a guard going; it ends all that it started."""
    with contextlib.suppress(OSError):
        assert process.stdin is not None
        process.stdin.close()


def end_all(processes: Sequence[tuple[subprocess.Popen[str], list[threading.Thread]]]) -> None:
    """End guards with all that they started, and wait for them and for the readers of their output.

    A guard that does not answer within its own grace period and some more is killed.
    """
    for process, _ in processes:
        tell_to_end(process)
    end = time.monotonic() + _END_TIMEOUT
    for process, threads in processes:
        try:
            process.wait(max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for thread in threads:
            thread.join(2.0)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def scratch_name() -> str:
    """A folder name for this job under /tmp, the same on all hosts."""
    return f"/tmp/evener-launch-{secrets.token_hex(4)}"
