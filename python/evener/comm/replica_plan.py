"""The form that each unit of a sharded model is sent in between nodes, chosen by measuring.

    warming    two steps that are not looked at: allocation, compilation
    timing     the step as it is, exact: how long it takes, when each unit's shard is there, how
               long computing takes without the network
    trying     the choice is in force, and its step is timed
    settled    what was faster stays: the choice, or exact

Between timing and trying the network is probed (about a second), the ranks of the first replica
choose by `evener.comm.planner.choose`, and all replicas of a shard take over the same. Other
shards may choose otherwise: theirs is another exchange, on the same network.

FSDP2 ends a backward pass by waiting for all exchanges, so nothing hides behind the next forward.
On a CPU an exchange blocks, and hides behind nothing.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from evener.comm import wires
from evener.comm.planner import choose
from evener.comm.planner.probe import Probe, describe
from evener.comm.profile import BucketProfile, Clock, StepProfile
from evener.comm.replicas import Replicas

logger = logging.getLogger("evener.comm")

WARMING = 2
TIMED = 4
_FIRST_TRIED = 2  # steps of a choice that are not timed: scratch memory, a first residual
_GAIN = 0.01  # a choice that saves less of the step goes back to exact


class _Marks:
    """One step's marks."""

    def __init__(self) -> None:
        self.begin: Any = None
        self.forward_ended: Any = None
        self.ready: dict[int, Any] = {}
        self.exchange: dict[int, tuple[Any, Any]] = {}


