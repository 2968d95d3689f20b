"""How far ranks come apart in a round of local steps, beside how far they go together.

    drift = sqrt(mean of |delta - D|^2) / |D| = sqrt(mean of |delta|^2 / |D|^2 - 1)

delta is how far a rank went, D the mean of all. 0: all went the same way. sqrt(K - 1): K ranks went
in ways that have nothing in common, and their mean is as short as chance makes it. Forms that leave
something out change D, so their drift is about right only.

Each rank knows its own length. It tells it at the next exchange, with what ranks tell each other
there anyway, so drift costs no message and is known one round late.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from evener.comm.fragments import Fragment

UNKNOWN = -1.0
"""The squared length of a rank that made no exchange before this one."""
# Of the mean squared length: what is less is float32's rounding, and no way that ranks went.
_NOTHING = 1e-10


def of(squares: Sequence[float], together: float) -> float | None:
    """The drift of ranks that went `squares` (squared lengths), and `together` their mean.

    None where a rank does not know how far it went, or together they went nowhere.
    """
    mean = math.fsum(squares) / len(squares)
    if UNKNOWN in squares or not together > _NOTHING * mean:
        return None
    apart = mean / together - 1
    return math.sqrt(max(0.0, apart)) if math.isfinite(apart) else None


def lengths(fragments: Sequence[Fragment]) -> tuple[float, float]:
    """Squared lengths of the last exchange: how far this rank went, and all together."""
    went = together = 0.0
    for fragment in fragments:
        if fragment.went is None or fragment.together is None:
            return UNKNOWN, UNKNOWN
        went += float(fragment.went)
        together += float(fragment.together)
    return went, together


def to_bits(value: float) -> int:
    """A float64 as a whole number that a message of int64 carries."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def from_bits(bits: int) -> float:
    """What `to_bits` made a number of."""
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
