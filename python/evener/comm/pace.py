"""How many steps a round of local steps has, from what a step and an exchange take.

Ranks may stand still for `SHARE` of the time. Where rounds of `LEAST` steps keep to that, they are
taken. Else the exchange runs behind as many steps as it takes, and a margin, because it shares the
processor with them; a round has four times as many, since a late average costs more the longer it
is late (docs/benchmarks/accuracy.md). DiLoCo's rounds have 500 steps (arXiv 2311.08105), so beyond
`MOST` ranks wait.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST, MOST = 16, 512
SHARE = 0.05
MARGIN = 1.25
PART = 4  # of a round is overlapped


@dataclass(frozen=True)
class Pace:
    """Steps per round, and behind how many of them an exchange runs."""

    every: int
    overlap: int

    def share(self, step: float, exchange: float) -> float:
        """The share of time in which ranks stand still. `step` and `exchange` are in one unit."""
        waits = max(0.0, exchange - self.overlap * step)
        return waits / (waits + self.every * step)


def choose(step: float, exchange: float) -> Pace:
    """The shortest round for a step and an exchange of these times, above 0, in any unit."""
    waiting = Pace(LEAST, 0)
    if waiting.share(step, exchange) <= SHARE:
        return waiting
    overlap = min(math.ceil(MARGIN * exchange / step), MOST // PART)
    return Pace(max(LEAST, PART * overlap), overlap)
