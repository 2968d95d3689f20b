"""From a profiled step and costs to a decision: for every bucket algorithm and form, and the order.

First the mildest everywhere. While communication is exposed, the bucket that would save the network
most time takes the next harsher form (never past the floor). Then back: every bucket is made milder
again, harshest first, as long as the step stays as short as the best that was reached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evener.comm.overlap.order import issue_order
from evener.comm.planner.costs import LADDER, Costs
from evener.comm.planner.simulate import Played, play
from evener.comm.profile import StepProfile
from evener.errors import UsageError

# A step this close to its compute time, or to the best one, counts as equal.
TOLERANCE = 0.01


@dataclass(frozen=True)
class Choice:
    """One bucket: "2d" or "flat", the form between nodes, and the times expected of its stages."""

    algorithm: str
    form: str
    stages_ms: tuple[float, float, float]


@dataclass(frozen=True)
class Decision:
    """What all ranks do from here on. `exact_ms`: the step that exact forms would give."""

    choices: tuple[Choice, ...]
    sequence: tuple[int, ...]
    overlap: bool
    compute_ms: float
    step_ms: float
    exact_ms: float

    @property
    def hidden(self) -> bool:
        """Whether the network costs nothing that can be measured."""
        return self.step_ms <= self.compute_ms * (1 + TOLERANCE)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**dataclasses.asdict(self), "hidden": self.hidden}


def ladder(floor: str, known: Sequence[str]) -> tuple[str, ...]:
    """The forms from "exact" to `floor`, of those that are `known` here. Raises UsageError."""
    if floor not in known or floor not in LADDER:
        allowed = [form for form in LADDER if form in known]
        raise UsageError(f"floor={floor!r} cannot be", f"choose from {', '.join(allowed)}")
    return tuple(f for f in LADDER[: LADDER.index(floor) + 1] if f in known)


def choose(
    profile: StepProfile,
    costs: Costs,
    *,
    floor: str = "exact",
    forced: str = "",
    overlap: bool = False,
    algorithm: str = "auto",
    keep_exact_below: int = 0,
) -> Decision:
    """The decision. `forced`: this form for all, in place of a choice down to `floor`.

    `algorithm`: "2d" or "flat" where it is not free. `keep_exact_below`: buckets whose shard is
    smaller, in bytes, stay exact.
    """
    forms = (forced,) if forced else ladder(floor, list(costs.exchange))
    search = _Search(profile, costs, forms, overlap, algorithm, keep_exact_below)
    exact = search.exact()
    chosen, played = search.run()
    choices = tuple(search.choice(b, level) for b, level in enumerate(chosen))
    return Decision(
        choices,
        search.sequence(chosen),
        overlap,
        profile.compute_ms,
        played.step_ms,
        exact.step_ms,
    )


class _Search:
    def __init__(
        self,
        profile: StepProfile,
        costs: Costs,
        forms: Sequence[str],
        overlap: bool,
        algorithm: str,
        keep_exact_below: int,
    ) -> None:
        self.profile, self.costs, self.forms = profile, costs, list(forms)
        self.overlap, self.algorithm = overlap, algorithm
        self.exact_only = [b.bytes / costs.per_node < keep_exact_below for b in profile.buckets]
        self._choices: dict[tuple[int, str], Choice] = {}

    def choice(self, bucket: int, level: int) -> Choice:
        form = "exact" if self.exact_only[bucket] else self.forms[level]
        key = (bucket, form)
        if key not in self._choices:
            self._choices[key] = self._best_algorithm(self.profile.buckets[bucket].bytes, form)
        return self._choices[key]

    def _best_algorithm(self, size: int, form: str) -> Choice:
        two = Choice("2d", form, self.costs.stages("2d", form, size))
        if self.costs.flat is None or form != "exact" or self.algorithm == "2d":
            return two
        flat = Choice("flat", form, self.costs.stages("flat", form, size))
        if self.algorithm == "flat" or self.costs.per_node == 1:
            return flat
        # Buckets are pipelined through the lanes: what counts is the longest, then the sum.
        faster = max(flat.stages_ms) < (1 - TOLERANCE) * max(two.stages_ms)
        return flat if faster else two

    def sequence(self, levels: Sequence[int]) -> tuple[int, ...]:
        buckets = self.profile.buckets
        if not self.overlap:
            return tuple(sorted(range(len(buckets)), key=lambda b: (buckets[b].ready_ms, b)))
        return issue_order(
            [b.ready_ms for b in buckets],
            [b.need_ms for b in buckets],
            [max(self.choice(b, level).stages_ms) for b, level in enumerate(levels)],
        )

    def play(self, levels: Sequence[int]) -> Played:
        stages = [self.choice(b, level).stages_ms for b, level in enumerate(levels)]
        return play(self.profile, stages, self.sequence(levels), self.overlap)

    def exact(self) -> Played:
        forms, self.forms = self.forms, ["exact"]
        try:
            return self.play([0] * len(self.profile.buckets))
        finally:
            self.forms = forms

    def run(self) -> tuple[list[int], Played]:
        levels = [0] * len(self.profile.buckets)
        played = self.play(levels)
        best, best_levels = played, list(levels)
        goal = self.profile.compute_ms * (1 + TOLERANCE)
        while best.step_ms > goal and (harsher := self._harsher(levels)) is not None:
            levels[harsher[0]] = harsher[1]
            played = self.play(levels)
            if played.step_ms < best.step_ms:
                best, best_levels = played, list(levels)
        hidden = best.step_ms <= goal
        return self._milder(best_levels, goal if hidden else best.step_ms * (1 + TOLERANCE))

    def _harsher(self, levels: Sequence[int]) -> tuple[int, int] | None:
        """The step down the ladder that spares the longest lane most: (bucket, level)."""
        found, most = None, 0.0
        for bucket, level in enumerate(levels):
            now = max(self.choice(bucket, level).stages_ms)
            for further in range(level + 1, len(self.forms)):
                saved = now - max(self.choice(bucket, further).stages_ms)
                if saved > 0:
                    if saved > most:
                        found, most = (bucket, further), saved
                    break  # a harsher form that saves nothing is passed over
        return found

    def _milder(self, levels: list[int], limit: float) -> tuple[list[int], Played]:
        played = self.play(levels)
        order = sorted(
            range(len(levels)), key=lambda b: (-levels[b], self.profile.buckets[b].bytes)
        )
        for bucket in order:
            for level in range(levels[bucket]):
                tried = [*levels[:bucket], level, *levels[bucket + 1 :]]
                result = self.play(tried)
                if result.step_ms <= limit:
                    levels, played = tried, result
                    break
        return levels, played
