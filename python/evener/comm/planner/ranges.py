"""Which forms' range a model's gradients leave, and what is sent in their place.

FP16 holds nothing above 65,504 and little below 6e-8. A bucket whose gradients leave that goes in a
form of as many bytes and more range, whatever the costs say of the two.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from evener.comm import wires
from evener.comm.planner.choose import Decision
from evener.comm.planner.trial import Way
from evener.comm.reducer import Reducer

logger = logging.getLogger("evener.comm")


@dataclass(frozen=True)
class Ranges:
    """`beyond`: by bucket and form, the form that holds the gradients; where that is another."""

    beyond: dict[tuple[int, str], str] = field(default_factory=dict)

    def held(self, made: Decision) -> Decision:
        """The decision, with forms whose range holds the gradients."""
        if not self.beyond:
            return made
        choices = tuple(
            dataclasses.replace(choice, form=self.beyond.get((bucket, choice.form), choice.form))
            for bucket, choice in enumerate(made.choices)
        )
        return dataclasses.replace(made, choices=choices)

    def way(self, way: Way) -> Way:
        """The same for a way. One hook of torch's for all buckets: then that of widest range."""
        made = self.held(way.decision)
        moved = {choice.form for choice in made.choices}
        if way.decision.library and len(moved) > 1:
            last = max(moved, key=lambda form: wires.get(form).place)
            choices = tuple(dataclasses.replace(c, form=last) for c in made.choices)
            made = dataclasses.replace(made, choices=choices)
        return dataclasses.replace(way, decision=made)


def beyond(reducer: Reducer, forms: Sequence[str]) -> Ranges:
    """Look at the last step's gradients, which are the same on all ranks.

    Where they are gone already (a script that fills gradients with zeros), the guard will see.
    """
    found: dict[tuple[int, str], str] = {}
    for bucket in reducer.buckets:
        if bucket.by_rows:
            continue
        results = [bucket.buffer[s.offset : s.offset + s.numel] for s in bucket.slots]
        for form in forms:
            if (within := wires.within_range(form, results)) != form:
                found[bucket.index, form] = within
    if moved := {bucket for bucket, _ in found}:
        first = reducer.buckets[min(moved)]
        logger.info(
            "plan: in %d of %d buckets (%s ...) gradients leave FP16's range: they go in a form of "
            "as many bytes and more range",
            len(moved),
            len(reducer.buckets),
            reducer.names[first.slots[0].index],
        )
    return Ranges(found)
