"""The best of all sources: a report that names ranks, recorders, watchdogs, heartbeats."""

from __future__ import annotations

from dataclasses import replace

from evener.tools.analyze.evidence.records import GLOO, Evidence
from evener.tools.analyze.stuck.culprit import Culprit
from evener.tools.analyze.stuck.recorders import recorded
from evener.tools.analyze.stuck.waits import beaten, reported, told, waited

_UNNAMED = ("undecided", "inside")


def _victims(evidence: Evidence) -> set[int]:
    """Ranks that are known not to be missing: where Gloo is all that tells, all that spoke."""
    if all(wait.group == GLOO for wait in evidence.waits):
        return {raised.rank for raised in evidence.raised if raised.rank >= 0}
    return set()


def decide(evidence: Evidence, world: int) -> Culprit | None:
    """Who holds the job up, None where nothing says that it is held up."""
    answers = [
        answer
        for answer in (
            recorded(evidence.dumps),
            reported(evidence.desyncs, evidence.waits),
            told(evidence.waits, evidence.idle),
            waited(evidence.waits, world, set(evidence.ranks), _victims(evidence)),
            beaten(evidence.beats, world),
        )
        if answer is not None
    ]
    if not answers:
        return None
    best = next((a for a in answers if a.ranks and a.sure), None)
    best = best or next((a for a in answers if a.ranks), None)
    best = best or next((a for a in answers if a.kind not in _UNNAMED), answers[0])
    places = {dump.rank: dump.where for dump in evidence.dumps}
    if best.source == "flight recorders":
        shown = [*best.ranks, *best.waiting]
        best = replace(best, where=tuple(places[r] for r in shown if r in places)[:5])
    other = next((a for a in answers if a is not best and a.op and a.seq == best.seq), None)
    if not best.op and other is not None:
        best = replace(best, op=other.op)
    return best