class ReplicaPlanner:
    """Chooses for one `Replicas`. Its door calls `step_begins`, `forward_ended`, `around`."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.clock = Clock(replicas.communicators.device)
        self.forms = wires.candidates(replicas.options.floor)
        self.decision: choose.Decision | None = None
        self.exact_ms = self.tried_ms = 0.0
        self.settled = replicas.communicators.route.levels.nodes == 1 or len(self.forms) == 1
        self._steps = 0
        self._since: Any = None
        self._marks: _Marks | None = None

    # --- what happens in a step ---

    def step_begins(self, ended: bool) -> None:
        """A forward that will be differentiated begins; `ended`: a step has ended before it.

        Collective over the replica group when something is decided.
        """
        if self.settled or not ended:
            return
        self._steps += 1
        now = self.clock.mark()
        done = self._steps - WARMING
        if done == 0:
            self._since = now
        elif done == TIMED:
            self.exact_ms = self._ms(self._since, now) / TIMED
            self._decide(now)
        elif done == TIMED + _FIRST_TRIED:
            self._since = now
        elif done == 2 * TIMED + _FIRST_TRIED:
            self.tried_ms = self._ms(self._since, now) / TIMED
            self._judge()
        if not self.settled and 0 <= done < TIMED:
            self._marks = _Marks()
            self._marks.begin = now

    def forward_ended(self) -> None:
        """On the stream that computes."""
        if self._marks is not None:
            self._marks.forward_ended = self.clock.mark()

    def ready(self, unit: int, stream: Any) -> None:
        """The unit's shard is there: on `stream`, that of the reduce-scatter (None on a CPU)."""
        if self._marks is not None:
            if stream is None:
                self._marks.ready[unit] = self.clock.mark()
            else:
                with torch.cuda.stream(stream):
                    self._marks.ready[unit] = self.clock.mark()

    def exchanged(self, unit: int, start: Any) -> None:
        """Its exchange, which began at the mark `start`, has ended."""
        if self._marks is not None:
            self._marks.exchange[unit] = (start, self.clock.mark())

    def mark(self) -> Any:
        """Now, on the current stream, while a step is profiled."""
        return None if self._marks is None else self.clock.mark()

    # --- decisions ---

    def _ms(self, start: Any, end: Any) -> float:
        if self.clock.gpu:
            end.synchronize()
        return self.clock.ms(start, end)

    def _profile(self, end: Any) -> StepProfile | None:
        """The last timed step without its communication. None where a mark is missing."""
        marks, self._marks = self._marks, None
        if marks is None or marks.forward_ended is None or not marks.exchange:
            return None
        if self.clock.gpu:
            torch.cuda.synchronize(self.replicas.communicators.device)
        ms, began = self.clock.ms, marks.forward_ended
        took = {unit: ms(*span) for unit, span in marks.exchange.items()}
        ready = {unit: ms(began, mark) for unit, mark in marks.ready.items()}
        if self.clock.gpu:
            backward = max(ready.values())
            landed = max(ms(began, span[1]) for span in marks.exchange.values())
            rest = ms(began, end) - max(backward, landed)
        else:
            # It blocks: computing is what is left, and each exchange comes when all is computed.
            landed = max(ms(began, span[1]) for span in marks.exchange.values())
            backward = max(0.0, landed - sum(took.values()))
            rest = ms(began, end) - landed
            ready = dict.fromkeys(ready, backward)
        buckets = tuple(
            BucketProfile(
                unit.name,
                unit.numel,
                unit.bucket.buffer.element_size(),
                ready.get(unit.index, backward),
                0.0,
                (0.0, took.get(unit.index, 0.0), 0.0),
            )
            for unit in self.replicas.units
        )
        return StepProfile(ms(marks.begin, began), backward, max(0.0, rest), buckets)

    def _decide(self, now: Any) -> None:
        """Collective over the replica group."""
        communicators = self.replicas.communicators
        profile = self._profile(now)
        box: list[Any] = [profile is not None]
        dist.broadcast_object_list(box, group=communicators.control.handle, group_src=0)
        if not box[0]:
            self.settled = True
            if self.replicas.logs:
                logger.warning("plan: no step could be profiled; units stay exact")
            return
        sizes = [unit.bucket.bytes for unit in self.replicas.units]
        made = {form: self.replicas.wire(form) for form in self.forms}
        costs = Probe(communicators).costs(made, (min(sizes), max(sizes)), flat=False)
        box = [None]
        if communicators.rank == 0:
            assert profile is not None
            box[0] = choose.choose(
                profile, costs, self.forms, algorithm="2d", allowed=self.replicas.permitted
            )
        dist.broadcast_object_list(box, group=communicators.control.handle, group_src=0)
        decision: choose.Decision = box[0]
        self.decision = decision
        for unit, choice in enumerate(decision.choices):
            self.replicas.use(unit, choice.form)
            exchange = self.replicas.units[unit].exchange
            assert exchange is not None
            exchange.predicted_ms = choice.stages_ms[1]
        self._since = None
        if any(choice.form != "exact" for choice in decision.choices):
            # What compresses is watched by the guard, and that depends on the optimizer.
            self.replicas.optimizers.watch()
        else:
            self.settled = True
        if self.replicas.logs:
            for line in describe(costs):
                logger.debug("probe: %s", line)
            logger.info(
                "plan: step %.1f ms expected, %.1f ms exact as measured, compute %.1f ms: %s",
                decision.step_ms,
                self.exact_ms,
                decision.compute_ms,
                _forms([choice.form for choice in decision.choices]),
            )

    def _judge(self) -> None:
        """Keep the choice, or go back to exact. Collective: all replicas do the same."""
        communicators = self.replicas.communicators
        box: list[Any] = [self.tried_ms <= (1 - _GAIN) * self.exact_ms]
        dist.broadcast_object_list(box, group=communicators.control.handle, group_src=0)
        self.settled = True
        if not box[0]:
            for unit in range(len(self.replicas.units)):
                self.replicas.use(unit, "exact")
        if self.replicas.logs:
            assert self.decision is not None
            logger.info(
                "plan: step %.1f ms measured, %.1f ms predicted, %.1f ms exact: %s",
                self.tried_ms,
                self.decision.step_ms,
                self.exact_ms,
                "kept" if box[0] else "not faster, units go exact again",
            )


def _forms(forms: list[str]) -> str:
    return ", ".join(f"{forms.count(form)} units {form}" for form in dict.fromkeys(forms))
