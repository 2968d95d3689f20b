"""One look at running processes, watched or not, for `evener why`."""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.errors import UsageError
from evener.tools.why import process, ras
from evener.tools.why.folders import jobs as watched
from evener.tools.why.folders import name_of, stale
from evener.tools.why.host import Host
from evener.tools.why.watch import progress

if TYPE_CHECKING:
    from evener.tools.why.bundle import Verdict

_FAR_SECONDS = 30.0


@dataclass
class Job:
    """What was gathered of one job."""

    files: dict[str, str] = field(default_factory=dict)
    """Contents of a bundle's files, by name."""
    moving: bool = False
    """Whether a rank moved in the meantime."""


def gather(
    what: Sequence[str], pids: Sequence[int], seconds: float, rsh: Sequence[str]
) -> dict[str, Job]:
    """Name of each job, and what was seen of it on all hosts; empty for processes without rings.

    Raises UsageError where there is nothing to look at.
    """
    folders, single, far = _sorted(what, pids)
    hosts = [Host(folder) for folder in folders]
    first = [progress(host.look()) for host in hosts]
    found: dict[str, Job] = defaultdict(Job)
    with ThreadPoolExecutor(len(far) + len(hosts) + 1) as pool:
        others = [pool.submit(_far, name, seconds, rsh) for name in far]
        moved = [False] * len(hosts)
        end = time.monotonic() + seconds
        while not all(moved) and time.monotonic() < end:
            time.sleep(0.2)
            now = [progress(host.look()) for host in hosts]
            moved = [m or a != b for m, a, b in zip(moved, first, now, strict=True)]
        seen = [pool.submit(host.gather) for host in hosts]
        for host, moves, files in zip(hosts, moved, seen, strict=True):
            _add(found[name_of(host.folder)], files.result(), moves)
        _add(found[""], _unwatched(single), False)
        for future in others:
            for name, (theirs, moves) in future.result().items():
                _add(found[name], theirs, moves)
    found = {
        name: job for name, job in found.items()
        if any(file.endswith(".seen.json") for file in job.files)
    }  # fmt: skip
    if not found:
        raise UsageError(
            "no rank was found: no job of `evener launch` runs here",
            "give a process of the job (evener why --pid PID), or a host that runs it",
        )
    return found


def _add(job: Job, files: dict[str, str], moving: bool) -> None:
    job.files |= files
    job.moving = job.moving or moving


def table(files: dict[str, str]) -> list[dict[str, Any]]:
    """A row for each rank that was seen."""
    from evener.tools.analyze import own_frame

    rows = []
    for name, text in sorted(files.items()):
        if name.endswith(".seen.json"):
            one = json.loads(text)
            main: list[str] = next((t["frames"] for t in one["threads"] if t["main"]), [])
            rows.append(
                {
                    "rank": one["rank"], "world": one["world"], "host": one["host"],
                    "pid": one["pid"], "state": one["process"]["state"], "step": one["step"],
                    "place": one["place"], "line": own_frame(tuple(main)),
                }
            )  # fmt: skip
    return sorted(rows, key=lambda row: (row["rank"], row["pid"]))


def world(ranks: list[dict[str, Any]]) -> int:
    """How many ranks the job has, as far as any of them knows; 0 where none does."""
    return max((row["world"] for row in ranks), default=0)


def judged(files: dict[str, str]) -> Verdict:
    """The verdict of files that are not kept."""
    from evener.tools.why.bundle import Verdict

    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text)
        return Verdict(Path(folder))


# --- pieces ---


def _sorted(what: Sequence[str], pids: Sequence[int]) -> tuple[list[Path], list[int], list[str]]:
    """Folders of jobs here, processes without a ring, names of other hosts."""
    jobs = watched()
    folders: dict[Path, None] = {}
    single: list[int] = []
    far: list[str] = []
    if not what and not pids:
        folders = dict.fromkeys(folder for folder in jobs.values() if not stale(folder))
    numbers = list(pids)
    for one in what:
        if one in jobs:
            folders[jobs[one]] = None
        elif one.isdecimal():
            numbers.append(int(one))
        elif Path(one).is_dir():
            folders[Path(one)] = None
        else:
            far.append(one)
    for pid in numbers:
        if process.look(pid).state == "X":
            raise UsageError(f"there is no process {pid}", "see `ps` for the job's processes")
        family = process.family(pid)
        found = [
            folder for folder in jobs.values()
            if family & {row["pid"] for row in Host(folder).look()}
        ]  # fmt: skip
        for folder in found:
            folders[folder] = None
        if not found:
            ranks = [p for p in sorted(family) if "RANK" in process.variables(p)]
            single += ranks or [pid]
    return list(folders), single, far


def _unwatched(pids: Sequence[int]) -> dict[str, str]:
    """What can be known of processes that keep no ring."""
    if not pids:
        return {}
    files: dict[str, str] = {}
    name = socket.gethostname()
    with ThreadPoolExecutor(len(pids) + 1) as pool:
        heard = pool.submit(_heard, pids)
        stacks = [pool.submit(process.py_spy, pid) for pid in pids]
        for pid, future in zip(pids, stacks, strict=True):
            env, threads = process.variables(pid), future.result()
            rank, size = env.get("RANK", ""), env.get("WORLD_SIZE", "")
            document = {
                "evener_seen": 1,
                "rank": int(rank) if rank.isdecimal() else -1,
                "world": int(size) if size.isdecimal() else 0,
                "host": name, "pid": pid, "step": -1, "place": "", "threads": threads,
                "stacks_from": "py-spy" if threads else "",
                "process": process.look(pid).document(), "sockets": process.sockets(pid),
            }  # fmt: skip
            files[f"pid.{pid}.seen.json"] = json.dumps(document)
        if report := heard.result():
            files[f"{name}.ras.txt"] = report
    return files


def _heard(pids: Sequence[int]) -> str:
    """RAS twice: equal counts that stand are a hang."""
    address = next((a for p in pids if (a := process.variables(p).get("NCCL_RAS_ADDR"))), None)
    first = ras.ask(ras.address(address))
    if not first:
        return ""
    time.sleep(2.0)
    return first + "\n" + ras.ask(ras.address(address))


def _far(name: str, seconds: float, rsh: Sequence[str]) -> dict[str, tuple[dict[str, str], bool]]:
    """The same on another host, by this Python there."""
    module = [sys.executable, "-m", "evener.tools.why.look", str(seconds)]
    done: subprocess.CompletedProcess[str] | None = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [*rsh, name, shlex.join(module)], capture_output=True, text=True, check=False,
            timeout=_FAR_SECONDS,
        )  # fmt: skip
    if done is None or done.returncode != 0:
        said = done.stderr.strip().rpartition("\n")[2] if done else f"no answer in {_FAR_SECONDS} s"
        raise UsageError(
            f"{name}: neither a job or process here, nor a host that answers ({said})",
            "give a job, a process, or a host that this Python is on too",
        )
    document = json.loads(done.stdout)
    return {job: (files, moving) for job, (files, moving) in document.items()}


if __name__ == "__main__":
    here: dict[str, Job] = {}
    with contextlib.suppress(UsageError):
        here = gather((), (), float(sys.argv[1]), ())
    sys.stdout.write(json.dumps({name: (job.files, job.moving) for name, job in here.items()}))
