"""Processes of a benchmark: the script again, ranks on this machine, ranks in simulated nodes.

A process tells what it found by `say`, a line of JSON on its output; whoever started it has the
lines in `Job.said`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evener.base.ports import free_port
from evener.tools.lab import Lab, Spec

from .causes import cause

MARK = "RESULT "


def say(**found: Any) -> None:
    """Tell the process that started this one."""
    print(MARK + json.dumps(found, default=str), flush=True)


@dataclass
class Job:
    """What became of processes.

    `errors`: lines that name an error or a warning of NCCL's. `cause`: the first error, where that
    is known. `peak`: bytes of host memory, at the most, of a process that was ended at its limit.
    """

    said: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    cause: str = ""
    status: int = 0
    seconds: float = 0.0
    peak: int = 0

    @property
    def failed(self) -> str:
        """Why there is no result, empty where there is one."""
        if self.said and not self.status:
            return ""
        why = [self.cause] if self.cause else self.errors[-2:]
        return "; ".join([f"status {self.status}", *why])[:500]

    @property
    def row(self) -> dict[str, Any]:
        """What was said last, or why nothing was, as `failed`."""
        return self.said[-1] if self.said else {"failed": self.failed}

    def hear(self, rank: int, stream: str, line: str) -> dict[str, Any] | None:
        """Take a line of a rank; return the result, where it is one."""
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(MARK))
            self.said.append(found)
            return found
        if (stream == "stderr" and "Error" in line) or "NCCL WARN" in line:
            self.errors.append(f"rank {rank}: {line.strip()[:300]}")
        return None


def arguments_of(given: argparse.Namespace, *names: str) -> list[str]:
    """`--name value` of these arguments, for another process of the same script."""
    words = []
    for name in names:
        value = getattr(given, name)
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif value not in (None, False, ""):
            words += [option, str(value)]
    return words


def again(
    *words: str,
    limit: float | None = None,
    env: Mapping[str, str] | None = None,
    launcher: Sequence[str] = (sys.executable,),
) -> Job:
    """This script with other `words`, in a process of its own; all that it started ends with it.

    Past `limit` seconds it is ended: status -9. `launcher` starts it, as torchrun does.
    """
    argv = [*launcher, str(Path(sys.argv[0]).resolve()), *words]
    job, late, began = Job(), "", time.perf_counter()
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
            env={**os.environ, **(env or {})},
        ) as process,
    ):  # fmt: skip
        try:
            text, _ = process.communicate(timeout=limit)
            job.status = process.returncode
        except subprocess.TimeoutExpired:
            text, job.status = "", -9
            job.errors.append(late := f"ran past {limit:.0f} s")
            status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
            job.peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for line in text.splitlines():
            job.hear(0, "stdout", line)
        errors.seek(0)
        told = errors.read()
        if job.status:
            job.cause = "; ".join(filter(None, [late, cause(told)]))
        last = [line.strip()[:300] for line in told.splitlines()[-20:]]
        job.errors = [*last, *job.errors]
    job.seconds = time.perf_counter() - began
    return job


def ranks(
    *words: str,
    count: int = 2,
    limit: float = 600,
    env: Mapping[str, str] | None = None,
    heard: Callable[[dict[str, Any]], None] | None = None,
) -> Job:
    """This script as `count` ranks over loopback, with torch's variables; `count` pretended nodes.

    `heard` is told every result, from the threads that read them. After `limit` seconds all are
    ended: status 9.
    """
    port = free_port()
    processes = []
    for rank in range(count):
        told = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "NCCL_HOSTID": f"node{rank}", "GLOO_SOCKET_IFNAME": "lo", **(env or {}),
        }  # fmt: skip
        argv = [sys.executable, str(Path(sys.argv[0]).resolve()), *words]
        processes.append(subprocess.Popen(argv, env=told, stdout=subprocess.PIPE, text=True))
    job = Job()

    def read(rank: int) -> None:
        for line in processes[rank].stdout or ():
            if (found := job.hear(rank, "stdout", line)) is not None:
                if heard:
                    heard(found)
            elif rank == 0:
                print(line, end="", flush=True)

    try:
        end = time.monotonic() + limit
        with ThreadPoolExecutor(count) as readers:
            readers.map(read, range(count))
            while any(process.poll() is None for process in processes):
                time.sleep(0.05)
                if time.monotonic() > end:
                    for process in processes:
                        process.kill()
        job.status = max(abs(process.wait()) for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return job


def in_lab(
    spec: str,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    limit: float,
    faults: Iterable[tuple[str, str]] = (),
    prepare: Callable[[Lab], None] | None = None,
    hear: Callable[[Lab, int, str], None] | None = None,
    heard: Callable[[dict[str, Any]], None] | None = None,
) -> Job:
    """A job in simulated nodes (`evener lab`).

    `faults` (target, action) are there from the start, and `prepare` is called before it.
    `hear` is told every line that is no result, and `heard` every result, from the thread that
    reads them.
    """
    job = Job()
    with Lab(Spec.parse(spec)) as lab:
        for fault in faults:
            lab.fault(*fault)
        if prepare:
            prepare(lab)

        def on_line(rank: int, _node: str, stream: str, line: str) -> None:
            if (found := job.hear(rank, stream, line)) is not None:
                if heard:
                    heard(found)
            elif hear:
                hear(lab, rank, line)

        result = lab.launch(list(argv), env=dict(env or {}), timeout=limit, on_line=on_line)
    job.status = result.status
    if result.timed_out:
        job.errors.append(f"no end within {limit:g} s")
    return job
