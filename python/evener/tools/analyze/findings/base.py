"""The registry of checks and the shape of a finding."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from evener.tools.analyze.picture import Confidence, Picture

Severity = Literal["problem", "warning", "note"]
_ORDER = ("problem", "warning", "note")
# The order in which they are shown where they are equally severe: causes before symptoms.
_SUBJECTS = (
    "devices",
    "deaths",
    "live",
    "lost",
    "hangs",
    "meeting",
    "stragglers",
    "run",
    "causes",
    "correctness",
    "fabric",
    "network",
    "local",
    "rings",
    "settings",
    "host",
    "tables",
    "bandwidth",
    "share",
    "coverage",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found. `id` is stable; text may change."""

    id: str
    severity: Severity
    """`problem`: costs bandwidth or correctness; `warning`: probably does; `note`: good to know."""
    title: str
    detail: str
    confidence: Confidence
    evidence: tuple[int, ...] = ()
    """Packed places, see Run.cite."""
    do: str = ""
    command: str = ""
    expect: str = ""
    root: int = 0
    """How near this is to the reason that the run hung or failed; 0 for what cannot be one."""


# What can be a reason, from the root to what only follows from it.
DEVICE, KILLED, LIBRARY, RAISED, MEETING, CRASHED, NAMED, UNDECIDED, ENDED, FOLLOWS = range(
    100, 0, -10
)
CONTEXT = UNDECIDED + 5
"""What is wrong around a hang of which no rank is known: a reason, or only beside it."""


Check = Callable[[Picture], Iterable[Finding]]
_CHECKS: list[Check] = []
_MEANINGS: dict[str, str] = {}


def check(meanings: dict[str, str]) -> Callable[[Check], Check]:
    """Register a check and what the ids of its findings mean, in a few words each.

    It runs on every picture, and must not raise on an empty one.
    """

    def register(function: Check) -> Check:
        _CHECKS.append(function)
        _MEANINGS.update(meanings)
        return function

    return register


def _load() -> None:
    for subject in _SUBJECTS:
        importlib.import_module(f"evener.tools.analyze.findings.{subject}")


def catalogue() -> dict[str, str]:
    """Every id that a finding can have, and what it means."""
    _load()
    return dict(_MEANINGS)


def markdown() -> str:
    """The table of all findings for the documentation."""
    rows = [f"| `{id}` | {meaning} |" for id, meaning in catalogue().items()]
    return "\n".join(["| id | what |", "|---|---|", *rows]) + "\n"


def run_checks(picture: Picture) -> list[Finding]:
    """All findings, worst first, otherwise in the order of subjects.

    What can be the reason of a run that hung or failed comes first, from the root on. What costs
    speed cannot be one, and comes after it.
    """
    _load()
    found = [finding for one in _CHECKS for finding in one(picture)]
    found = [replace(one, evidence=tuple(dict.fromkeys(one.evidence))) for one in found]
    found.sort(key=lambda finding: _ORDER.index(finding.severity))
    if any(finding.root > FOLLOWS for finding in found):
        found.sort(key=lambda finding: -finding.root)
    return found
