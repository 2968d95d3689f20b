"""The shape of a cause: an expression over the text of a warning, and what to do then."""

from __future__ import annotations

import re
from dataclasses import dataclass

from evener.tools.analyze.findings.base import LIBRARY, Severity
from evener.tools.analyze.picture import Confidence


@dataclass(frozen=True, slots=True)
class Cause:
    """One kind of warning and what to do about it."""

    id: str
    meaning: str
    """For the list of findings."""
    pattern: re.Pattern[str]
    title: str
    detail: str
    do: str
    command: str
    expect: str
    severity: Severity = "problem"
    confidence: Confidence = "inferred"
    unless: re.Pattern[str] | None = None
    """Another warning of the run that means that this one has another cause."""
    place: re.Pattern[str] | None = None
    """Where in NCCL's source a warning is from, for texts that say nothing themselves."""
    fabric: re.Pattern[str] | None = None
    """The place of a call on another GPU's memory: with multi-node NVLink it is another node's."""
    root: int = LIBRARY
