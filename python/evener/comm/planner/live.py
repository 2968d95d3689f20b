"""The planner in a running job: probe, decide on rank 0, tell all, try, compare, decide again.

Each reducer has one; where a form was asked for, only with overlap across the step. Then the form
stays, and what is decided is the order in which buckets leave, and whether embeddings are taken
apart.

After the profiled step it probes the network (once, about a second), rank 0 chooses, and every rank
takes over the same decision. What was chosen is then tried beside DDP's own way and the next best
ones, a few steps each (`trial`, `ways`), and the fastest stays. What is expected from there on is
what was measured.

Then, every `WATCH_EVERY` steps, one step's exchanges between nodes are timed and rank 0 logs what
was predicted beside what was measured. Where they are apart by more than `DRIFT` in two of these in
a row, the network is not the one that was probed, and everything is done again; from then on the
first measurement after a decision is what later ones are held against, so that a model of the
network that is wrong here is not asked forever. Where only steps have become slower, the ways are
tried again.

Whether something looks at gradients between backward and step (clipping, unscaling, a norm that is
logged) is seen in the profiled steps: then no step can outlast it, and none is planned to.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from evener.base import settings
from evener.comm import wires
from evener.comm.overlap import StepOverlap
from evener.comm.planner import choose, probe, report
from evener.comm.planner.bounds import plausible
from evener.comm.planner.choose import LIBRARY, Decision
from evener.comm.planner.costs import Costs
from evener.comm.planner.simulate import play
from evener.comm.planner.trial import FAR, Trial, Watch, Way
from evener.comm.planner.ways import harshness, same, ways
from evener.comm.profile import Clock, Recorder, StepProfile
from evener.comm.reducer import Reducer

logger = logging.getLogger("evener.comm")

WATCH_EVERY = 50
# Measured over predicted time of the exchanges, or the other way round.
DRIFT = 1.5
_STRIKES = 2
# Steps in a row whose times are looked at, every `WATCH_EVERY`.
_WATCHED = 8
# In this many of the profiled steps something must look between backward and step.
_LOOKED = 2
# A step that is shorter than computing was said to be, by more than this, says how long that is.
_SHORTER = 0.97

Measure = Callable[[StepProfile], Costs]


class Library(Protocol):
    """The model's own reducer, that of torch, which can take the gradients instead of Evener's."""

    on: str  # the form in which it does so now, or empty

    def refusal(self) -> str:
        """Why it cannot; or nothing."""

    def enter(self, form: str) -> None:
        """From the step that begins now on. The same on all ranks, as `leave`."""

    def leave(self) -> None:
        """Evener's reducer takes them again."""


