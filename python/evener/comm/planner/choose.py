"""From a profiled step and costs to a decision: for every bucket algorithm and form, and the order.

First the mildest everywhere. While communication is exposed, the bucket that would save the network
most time takes the next harsher form (never past the floor). Then back: every bucket is made milder
again, harshest first, as long as the step stays as short as the best that was reached.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evener.comm.planner.costs import Costs
from evener.comm.planner.sequence import best_sequence, first_sequence
from evener.comm.planner.simulate import Played, play
from evener.comm.profile import StepProfile

# A step this close to its compute time, or to the best one, counts as equal.
TOLERANCE = 0.01
# By so much the step must be shorter than with exact forms, or it is those that are taken.
WORTH = 0.015
# As an algorithm: the model's own reducer, that of torch, with all buckets in one form.
LIBRARY = "ddp"


@dataclass(frozen=True)
class Choice:
    """One bucket: "2d", "flat" or `LIBRARY`, the form between nodes, and its stages' times.

    `loss`: the share of computing that its exchange takes from whatever runs beside it.
    """

    algorithm: str
    form: str
    stages_ms: tuple[float, float, float]
    loss: float = 0.0


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
    def library(self) -> str:
        """The form in which the model's own reducer sends, where it does; or nothing."""
        own = bool(self.choices) and self.choices[0].algorithm == LIBRARY
        return self.choices[0].form if own else ""

    @property
    def hidden(self) -> bool:
        """Whether the network costs nothing that can be measured."""
        return self.step_ms <= self.compute_ms * (1 + TOLERANCE)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**dataclasses.asdict(self), "hidden": self.hidden}


def choose(
    profile: StepProfile,
    costs: Costs,
    forms: Sequence[str],
    *,
    overlap: bool = False,
    algorithm: str = "auto",
    allowed: Callable[[int, str], bool] | None = None,
) -> Decision:
    """The decision. `forms`: from the mildest to the harshest that may be taken; one: forced.

    `algorithm`: "2d" or "flat" where it is not free. `allowed(bucket, form)`: what is not stays
    exact.
    """
    search = _Search(profile, costs, forms, overlap, algorithm, allowed)
    exact = search.exact()
    chosen, sequence, played = search.run()
    choices = tuple(search.choice(b, level) for b, level in enumerate(chosen))
    return Decision(
        choices,
        sequence,
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
        allowed: Callable[[int, str], bool] | None,
    ) -> None:
        self.profile, self.costs, self.forms = profile, costs, list(forms)
        self.overlap, self.algorithm = overlap, algorithm
        self.allowed = allowed or (lambda *_: True)
        self._choices: dict[tuple[int, str], Choice] = {}

    def choice(self, bucket: int, level: int) -> Choice:
        form = self.forms[level]
        if form != "exact" and not self.allowed(bucket, form):
            form = "exact"
        key = (bucket, form)
        if key not in self._choices:
            profiled = self.profile.buckets[bucket]
            size = profiled.summed(self.costs.size)
            self._choices[key] = self._best_algorithm(size, form, profiled.itemsize)
        return self._choices[key]

    def _best_algorithm(self, size: int, form: str, itemsize: int) -> Choice:
        loss = self.costs.loss(form, size, self.profile.drag, itemsize)
        two = Choice("2d", form, self._stages("2d", form, size, itemsize), loss)
        if self.costs.flat is None or form != "exact" or self.algorithm == "2d":
            return two
        flat = Choice("flat", form, self._stages("flat", form, size, itemsize), loss)
        if self.algorithm == "flat" or not self.costs.two_level:
            return flat
        # Buckets are pipelined through the lanes: what counts is the longest, then the sum.
        faster = max(flat.stages_ms) < (1 - TOLERANCE) * max(two.stages_ms)
        return flat if faster else two

    def _stages(
        self, algorithm: str, form: str, size: int, itemsize: int
    ) -> tuple[float, float, float]:
        scatter, exchange, gather = self.costs.stages(algorithm, form, size, itemsize)
        return scatter, exchange * self.profile.crowd, gather

    def stages(self, levels: Sequence[int]) -> list[tuple[float, float, float]]:
        return [self.choice(b, level).stages_ms for b, level in enumerate(levels)]

    def losses(self, levels: Sequence[int]) -> list[float]:
        return [self.choice(b, level).loss for b, level in enumerate(levels)]

    def play(self, levels: Sequence[int], sequence: Sequence[int] | None = None) -> Played:
        stages = self.stages(levels)
        if sequence is None:
            sequence = first_sequence(self.profile, stages, self.overlap)
        return play(self.profile, stages, sequence, self.overlap, self.losses(levels))

    def best(self, levels: Sequence[int]) -> tuple[int, ...]:
        return best_sequence(self.profile, self.stages(levels), self.overlap, self.losses(levels))

    def exact(self) -> Played:
        forms, self.forms = self.forms, ["exact"]
        try:
            levels = [0] * len(self.profile.buckets)
            return self.play(levels, self.best(levels))
        finally:
            self.forms = forms

    def run(self) -> tuple[list[int], tuple[int, ...], Played]:
        levels = [0] * len(self.profile.buckets)
        goal = self.profile.compute_ms * (1 + TOLERANCE)
        best = self._ordered(levels)
        while best[2].step_ms > goal and (harsher := self._harsher(levels)) is not None:
            levels[harsher[0]] = harsher[1]
            played = self.play(levels)
            if played.step_ms < best[2].step_ms:
                best = (
                    list(levels),
                    first_sequence(self.profile, self.stages(levels), self.overlap),
                    played,
                )
        best = min(best, self._ordered(best[0]), key=lambda found: found[2].step_ms)
        exact = self._ordered([0] * len(levels))
        if exact[2].step_ms <= best[2].step_ms * (1 + WORTH):
            return exact
        hidden = best[2].step_ms <= goal
        return self._milder(*best, goal if hidden else best[2].step_ms * (1 + TOLERANCE))

    def _ordered(self, levels: Sequence[int]) -> tuple[list[int], tuple[int, ...], Played]:
        sequence = self.best(levels)
        return list(levels), sequence, self.play(levels, sequence)

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

    def _milder(
        self, levels: list[int], sequence: tuple[int, ...], played: Played, limit: float
    ) -> tuple[list[int], tuple[int, ...], Played]:
        order = sorted(
            range(len(levels)), key=lambda b: (-levels[b], self.profile.buckets[b].bytes)
        )
        for bucket in order:
            for level in range(levels[bucket]):
                tried = [*levels[:bucket], level, *levels[bucket + 1 :]]
                result = self.play(tried, sequence)
                if result.step_ms <= limit:
                    levels, played = tried, result
                    break
        return levels, sequence, played
