"""Worlds of two ranks side by side: who trains what, on which network, until when.

A *world* is two ranks, each the only one of its node, that make one training after another. Worlds
of the `near` kind share a list of trainings: each takes the next when it has time. Beside them
stands one world for every form of the planner, in a simulated network of its own, because the
planner chooses by what it finds there. All talk to this process by lines of JSON on stdout.

How many near worlds a machine bears is found out as it goes: one is let in after another, as long
as they make more steps a second together than before (`Gate`).
"""

from __future__ import annotations

import json
import queue
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evener.errors import EvenerError
from evener.tools.bench.train import lab
from evener.tools.bench.train.clusters import Cluster, Loopback

MARK = "@gpt "
_TAIL_LINES = 25
# A further world must make all of them together so much faster, or it was one too many.
_GAIN = 1.1
_PROGRESS_S = 10.0


@dataclass(frozen=True)
class Job:
    """One training. `mode`: a form, `auto` or `auto:FLOOR`, or `again`: exact a second time."""

    mode: str
    seed: int


@dataclass
class World:
    """One world as this process sees it; `steps`: made since it began."""

    name: str
    cluster: Cluster
    jobs: list[Job]
    folder: str = ""
    why: str = ""
    steps: int = 0
    doing: str = "starting"
    ended: str = ""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))


def take(jobs: list[Job], folder: str) -> int:
    """Index of the next job that no world has taken, -1 where none is left or the gate is shut."""
    while not (Path(folder) / "open").exists():
        if (Path(folder) / "shut").exists():
            return -1
        time.sleep(0.05)
    shared = Path(folder).parent
    for index in range(len(jobs)):
        try:
            (shared / f"taken{index}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return index
    return -1


class Gate:
    """Lets near worlds in one by one, while that makes all worlds together faster."""

    def __init__(self, worlds: list[World], window: float) -> None:
        self.worlds, self.window = worlds, window
        self.inside = 0
        self.rates: list[float] = []  # steps a second with 1, 2, ... near worlds
        self.settled = False
        self._since: float | None = None
        self._steps = 0
        self._let_in()

    def look(self, now: float, steps: int) -> None:
        """Called now and then with the steps that all worlds have made."""
        if self.settled:
            return
        newest = self.worlds[self.inside - 1]
        if newest.ended:  # no training is left, or it failed and another may do its part
            if newest.ended == "done" or self.inside == len(self.worlds):
                self._settle()
            else:
                self._let_in()
            return
        if not newest.steps:
            return  # its start is not its speed
        if self._since is None:
            self._since, self._steps = now, steps
        elif now - self._since >= self.window:
            self.rates.append((steps - self._steps) / (now - self._since))
            if len(self.rates) > 1 and self.rates[-1] < _GAIN * self.rates[-2]:
                if self.rates[-1] < self.rates[-2]:
                    (Path(newest.folder) / "open").unlink()  # after what it is doing
                    self.inside -= 1
                self._settle()
            elif self.inside == len(self.worlds):
                self._settle()
            else:
                self._let_in()

    def _let_in(self) -> None:
        (Path(self.worlds[self.inside].folder) / "open").touch()
        self.inside += 1
        self._since = None

    def _settle(self) -> None:
        self.settled = True
        for world in self.worlds:
            if not (Path(world.folder) / "open").exists():
                (Path(world.folder) / "shut").touch()


@dataclass
class Outcome:
    """What came of it all."""

    done: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    networks: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def run(
    near: list[Job],
    far: dict[str, list[Job]],
    *,
    script: Path,
    options: dict[str, Any],
    parallel: int,
    network: str,
    limit: float,
    window: float,
    on_done: Callable[[Outcome, dict[str, Any]], None],
) -> Outcome:
    """Make all trainings that fit into `limit` seconds.

    `near`: by as many as `parallel` worlds; `far`: one world each, in `network`. `script` is what a
    rank runs, with `--world JSON`. `on_done` is told of each training that is done.
    """
    began = time.monotonic()
    heard: queue.Queue[tuple[World, int, str]] = queue.Queue()
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as shared:
        worlds = []
        for index in range(min(parallel, len(near))):
            folder = Path(shared) / f"world{index}"
            folder.mkdir()
            worlds.append(World(f"near {index}", Loopback(2, 1), near, str(folder)))
        gate = Gate(list(worlds), window) if worlds else None
        for mode, jobs in far.items():
            cluster, why = lab.make(network)
            worlds.append(World(mode, cluster, jobs, why=why))
            outcome.networks[mode] = f"loopback, not {network}: {why}" if why else network
        threads = []
        for world in worlds:
            left = limit - (time.monotonic() - began)
            thread = threading.Thread(
                target=_drive, args=(world, script, options, left, heard), daemon=True
            )
            thread.start()
            threads.append(thread)
        told = time.monotonic()
        while any(not world.ended for world in worlds):
            try:
                world, rank, line = heard.get(timeout=0.25)
            except queue.Empty:
                pass
            else:
                _hear(world, rank, line, outcome, on_done)
            now = time.monotonic()
            if gate is not None:
                gate.look(now, sum(world.steps for world in worlds))
            if now - told > _PROGRESS_S:
                told = now
                doing = "; ".join(f"{w.name}: {w.doing}" for w in worlds if not w.ended)
                print(f"[{now - began:4.0f} s] {doing}", flush=True)
        for thread in threads:
            thread.join(timeout=5)
    for world in worlds:
        if world.ended != "done":
            outcome.notes.append(f"{world.name}: {world.ended}")
            print("\n".join([f"{world.name}: {world.ended}", *world.tail]), file=sys.stderr)
    if gate is not None:
        outcome.rates = gate.rates
    outcome.seconds = time.monotonic() - began
    return outcome


def _drive(
    world: World,
    script: Path,
    options: dict[str, Any],
    seconds: float,
    heard: queue.Queue[tuple[World, int, str]],
) -> None:
    """A world's thread: start its ranks, hand on their lines, say how it ended."""
    task = {**options, "jobs": [asdict(job) for job in world.jobs], "folder": world.folder}
    argv = [sys.executable, str(script), "--world", json.dumps(task)]
    try:
        status = world.cluster.run(
            argv, lambda rank, _, line: heard.put((world, rank, line)), seconds
        )
        how = "done" if not status else f"ended with status {status}"
        if status == 124:
            how = "stopped at the limit"
    except EvenerError as error:
        how = "stopped at the limit" if "not done after" in error.problem else error.problem
    heard.put((world, -1, how))


def _hear(
    world: World,
    rank: int,
    line: str,
    outcome: Outcome,
    on_done: Callable[[Outcome, dict[str, Any]], None],
) -> None:
    if rank < 0:
        world.ended = line
        return
    if not line.startswith(MARK):
        world.tail.append(f"[{world.name}, rank {rank}] {line}")
        return
    message = json.loads(line.removeprefix(MARK))
    job = f"{message['mode']} seed {message['seed']}"
    world.steps += message["steps"]
    world.doing = f"{job} step {message['step']}"
    if "done" in message:
        world.doing = f"{job} done"
        outcome.done.append({**message["done"], "mode": message["mode"], "world": world.name})
        on_done(outcome, outcome.done[-1])
