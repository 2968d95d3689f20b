"""Carry out a plan on a cluster: start the agents, take what they say, show it, keep it."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from evener.errors import EvenerError
from evener.tools.bench.train import agent, clusters, results
from evener.tools.bench.train.clusters import Cluster
from evener.tools.bench.train.plan import Plan
from evener.tools.bench.train.progress import Progress
from evener.tools.bench.train.results import Results

_TAIL_LINES = 40


class _Listener:
    """Sorts the lines of the agents: rank 0's reports, and the rest for the case of an error."""

    def __init__(
        self, plan: Plan, taken: Results, progress: Progress, keep: Callable[[], None]
    ) -> None:
        self.plan, self.taken, self.progress, self.keep = plan, taken, progress, keep
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self.outcomes: list[dict[str, Any]] = []
        self.fatal: dict[str, str] | None = None
        self.lock = threading.Lock()

    def __call__(self, rank: int, stream: str, line: str) -> None:
        del stream
        with self.lock:
            if not line.startswith(agent.MARK):
                self.tail.append(f"[rank {rank}] {line}")
                return
            message: dict[str, Any] = json.loads(line[len(agent.MARK) :])
            if "fatal" in message:
                self.fatal = message
            elif "outcome" in message:
                self.outcomes.append(message["outcome"])
            elif "seconds" in message:
                run = self.plan.runs[message["run"]]
                outcomes, self.outcomes = self.outcomes, []
                taken = results.add(self.taken, self.plan, run, outcomes, message["seconds"])
                self.keep()
                self.progress.done(run, taken)
            else:
                self.progress.phase(self.plan.runs[message["run"]], message)


def measure(
    plan: Plan,
    cluster: Cluster,
    taken: Results,
    progress: Progress,
    keep: Callable[[], None] = lambda: None,
) -> None:
    """Make every run of `plan`; `taken` grows with each, so that it holds what there is at any end.

    `keep` is called after each, for whoever wants it on disk before a kill.
    Raises EvenerError where the agents themselves end early; a run that fails is in `taken`.
    """
    listener = _Listener(plan, taken, progress, keep)
    began = time.monotonic()
    longest = 300 + len(plan.runs) * (plan.options.timeout + 60)
    try:
        with progress:
            argv = clusters.agent_argv(agent.plan_to_json(plan))
            status = cluster.run(argv, listener, longest)
    finally:
        taken.duration_s = time.monotonic() - began
    if listener.fatal:
        raise EvenerError(listener.fatal["fatal"], listener.fatal.get("fix", ""))
    if status:
        tail = "\n".join(listener.tail)
        raise EvenerError(
            f"the benchmark's processes ended with status {status}; they printed:\n{tail}",
            "run the same with --lab left out to see whether the cluster is the reason",
        )
