"""The planner in a running job: probe, decide on rank 0, tell all, compare, decide again.

Each reducer has one; where a form was asked for, only with overlap across the step. Then the form
stays, and what is decided is the order in which buckets leave, and whether embeddings are taken
apart.

After the profiled step it probes the network (once, about a second), rank 0
chooses, and every rank takes over the same decision. Then, every `WATCH_EVERY` steps, one step's
exchanges between nodes are timed and rank 0 logs what was predicted beside what was measured. Where
they are apart by more than `DRIFT` in two of these in a row, the network is not the one that was
probed, and everything is done again; from then on the first measurement after a decision is what
later ones are held against, so that a model of the network that is wrong here is not asked forever.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from evener.comm import wires
from evener.comm.planner import choose, probe
from evener.comm.planner.choose import Decision
from evener.comm.planner.costs import Costs
from evener.comm.planner.sequence import first_sequence
from evener.comm.planner.simulate import play
from evener.comm.profile import Recorder, StepProfile
from evener.comm.reducer import Reducer

logger = logging.getLogger("evener.comm")

WATCH_EVERY = 50
# Measured over predicted time of the exchanges, or the other way round.
DRIFT = 1.5
_STRIKES = 2

Measure = Callable[[StepProfile], Costs]


class Planner:
    """Decides for one reducer. `decision` is the one in force, `costs` what it was made from."""

    def __init__(
        self,
        reducer: Reducer,
        *,
        overlap: bool,
        measure: Measure | None = None,
        watch_every: int = WATCH_EVERY,
    ) -> None:
        """`measure`: in place of the probe, for tests; collective as the probe is."""
        self.reducer, self.overlap = reducer, overlap
        # The form that was asked for; None where one is to be chosen.
        wire = reducer.options.wire
        self.forced = None if wire == "exact" else wire
        # From the mildest on; beside a forced one the one for norms and small shards.
        self.forms = (
            wires.candidates(reducer.options.floor)
            if self.forced is None
            else ("exact", self.forced)
        )
        self.decision: Decision | None = None
        self.costs: Costs | None = None
        # On rank 0: the step that each form alone would give.
        self.forced_ms: dict[str, float] = {}
        self.measured_ms: float | None = None
        self._measure = self._probe if measure is None else measure
        self._every = watch_every
        self._strikes = 0
        self._steps = 0
        self._since: float | None = None
        self._decisions = 0
        self._first: float | None = None
        self._watch: Recorder | None = None

    def decide(self, profile: StepProfile | None) -> None:
        """Collective. Rank 0's profile counts; where it has none, all stays as it is."""
        control = self.reducer.communicators.control.handle
        box: list[Any] = [profile]
        dist.broadcast_object_list(box, group=control, group_src=0)
        if box[0] is None:
            return
        agreed: StepProfile = box[0]
        self.costs = self._measure(agreed)
        box = [None, False]
        if self.reducer.communicators.rank == 0:
            made, whole = self._apart_or_whole(agreed, self.costs)
            agreed = whole or agreed
            box = [made, whole is not None]
            alone = self.forms if self.forced is None else ("exact",)
            self.forced_ms = {
                form: self._choose(agreed, self.costs, [form]).step_ms for form in alone
            }
        dist.broadcast_object_list(box, group=control, group_src=0)
        self.decision = box[0]
        assert self.decision is not None
        if box[1]:
            self.reducer.parts.leave_whole()
        if self.forced is None:
            self.reducer.adopt(
                [(choice.algorithm, choice.form) for choice in self.decision.choices],
                self.decision.sequence,
            )
        else:
            self.reducer.resequence(self.decision.sequence)
        for exchange, choice in zip(self.reducer.exchanges, self.decision.choices, strict=True):
            exchange.predicted_ms = choice.stages_ms[1]
        self._strikes = self._steps = 0
        self._since = self._first = None
        self._decisions += 1
        if self.reducer.communicators.rank == 0:
            self._log(agreed)

    def _apart_or_whole(
        self, profile: StepProfile, costs: Costs
    ) -> tuple[Decision, StepProfile | None]:
        """The decision; and the profile with shared embeddings whole, where that is as good."""
        forms = self.forms if self.forced is None else [self.forced]
        apart = self._choose(profile, costs, forms)
        joined = self.reducer.parts.as_whole(profile)
        if joined is None:
            return apart, None
        whole = self._choose(joined, costs, forms)
        better = whole.step_ms <= apart.step_ms
        logger.info(
            "plan: what embedding and layer share is %s: the step takes %.1f ms whole, %.1f ms "
            "taken apart",
            "left whole" if better else "taken apart",
            whole.step_ms,
            apart.step_ms,
        )
        return (whole, joined) if better else (apart, None)

    def _choose(self, profile: StepProfile, costs: Costs, forms: Sequence[str]) -> Decision:
        return choose.choose(
            profile,
            costs,
            forms,
            overlap=self.overlap,
            # A forced form takes the way that it takes without a planner.
            algorithm=self.reducer.options.algorithm if self.forced is None else "2d",
            allowed=lambda bucket, form: self.reducer.permitted(bucket, form),
        )

    def _probe(self, profile: StepProfile) -> Costs:
        sizes = [bucket.bytes for bucket in profile.buckets]
        communicators = self.reducer.communicators
        # The order is for the many steps after a warm-up.
        options = dataclasses.replace(self.reducer.options, warmup_steps=0)
        # One node: nothing crosses a network.
        forms = self.forms if communicators.route.levels.nodes > 1 else ("exact",)
        made = {form: wires.get(form)(communicators.route, options) for form in forms}
        return probe.Probe(communicators, self.reducer.lanes).costs(
            made, (min(sizes), max(sizes)), flat=options.algorithm != "2d"
        )

    # --- watching ---

    def step_begins(self) -> bool:
        """Once a step, between steps. Collective now and then; True: the network has changed."""
        if self.decision is None or self.reducer.steps < self.reducer.options.warmup_steps:
            return False
        self._steps += 1
        place = self._steps % self._every
        if place == 1:
            self._watch = self.reducer.recorder = Recorder(self.reducer.device)
        elif place == 2 and self._watch is not None:
            self.reducer.recorder = None
        elif place == 0 and self._watch is not None:
            return self._compare(self._watch)
        return False

    def _compare(self, recorder: Recorder) -> bool:
        assert self.decision is not None
        expected = measured = 0.0
        occupied = [recorder.occupied(place) for place in range(3)]
        for index, choice in enumerate(self.decision.choices):
            for place, took in enumerate(choice.stages_ms):
                if index in occupied[place] and max(choice.stages_ms) == took > 0:
                    expected += took
                    measured += occupied[place][index]
        now = time.perf_counter()
        if self._since is not None:
            self.measured_ms = (now - self._since) * 1e3 / self._every
        self._since = now
        if self._first is None:
            self._first = measured
        held = expected if self._decisions == 1 else self._first
        apart = max(measured / held, held / max(measured, 1e-9)) if held else 1.0
        self._strikes = self._strikes + 1 if apart > DRIFT else 0
        box: list[Any] = [self._strikes >= _STRIKES]
        rank = self.reducer.communicators.rank
        dist.broadcast_object_list(
            box, group=self.reducer.communicators.control.handle, group_src=0
        )
        if rank == 0:
            step = "" if self.measured_ms is None else f"step {self.measured_ms:.1f} ms, "
            logger.info(
                "plan: %spredicted %.1f ms; exchanges %.1f ms, predicted %.1f ms%s",
                step,
                self.decision.step_ms,
                measured,
                expected,
                "; the network has changed, planning again" if box[0] else "",
            )
        return bool(box[0])

    def _log(self, profile: StepProfile) -> None:
        made, costs = self.decision, self.costs
        assert made is not None and costs is not None
        carrier = self.reducer.communicators.route.carrier
        logger.info("probe: the exchange between nodes goes by %s", carrier.name)
        for line in probe.describe(costs):
            logger.info("probe: %s", line)
        logger.info(
            "profile: beside an exchange %.0f%% of computing is lost, beside computing an exchange "
            "takes %.2f times as long",
            100 * profile.drag,
            profile.crowd,
        )
        state = "hidden" if made.hidden else f"{made.step_ms - made.compute_ms:.1f} ms exposed"
        logger.info(
            "plan: step %.1f ms expected, compute %.1f ms, communication %s; forced: %s",
            made.step_ms,
            made.compute_ms,
            state,
            ", ".join(f"{form} {step:.1f} ms" for form, step in self.forced_ms.items()),
        )
        if self.forced is not None:
            logger.info(
                "plan: the form is fixed, %s was asked for; buckets leave in the order %s: left as "
                "they become complete, the step would take %.1f ms",
                self.forced,
                " ".join(map(str, made.sequence)),
                as_complete(profile, made),
            )
        for line in table(profile, made):
            logger.info("plan: %s", line)


def as_complete(profile: StepProfile, made: Decision) -> float:
    """Milliseconds of the step with these choices, if buckets left as they become complete."""
    stages = [choice.stages_ms for choice in made.choices]
    losses = [choice.loss for choice in made.choices]
    order = first_sequence(profile, stages, overlap=False)
    return play(profile, stages, order, made.overlap, losses).step_ms


def table(profile: StepProfile, made: Decision) -> Sequence[str]:
    """One line a bucket, in the order in which they leave."""
    return [
        f"bucket {b} ({profile.buckets[b].name} ...), {profile.buckets[b].bytes / 1e6:.1f} MB: "
        f"{made.choices[b].algorithm}, {made.choices[b].form}, "
        f"{sum(made.choices[b].stages_ms):.2f} ms, ready at {profile.buckets[b].ready_ms:.1f} ms, "
        f"needed at {profile.buckets[b].need_ms:.1f} ms"
        for b in made.sequence
    ]
