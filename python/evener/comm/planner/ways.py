"""The ways worth a try: the planner's choice, DDP's own, torch's hooks', and the next best.

A model says which way should be fastest, and what is beside it here are those that win where the
model is wrong: nothing deferred past the step; the collective library alone, with buckets as they
become complete, exact as DDP sends them or cast as torch's communication hooks do; everything in
the harshest form that was allowed. None is below the floor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from evener.comm import wires
from evener.comm.planner.choose import LIBRARY, Choice, Decision, choose
from evener.comm.planner.costs import Costs
from evener.comm.planner.sequence import first_sequence
from evener.comm.planner.simulate import play
from evener.comm.planner.trial import Way
from evener.comm.profile import StepProfile

# Past this many times the best prediction a way of the planner's own making is not tried.
_HOPELESS = 1.5

Allowed = Callable[[int, str], bool]


def ways(
    planned: Decision,
    profile: StepProfile,
    costs: Costs,
    forms: Sequence[str],
    *,
    overlap: bool,
    algorithm: str,
    allowed: Allowed,
    library: str = "own",
) -> list[Way]:
    """`planned` first, then the others, each once. Arguments as `choose`'s.

    `library`: what the collective library alone is called as an algorithm; "2d" where the planner's
    own way is no other, `LIBRARY` where the model's own reducer can do it.
    """

    def chosen(forms: Sequence[str], overlap: bool) -> Decision:
        return choose(profile, costs, forms, overlap=overlap, algorithm=algorithm, allowed=allowed)

    found = [_way("planned", planned, forms)]

    def add(way: Way) -> None:
        for place, other in enumerate(found):
            if same(way.decision, other.decision):
                found[place] = dataclasses.replace(other, own=other.own or way.own)
                return
        found.append(way)

    def own(form: str) -> Decision:
        return _own(planned, profile, costs, form, allowed, library)

    add(_way("DDP's own", own("exact"), forms, own=True))
    for form in forms:
        if wires.get(form).cast is not None:
            add(_way(f"{form} as torch's hook", own(form), forms))
    if overlap:
        add(_way("planned without overlap", chosen(forms, False), forms))
    more = [_way(f"all {form}", chosen([form], overlap), forms) for form in forms]
    last = more.pop()
    add(last)
    if more:
        next_best = min(more, key=lambda way: way.decision.step_ms)
        if next_best.decision.step_ms <= _HOPELESS * planned.step_ms:
            add(next_best)
    return found


def _way(name: str, decision: Decision, forms: Sequence[str], own: bool = False) -> Way:
    return Way(name, decision, harshness(decision, forms), own)


def harshness(decision: Decision, forms: Sequence[str]) -> int:
    """The place in `forms` of the harshest one that it takes; 0 where all is exact."""
    order = list(forms)
    return max((order.index(c.form) for c in decision.choices if c.form in order), default=0)


def _own(
    planned: Decision,
    profile: StepProfile,
    costs: Costs,
    form: str,
    allowed: Allowed,
    library: str,
) -> Decision:
    """All buckets over the collective library alone, as they become complete."""
    choices = []
    for index, bucket in enumerate(profile.buckets):
        sent = form
        if form != "exact" and library != LIBRARY and not allowed(index, form):
            sent = "exact"
        size = bucket.summed(costs.size)
        # The cast halves what crosses; what the flat way costs was measured for exact ones alone.
        if costs.flat is not None and costs.two_level:
            took = costs.flat(size if sent == "exact" else size / 2)
        else:
            took = costs.exchange[sent](costs.shard(sent, size, bucket.itemsize)) * costs.per_node
        stages = (0.0, took * profile.crowd, 0.0)
        loss = costs.loss(sent, size, profile.drag, bucket.itemsize)
        choices.append(Choice(library, sent, stages, loss))
    stages_ms = [choice.stages_ms for choice in choices]
    order = first_sequence(profile, stages_ms, overlap=False)
    played = play(profile, stages_ms, order, False, [choice.loss for choice in choices])
    return Decision(
        tuple(choices), order, False, planned.compute_ms, played.step_ms, planned.exact_ms
    )


def same(one: Decision, other: Decision) -> bool:
    """Whether they do the same, whatever is expected of them."""
    return (
        one.overlap == other.overlap
        and one.sequence == other.sequence
        and [(c.algorithm, c.form) for c in one.choices]
        == [(c.algorithm, c.form) for c in other.choices]
    )


def describe(decision: Decision) -> str:
    """What a way does, in words: the buckets by form, and whether they outlast a step."""
    if decision.library:
        return f"DDP's own reducer, {decision.library}"
    kinds = [c.form if c.algorithm == "2d" else f"{c.algorithm} {c.form}" for c in decision.choices]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    return f"{counts}; {'overlap across the step' if decision.overlap else 'no overlap'}"