class Planner:
    """Decides for one reducer. `decision` is the one in force, `costs` what it was made from."""

    def __init__(
        self,
        reducer: Reducer,
        *,
        overlap: bool,
        measure: Measure | None = None,
        watch_every: int = WATCH_EVERY,
        trial_steps: int | None = None,
    ) -> None:
        """`measure` replaces the probe in tests, and is collective as the probe is.

        `trial_steps`: in each window of a trial, 0: nothing is tried; None: EVENER_TRIAL_STEPS.
        """
        self.reducer, self.overlap = reducer, overlap
        self.library: Library | None = None
        self._may_overlap = overlap
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
        # What was tried since the decision: by name the way, and milliseconds of a step.
        self.tried: dict[str, tuple[Way, float]] = {}
        self.kept: Way | None = None
        self.looked_at = ""
        if trial_steps is None:
            trial_steps = settings.EVENER_TRIAL_STEPS.get()
        self._trial_steps = trial_steps
        self._trial: Trial | None = None
        self._clock = Clock(reducer.device)
        self._marks: list[Any] = []
        self._slower: Watch | None = None
        self._profile: StepProfile | None = None
        self._corrected = False
        self._overlap: StepOverlap | None = None
        self._interrupted = 0

    @property
    def own_ms(self) -> float | None:
        """Milliseconds of a step the way DDP takes it, where that was tried."""
        return next((ms for way, ms in self.tried.values() if way.own), None)

    def decide(self, profile: StepProfile | None, overlap: StepOverlap | None = None) -> None:
        """Collective. Rank 0's profile counts; where it has none, all stays as it is.

        `overlap`: what defers steps, where there is something.
        """
        control = self.reducer.communicators.control.handle
        box: list[Any] = [profile]
        dist.broadcast_object_list(box, group=control, group_src=0)
        if box[0] is None:
            if self.reducer.communicators.rank == 0:
                logger.warning(
                    "plan: none is made, and all stays as it is: backward went round the model's "
                    "forward, so no step could be profiled"
                )
            return
        agreed: StepProfile = box[0]
        self._overlap = overlap
        self._look(overlap)
        self.costs = self._measure(agreed)
        box = [None, None]
        if self.reducer.communicators.rank == 0:
            made, whole = self._apart_or_whole(agreed, self.costs)
            agreed = whole or agreed
            box = [made, whole]
            alone = self.forms if self.forced is None else ("exact",)
            self.forced_ms = {
                form: self._choose(agreed, self.costs, [form]).step_ms for form in alone
            }
        dist.broadcast_object_list(box, group=control, group_src=0)
        self.decision = box[0]
        assert self.decision is not None
        if box[1] is not None:
            self.reducer.parts.leave_whole()
            agreed = box[1]
        if self.forced is None:
            self.reducer.adopt(
                [(choice.algorithm, choice.form) for choice in self.decision.choices],
                self.decision.sequence,
            )
        else:
            self.reducer.resequence(self.decision.sequence)
        for exchange, choice in zip(self.reducer.exchanges, self.decision.choices, strict=True):
            exchange.predicted_ms = choice.stages_ms[1]
        self._decisions += 1
        if self.reducer.communicators.rank == 0:
            carrier = self.reducer.communicators.route.carrier.name
            tries = bool(self._trial_steps and self._tries)
            report.decision(
                agreed, self.decision, self.costs, carrier, self.forced_ms, self.forced, tries
            )
        self._restart()
        self._profile, self._corrected = agreed, False
        self.tried, self.kept, self._slower, self._trial = {}, None, None, None
        if self._trial_steps and self._tries:
            planned = self.decision
            found = self._from_first(lambda: self._ways(planned, agreed))
            self._try(found)
            self._marks = []  # `step_begins` is still to be called for the step that begins

    def _restart(self) -> None:
        """Watch from here on."""
        self._strikes = self._steps = 0
        self._since = self._first = None
        self._watch = self.reducer.recorder = None

    def _look(self, overlap: StepOverlap | None) -> None:
        """Agree on whether a step can outlast itself: not where something looks at its results."""
        if overlap is None:
            return
        seen = _LOOKED if overlap.off else overlap.interrupted - self._interrupted
        looked = torch.tensor([seen], dtype=torch.int64)
        control = self.reducer.communicators.control.handle
        dist.all_reduce(looked, dist.ReduceOp.MAX, group=control)
        self._interrupted = overlap.interrupted
        self.overlap, self.looked_at = self._may_overlap, ""
        if int(looked.item()) < _LOOKED or not self.overlap:
            return
        self.overlap = False
        self.looked_at = overlap.off or overlap.looked_at or "on another rank"
        if self.reducer.communicators.rank == 0:
            logger.info(
                "plan: no overlap across the step, its results are needed before it ends: %s",
                self.looked_at,
            )

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
            allowed=lambda bucket, form: self.reducer.assignment.permitted(bucket, form),
        )

    def _probe(self, profile: StepProfile) -> Costs:
        sizes = [bucket.bytes for bucket in profile.buckets]
        communicators = self.reducer.communicators
        # The order is for the many steps after a warm-up.
        options = dataclasses.replace(self.reducer.options, warmup_steps=0)
        # One node: nothing crosses a network.
        forms = self.forms if communicators.route.levels.nodes > 1 else ("exact",)
        made = {form: wires.get(form)(communicators.route, options) for form in forms}
        found = probe.Probe(communicators, self.reducer.lanes).costs(
            made, (min(sizes), max(sizes)), flat=options.algorithm != "2d"
        )
        entries = 1 << 20
        exact = max(1, made["exact"].sent_bytes(entries, 4))
        return plausible(
            found, {form: wire.sent_bytes(entries, 4) / exact for form, wire in made.items()}
        )

    # --- trying ---

    @property
    def _tries(self) -> bool:
        """Whether there is anything to choose from: a way, or whether steps outlast themselves."""
        several = self.reducer.communicators.route.levels.nodes > 1
        return several and (self.forced is None or self.overlap)

    def _from_first(self, make: Callable[[], list[Way]]) -> list[Way]:
        """What rank 0 makes. Collective: costs differ in their last digits from rank to rank."""
        box: list[Any] = [make() if self.reducer.communicators.rank == 0 else None]
        control = self.reducer.communicators.control.handle
        dist.broadcast_object_list(box, group=control, group_src=0)
        found: list[Way] = box[0]
        return found

    def _ways(self, planned: Decision, profile: StepProfile) -> list[Way]:
        assert self.costs is not None
        if self.forced is not None:
            return [Way("planned", planned), Way("without overlap", self._alone(profile))]
        route = self.reducer.communicators.route
        alone = route.outer.transport is None and not route.levels.two_level
        library = "2d" if alone else "own"
        if self.library is not None:
            why = self.library.refusal()
            library = library if why else LIBRARY
            if why:
                logger.debug("plan: DDP's own reducer is not tried: %s", why)
        return ways(
            planned,
            profile,
            self.costs,
            self.forms,
            overlap=self.overlap,
            algorithm=self.reducer.options.algorithm,
            allowed=lambda bucket, form: self.reducer.assignment.permitted(bucket, form),
            library=library,
        )

    def _alone(self, profile: StepProfile) -> Decision:
        """The forced form, with nothing left for the next forward."""
        assert self.costs is not None and self.forced is not None
        return choose.choose(
            profile,
            self.costs,
            [self.forced],
            algorithm="2d",
            allowed=lambda bucket, form: self.reducer.assignment.permitted(bucket, form),
        )

    def _try(self, found: Sequence[Way]) -> None:
        """Begin a trial of these, between steps."""
        self._trial = Trial(found, self._trial_steps)
        self._take(found[0])

    def _take(self, way: Way) -> None:
        """From the step that begins now on this way; everything that was on its way comes in."""
        self.reducer.finish("")
        made, form = way.decision, way.decision.library
        if self.library is not None and self.library.on not in ("", form):
            self.library.leave()
        if self.forced is None:
            self.reducer.adopt([(c.algorithm, c.form) for c in made.choices], made.sequence)
        else:
            self.reducer.resequence(made.sequence)
        for exchange, choice in zip(self.reducer.exchanges, made.choices, strict=True):
            exchange.predicted_ms = choice.stages_ms[1]
        if self._overlap is not None:
            self._overlap.wanted = made.overlap
        if self.library is not None and form:
            self.library.enter(form)
        self.decision = made
        self._marks = [self._clock.mark()]

    def _tried(self, trial: Trial) -> None:
        """A step of a trial begins; the one before it has ended."""
        window = trial.window
        assert window is not None
        self._marks.append(self._clock.mark())
        if len(self._marks) <= window.settle + window.steps:
            return
        trial.took(self._agreed(self._times()))
        if trial.window is not None:
            following = trial.ways[trial.window.way]
            if following.decision is not self.decision:
                self._take(following)
            else:
                self._marks = [self._clock.mark()]
            return
        self._trial = None
        self._keep(trial)

    def _times(self) -> list[float]:
        """Milliseconds between the marks, which this takes away."""
        marks, self._marks = self._marks, []
        if self._clock.gpu:
            marks[-1].synchronize()
        return [self._clock.ms(a, b) for a, b in itertools.pairwise(marks)]

    def _agreed(self, times: list[float]) -> list[float]:
        """The slowest rank's time for each, in units that all ranks read alike."""
        slowest = torch.tensor(times, dtype=torch.float64)
        control = self.reducer.communicators.control.handle
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=control)
        return [float(ms) for ms in slowest.tolist()]

    def _keep(self, trial: Trial) -> None:
        """The trial is over: keep the fastest; where computing takes less than thought, go on."""
        result = trial.result
        self.tried |= {way.name: (way, ms) for way, ms in zip(trial.ways, result.ms, strict=True)}
        kept, took = trial.ways[result.kept], result.ms[result.kept]
        if (again := self._corrected_ways(kept, took)) is not None:
            self._try(again)
            return
        if kept.decision is not self.decision:
            self._take(kept)
        assert self._profile is not None
        compute = min(self._profile.compute_ms, took)
        self.kept = kept
        self.decision = dataclasses.replace(kept.decision, step_ms=took, compute_ms=compute)
        if self._slower is None:
            self._slower = Watch(took)
        else:
            self._slower.tried(took)
        self._restart()
        if self.reducer.communicators.rank == 0:
            report.trial(
                kept,
                self.decision,
                [one for one in self.tried.values() if one[0].name != kept.name],
            )

    def _corrected_ways(self, kept: Way, took: float) -> list[Way] | None:
        """What to try once more, where a step was shorter than its computing was said to be."""
        profile = self._profile
        assert profile is not None and self.costs is not None
        if self.forced is not None or self._corrected or took >= _SHORTER * profile.compute_ms:
            return None
        self._corrected = True
        said, costs = profile.compute_ms, self.costs
        self._profile = profile = _calibrated(profile, kept.decision, took)
        found = self._from_first(
            lambda: [Way("planned again", self._choose(profile, costs, self.forms))]
        )
        planned = found[0]
        planned = dataclasses.replace(planned, harsh=harshness(planned.decision, self.forms))
        if self.reducer.communicators.rank == 0:
            logger.info(
                "plan: computing takes %.1f ms and not %.1f ms, for a step took %.1f ms: planning "
                "again",
                profile.compute_ms,
                said,
                took,
            )
        if same(planned.decision, kept.decision):
            return None
        measured = dataclasses.replace(kept.decision, step_ms=took)
        return [planned, dataclasses.replace(kept, decision=measured)]

    # --- watching ---

    def step_begins(self) -> bool:
        """Once a step, between steps. Collective now and then; True: the network has changed."""
        if self.decision is None or self.reducer.steps < self.reducer.options.warmup_steps:
            return False
        if self._trial is not None:
            self._tried(self._trial)
            return False
        self._steps += 1
        place = self._steps % self._every
        if place == 1:
            self._watch = self.reducer.recorder = Recorder(self.reducer.device)
        elif place == 2 and self._watch is not None:
            self.reducer.recorder = None
        if 2 <= place <= 2 + _WATCHED and self._slower is not None:
            if place == 2:
                self._marks = []
            self._marks.append(self._clock.mark())
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
        # What was predicted is of the planner's own ways; another's first measurement counts.
        modelled = self.kept is None or self.kept.name.startswith("planned")
        held = expected if self._decisions == 1 and modelled else self._first
        apart = max(measured / held, held / max(measured, 1e-9)) if held else 1.0
        self._strikes = self._strikes + 1 if apart > DRIFT else 0
        slower = False
        if self._slower is not None and len(self._marks) > 2:
            slower = self._slower.look(statistics.median(self._times()))
        box: list[Any] = [self._strikes >= _STRIKES, slower]
        rank = self.reducer.communicators.rank
        dist.broadcast_object_list(
            box, group=self.reducer.communicators.control.handle, group_src=0
        )
        if rank == 0:
            step = "" if self.measured_ms is None else f"step {self.measured_ms:.1f} ms, "
            logger.log(
                logging.INFO if box[0] or box[1] else logging.DEBUG,
                "plan: %spredicted %.1f ms; exchanges %.1f ms, predicted %.1f ms%s",
                step,
                self.decision.step_ms,
                measured,
                expected,
                "; the network has changed, planning again"
                if box[0]
                else "; steps have become slower, the ways are tried again"
                if box[1]
                else "",
            )
        if box[0] and self.library is not None:
            self.library.leave()
        if box[0] and self._overlap is not None:
            self._interrupted = self._overlap.interrupted
        elif box[1] and self.kept is not None:
            least = min(ms for _, ms in self.tried.values())
            self._try(
                [
                    dataclasses.replace(way, decision=dataclasses.replace(way.decision, step_ms=ms))
                    for way, ms in self.tried.values()
                    if ms <= FAR * least
                ]
            )
        return bool(box[0])


def _calibrated(profile: StepProfile, made: Decision, took: float) -> StepProfile:
    """The step whose computing takes so long that with this decision it is played in `took`."""
    stages = [choice.stages_ms for choice in made.choices]
    losses = [choice.loss for choice in made.choices]
    low, high = 0.05 * took, min(took, profile.compute_ms)
    for _ in range(30):
        tried = profile.scaled((low + high) / 2)
        if play(tried, stages, made.sequence, made.overlap, losses).step_ms > took:
            high = tried.compute_ms
        else:
            low = tried.compute_ms
    return profile.scaled(low)
