"""All hosts of a job, watched by one thread beside the launcher.

Ranks of this host are read here. On another host a process of `host.py` reads them; it was started
by the launcher's own way to that host and says once a second how far its ranks are.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evener.tools.why.folders import sweep
from evener.tools.why.host import Host
from evener.tools.why.stall import Stall

_PERIOD = 0.5
_GATHER = 9.0


def about(
    what: str,
    ranks: int,
    moving: bool,
    exits: Sequence[Mapping[str, Any]] = (),
    oom: Sequence[int] = (),
) -> dict[str, str]:
    """The file of a bundle that says what it is of. exits: rank and status of who ended first;
    oom: ranks whose memory cgroup counted a kill."""
    document = {
        "evener_watch": 1, "what": what, "ranks": ranks, "moving": moving, "time": time.time(),
        "exits": list(exits), "oom": list(oom),
    }  # fmt: skip
    return {"watch.json": json.dumps(document)}


def progress(ranks: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Whatever changes where any rank gets on."""
    what = ("rank", "step", "marks", "issued", "batches")
    return tuple(tuple(rank[name] for name in what) for rank in ranks)


class _Far:
    """The ranks of another host."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        self.ranks: list[dict[str, Any]] = []
        self._files: queue.Queue[dict[str, str]] = queue.Queue()
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True, env=dict(env), start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                document = json.loads(line)
                self.ranks = document.get("ranks", self.ranks)
                if "files" in document:
                    self._files.put(document["files"])

    def gather(self, stacks: bool) -> dict[str, str]:
        with contextlib.suppress(OSError, ValueError, queue.Empty):
            assert self._process.stdin is not None
            self._process.stdin.write("gather\n" if stacks else "times\n")
            self._process.stdin.flush()
            return self._files.get(timeout=_GATHER)
        return {}

    def close(self) -> None:
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(3.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Watch:
    """Watches from `start` to `close`, and says a verdict once a stall."""

    def __init__(
        self,
        folder: str,
        ranks: int,
        floor: float,
        say: Callable[[str], None],
        keep_in: Path,
        outputs: Callable[[], dict[str, str]] = dict,
    ) -> None:
        """outputs: what the ranks printed last, as files for the bundle."""
        self._folder, self._ranks, self._say = Path(folder), ranks, say
        self._keep_in, self._outputs = keep_in, outputs
        self._host, self._far = Host(self._folder), list[_Far]()
        self._stall = Stall(floor)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="evener-watch")
        self._floor = floor
        self._slow_next, self._slow_wait = 0.0, max(10.0, 3 * floor)
        self._told: set[str] = set()

    def start(
        self, hosts: Sequence[str], rsh: Sequence[str], cwd: Path, env: Mapping[str, str]
    ) -> None:
        """hosts: the other ones, reached by `rsh`; env: what Python needs to start there."""
        sweep()
        for host in hosts:
            module = [sys.executable, "-m", "evener.tools.why.host", str(self._folder)]
            words = [f"{name}={value}" for name, value in env.items()]
            inner = f"cd {shlex.quote(str(cwd))} && exec {shlex.join(['env', *words, *module])}"
            self._far.append(_Far([*rsh, host, inner], os.environ))
        self._thread.start()

    def look(self) -> list[dict[str, Any]]:
        """How far each rank is."""
        return [*self._host.look(), *(rank for far in self._far for rank in far.ranks)]

    def _run(self) -> None:
        while not self._ended.wait(_PERIOD):
            try:
                self._turn(time.monotonic())
            except Exception as error:  # noqa: BLE001 - the job must not end by its watch
                self._say(f"the watch ended: {type(error).__name__}: {error}")
                return

    def _turn(self, now: float) -> None:
        ranks = self.look()
        if not ranks:
            return
        at = progress(ranks)
        step = max(r["step"] for r in ranks)
        if self._stall.see(now, at, step):
            usual = f" (a usual step takes {self._stall.usual:.3g} s)" if self._stall.usual else ""
            still = self._stall.still(now)
            self.judge(f"no rank has made progress for {still:.0f} s{usual}", self.gather())
        elif step and now > self._slow_next > 0:
            self._slow(now, at)
        elif step and not self._slow_next:
            self._slow_next = now + self._slow_wait

    def _slow(self, now: float, before: tuple[Any, ...]) -> None:
        """Look for a rank for which the others wait all the time: rarely, and ever more rarely."""
        from evener.tools.why.bundle import moving

        files = self.gather(stacks=False)
        self._slow_wait = min(self._slow_wait * 1.5, 600.0)
        self._slow_next = now + self._slow_wait
        # Gathering takes seconds on a busy host; a job that moved meanwhile does not stand still.
        moved = progress(self.look()) != before
        if not moved and self._stall.still(time.monotonic()) > self._floor / 2:
            return  # it stands still, by and by; a slow rank moves
        found = moving(files)
        if found - self._told:
            self._told |= found
            what = "the job is slow" if "cause.slow-rank" in found else "the job runs"
            self.judge(what, files, moving=True)

    def gather(self, stacks: bool = True) -> dict[str, str]:
        """All files of all hosts; `stacks`: also those of past operations."""
        found = self._host.gather(stacks)
        threads, parts = [], list[dict[str, str]]()
        for far in self._far:
            threads.append(threading.Thread(target=lambda f=far: parts.append(f.gather(stacks))))
            threads[-1].start()
        for thread in threads:
            thread.join(_GATHER + 1)
        for part in parts:
            found |= part
        return found

    def judge(self, what: str, files: dict[str, str], moving: bool = False) -> None:
        """Keep a bundle and say its verdict."""
        from evener.tools.why.bundle import Verdict, keep  # only when it is needed

        files = {**files, **self._outputs(), **about(what, self._ranks, moving)}
        try:
            path = keep(self._keep_in, files)
        except OSError:
            path = keep(Path(tempfile.gettempdir()), files)
        if not self._ended.is_set():
            self._say(
                f"{what}.\n{Verdict(path).text()}\n  kept  {path}: evener analyze {path.name}"
            )

    def failed(
        self, files: dict[str, str], keep_in: Path | None, exits: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Say why the job failed, from what was printed; `keep_in` keeps the bundle."""
        from evener.tools.why.bundle import Verdict, keep

        what = "the job failed"
        killed = {one["rank"]: one.get("oom", -1) for one in self.look()}
        exits = [{"oom": killed.get(one["rank"], -1), **one} for one in exits]
        oom = [rank for rank, kills in killed.items() if kills > 0]
        files = {
            **files, **self._host.last(), **self._outputs(),
            **about(what, self._ranks, False, exits, oom),
        }  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            path = keep(keep_in or Path(folder), files)
            verdict = Verdict(path)
            if verdict.first is None:
                return
            kept = f"\n  kept  {path}: evener analyze {path.name}" if keep_in else ""
            self._say(f"{what}.\n{verdict.text()}{kept}")

    def end(self) -> None:
        """The job is ended: nothing more is said of how it stands."""
        self._ended.set()

    def close(self) -> None:
        """Stop watching, and remove what the job left in shared memory."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_GATHER + 5)
        for far in self._far:
            far.close()
        shutil.rmtree(self._folder, ignore_errors=True)
