"""A pipeline step in virtual time: when each rank does what, what waits, how much memory it takes.

Ranks do their actions in the order of the schedule, each as soon as its input is there. Tensors
cross links that carry one transfer at a time, in the order in which they are offered; links between
two nodes are shared by all pairs of ranks on them. A rank computes while its tensors travel. Events
are handled in the order of their times, so nothing is approximated but the times that are given.

    bubble    1 - compute / (ranks x step): the share of the ranks' time in which they wait
    memory    weights and states, and the activations that are held at a time
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from evener.base.given import given
from evener.pipeline import schedules
from evener.pipeline.schedules import Action


@dataclass(frozen=True)
class Link:
    """`bandwidth` in bytes per second, `latency` in seconds."""

    bandwidth: float
    latency: float

    def seconds(self, size: float) -> float:
        """Time that `size` bytes take on the link, without the latency."""
        return size / self.bandwidth if size else 0.0


@dataclass(frozen=True)
class Network:
    """Two levels: ranks of one node, and nodes. `per_node` ranks share a node; 0: all do."""

    inside: Link = Link(20e9, 10e-6)
    between: Link = Link(3e9, 50e-6)
    per_node: int = 0

    def way(self, source: int, target: int) -> tuple[tuple[str, int, int], Link]:
        """The link from a rank to another: its name and its figures."""
        if self.per_node:
            a, b = source // self.per_node, target // self.per_node
            if a != b:
                return ("between", a, b), self.between
        return ("inside", source, target), self.inside


@dataclass(frozen=True)
class StageCost:
    """A stage, for one microbatch: seconds on its own device, and bytes.

    `sent`: to the next stage in forward; as many come back in backward (`returned`). `held`: kept
    from forward to backward. `fixed`: weights, gradients, states. `recomputed`: forward runs again
    before backward.
    """

    forward: float
    input: float
    weight: float
    sent: float = 0.0
    returned: float = 0.0
    held: float = 0.0
    fixed: float = 0.0
    peak: float = 0.0


@dataclass(frozen=True)
class Mark:
    """One action of a rank, or a transfer (`kind` "send"), with its begin and end in seconds."""

    kind: str
    rank: int
    stage: int
    microbatch: int
    begin: float
    end: float


@dataclass
class Simulated:
    """What a step takes. `step` in seconds; `busy`, `memory` (bytes) per rank; `marks` in time."""

    step: float
    busy: list[float]
    memory: list[float]
    marks: list[Mark] = field(default_factory=list)

    @property
    def bubble(self) -> float:
        return 1 - sum(self.busy) / (len(self.busy) * self.step) if self.step else 0.0


@given
def simulate(
    schedule: str,
    stages: Sequence[StageCost],
    ranks: int,
    microbatches: int,
    network: Network | None = None,
) -> Simulated:
    """Run one step of `schedule` over `stages`; `len(stages)` is a multiple of `ranks`."""
    kind = schedules.kind_of(schedule)
    local = len(stages) // ranks
    return _Run(
        [list(a) for a in schedules.order(kind.name, ranks, local, microbatches)],
        list(stages),
        [schedules.rank_of(kind, s, ranks) for s in range(len(stages))],
        network or Network(),
    ).run()


class _Run:
    def __init__(
        self,
        actions: list[list[Action]],
        stages: list[StageCost],
        rank_of: list[int],
        network: Network,
    ) -> None:
        self.actions, self.stages, self.rank_of, self.network = actions, stages, rank_of, network
        self.ranks = len(actions)
        self.next = [0] * self.ranks
        self.working = [False] * self.ranks
        self.there: set[tuple[str, int, int]] = set()
        self.link_free: dict[tuple[str, int, int], float] = {}
        self.heap: list[tuple[float, int, str, tuple[int, ...]]] = []
        self.count = 0
        self.marks: list[Mark] = []
        self.busy = [0.0] * self.ranks
        self.held = [0.0] * self.ranks
        for stage, cost in enumerate(stages):
            self.held[rank_of[stage]] += cost.fixed
        self.memory = list(self.held)

    def run(self) -> Simulated:
        for rank in range(self.ranks):
            self._start(rank, 0.0)
        end = 0.0
        while self.heap:
            now, _, what, data = heapq.heappop(self.heap)
            end = max(end, now)
            if what == "done":
                self._finish(data[0], now)
            else:
                self.there.add((what, data[0], data[1]))
                self._start(self.rank_of[data[0]], now)
        left = [r for r in range(self.ranks) if self.next[r] < len(self.actions[r])]
        if left:
            raise AssertionError(f"the schedule never ends: ranks {left} wait")
        return Simulated(end, self.busy, self.memory, self.marks)

    def _push(self, when: float, what: str, data: tuple[int, ...]) -> None:
        self.count += 1
        heapq.heappush(self.heap, (when, self.count, what, data))

    def _ready(self, action: Action) -> bool:
        """Whether what an action needs of other stages has come."""
        kind, stage, microbatch = action
        if kind == "F":
            return stage == 0 or ("activation", stage, microbatch) in self.there
        if kind in "BI":
            last = stage == len(self.stages) - 1
            return last or ("gradient", stage, microbatch) in self.there
        return True

    def _seconds(self, action: Action) -> float:
        cost = self.stages[action.stage]
        whole = cost.input + cost.weight
        return {"F": cost.forward, "B": whole, "I": cost.input, "W": cost.weight}[action.kind]

    def _start(self, rank: int, now: float) -> None:
        if self.working[rank] or self.next[rank] == len(self.actions[rank]):
            return
        action = self.actions[rank][self.next[rank]]
        if not self._ready(action):
            return
        took = self._seconds(action)
        self.working[rank] = True
        cost = self.stages[action.stage]
        if action.kind == "F":
            self.held[rank] += cost.held
        extra = cost.peak if action.kind in "BI" else 0.0
        self.memory[rank] = max(self.memory[rank], self.held[rank] + extra)
        self.busy[rank] += took
        self.marks.append(Mark(action.kind, rank, action.stage, action.microbatch, now, now + took))
        self._push(now + took, "done", (rank,))

    def _finish(self, rank: int, now: float) -> None:
        action = self.actions[rank][self.next[rank]]
        self.next[rank] += 1
        self.working[rank] = False
        kind, stage, microbatch = action
        if kind == "F" and stage + 1 < len(self.stages):
            self._send("activation", stage, stage + 1, microbatch, self.stages[stage].sent, now)
        if kind in "BI" and stage > 0:
            self._send("gradient", stage, stage - 1, microbatch,
                       self.stages[stage - 1].returned, now)  # fmt: skip
        if kind in "BW":
            self.held[rank] -= self.stages[stage].held
        self._start(rank, now)

    def _send(
        self, what: str, stage: int, to: int, microbatch: int, size: float, now: float
    ) -> None:
        source, target = self.rank_of[stage], self.rank_of[to]
        if source == target:
            self._push(now, what, (to, microbatch))
            return
        name, link = self.network.way(source, target)
        begin = max(now, self.link_free.get(name, 0.0))
        off = begin + link.seconds(size)
        self.link_free[name] = off
        self.marks.append(Mark("send", source, stage, microbatch, begin, off + link.latency))
        self._push(off + link.latency, what, (to, microbatch))
