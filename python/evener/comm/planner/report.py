"""What a planner says of its decisions: rank 0's lines in the log.

What is in force is said at `info`: one line per decision. What it was made from is
detail, at `debug`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from evener.comm.planner import choose, probe
from evener.comm.planner.choose import Decision
from evener.comm.planner.costs import Costs
from evener.comm.planner.sequence import first_sequence
from evener.comm.planner.simulate import play
from evener.comm.planner.trial import Way
from evener.comm.planner.ways import describe
from evener.comm.profile import StepProfile

logger = logging.getLogger("evener.comm")


def decision(
    profile: StepProfile,
    made: Decision,
    costs: Costs,
    carrier: str,
    forced_ms: Mapping[str, float],
    forced: str | None,
    tries: bool,
) -> None:
    """A decision, and what it was made from. `tries`: a trial follows, which says what was kept.

    `carrier`: what the exchange between nodes goes by; `forced_ms`: the step that each form alone
    would give; `forced`: the form that was asked for, or None.
    """
    logger.debug("probe: the exchange between nodes goes by %s", carrier)
    for line in probe.describe(costs):
        logger.debug("probe: %s", line)
    logger.debug(
        "profile: beside an exchange %.0f%% of computing is lost, beside computing an exchange "
        "takes %.2f times as long",
        100 * profile.drag,
        profile.crowd,
    )
    state = "hidden" if made.hidden else f"{made.step_ms - made.compute_ms:.1f} ms exposed"
    logger.log(
        logging.DEBUG if tries else logging.INFO,
        "plan: step %.1f ms expected, compute %.1f ms, communication %s; forced: %s",
        made.step_ms,
        made.compute_ms,
        state,
        ", ".join(f"{form} {step:.1f} ms" for form, step in forced_ms.items()),
    )
    if forced is not None:
        logger.info(
            "plan: the form is fixed, %s was asked for; buckets leave in the order %s: left as "
            "they become complete, the step would take %.1f ms",
            forced,
            " ".join(map(str, made.sequence)),
            as_complete(profile, made),
        )
    for line in table(profile, made):
        logger.debug("plan: %s", line)


def trial(kept: Way, measured: Decision, others: Sequence[tuple[Way, float]]) -> None:
    """What a trial kept; `measured`: its decision, with what was measured instead of expected."""
    shown = measured.step_ms - measured.compute_ms
    hidden = shown <= choose.TOLERANCE * measured.compute_ms
    tried = ", ".join(f"{way.name} {ms:.1f} ms" for way, ms in sorted(others, key=lambda o: o[1]))
    logger.info(
        "plan: kept %s (%s): step %.1f ms measured, compute %.1f ms, communication %s%s",
        kept.name,
        describe(kept.decision),
        measured.step_ms,
        measured.compute_ms,
        "hidden" if hidden else f"{shown:.1f} ms exposed",
        f"; tried: {tried}" if tried else "",
    )


def as_complete(profile: StepProfile, made: Decision) -> float:
    """Milliseconds of the step with these choices, if buckets left as they become complete."""
    stages = [choice.stages_ms for choice in made.choices]
    losses = [choice.loss for choice in made.choices]
    order = first_sequence(profile, stages, overlap=False)
    return play(profile, stages, order, made.overlap, losses).step_ms


def table(profile: StepProfile, made: Decision) -> Sequence[str]:
    """One line per bucket, in the order in which they leave."""
    return [
        f"bucket {b} ({profile.buckets[b].name} ...), {profile.buckets[b].bytes / 1e6:.1f} MB: "
        f"{made.choices[b].algorithm}, {made.choices[b].form}, "
        f"{sum(made.choices[b].stages_ms):.2f} ms, ready at {profile.buckets[b].ready_ms:.1f} ms, "
        f"needed at {profile.buckets[b].need_ms:.1f} ms"
        for b in made.sequence
    ]
