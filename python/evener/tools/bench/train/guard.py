"""Proof that a column did its work: what must be equal, what must be near.

A column that skips the synchronisation would be the fastest of all. Two checks, both in every run:

* At the end the parameters of all ranks of a group are equal bit for bit. Each rank trains on data
  of its own, so this cannot happen by itself.
* The first update of the parameters, and what the next steps do together, are near DDP's (in a
  table without DDP: FSDP2's) from the same start and the same data. Forms with error feedback send
  their first step exactly, so only the later ones tell; what such a form has not sent yet, which it
  knows, is counted as applied. So each form must bring all of DDP's update: nothing that leaves out
  a part of it passes, least of all a column that does not update anything. Updates are far too
  large to send around, so each run keeps a count sketch of its updates (Charikar, Chen,
  Farach-Colton 2002: every entry is added to one of `SKETCH` sums with a random sign, the same in
  all runs). It is linear, and keeps L2 lengths and distances within a few per cent.

Of a model that FSDP2 shards no rank holds all parameters. There the first check is of the weights
that each rank gathers for its forward, in the column's own way.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence

SKETCH = 1024
# Steps after the first one that are compared: forms are planned within them.
LATER = 6


def encode(sums: Sequence[float]) -> str:
    """A sketch as text."""
    return base64.b64encode(struct.pack(f"<{len(sums)}f", *sums)).decode()


def decode(text: str) -> list[float]:
    """The inverse of `encode`. Raises ValueError where the text is no sketch."""
    raw = base64.b64decode(text, validate=True)
    if len(raw) % 4:
        raise ValueError("a sketch is a whole number of float32")
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))


def distance(update: str, reference: str) -> float:
    """Relative L2 distance of two sketched updates: |a - b| / |b|. Infinite where b is zero."""
    mine, theirs = decode(update), decode(reference)
    if len(mine) != len(theirs):
        raise ValueError(f"sketches of {len(mine)} and {len(theirs)} sums")
    length = math.hypot(*theirs)
    if not length or not math.isfinite(length):
        return math.inf
    return math.dist(mine, theirs) / length


def unequal(checksums: Sequence[str]) -> str | None:
    """What is wrong with the parameters of one group at the end, or None if all are equal."""
    kinds = sorted(set(checksums))
    if len(kinds) <= 1:
        return None
    first = checksums[0]
    others = [str(rank) for rank, checksum in enumerate(checksums) if checksum != first]
    return f"parameters of rank {', '.join(others)} differ from rank 0's at the end"
