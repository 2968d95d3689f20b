"""The answer: which ranks, and in which way they hold the others up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

Kind = Literal[
    "missing",
    "mismatch",
    "size",
    "dtype",
    "behind",
    "ahead",
    "silent",
    "inside",
    "cycle",
    "undecided",
]
Value = TypeVar("Value", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Culprit:
    """One answer. `ranks` are the culprits, empty where nobody is named."""

    kind: Kind
    ranks: tuple[int, ...]
    waiting: tuple[int, ...]
    """The ranks that wait for them."""
    op: str = ""
    seq: int = -1
    group: str = ""
    theirs: str = ""
    """What the culprits ran or brought, for a mismatch."""
    others: str = ""
    """What the others ran or brought."""
    frame: str = ""
    """The line of the program from which the others wait."""
    own_frame: str = ""
    """The line of the program where the culprits ran something else."""
    where: tuple[int, ...] = ()
    sure: bool = True
    """False where it is inferred from silence."""
    source: str = ""
    waited_ms: int = -1
    among: tuple[int, ...] = ()
    """Ranks of which nothing was read, where that keeps it undecided."""


def minority(values: Mapping[int, Value]) -> tuple[tuple[int, ...], Value, Value] | None:
    """The ranks whose value is not the majority's, their value and the majority's.

    None where all are equal, and where no value has more than half of the ranks.
    """
    counts = Counter(values.values())
    if len(counts) < 2:
        return None
    (common, most), *_ = counts.most_common(1)
    if most * 2 <= len(values):
        return None
    odd = tuple(sorted(rank for rank, value in values.items() if value != common))
    return odd, values[odd[0]], common


def split(values: Mapping[int, Value]) -> bool:
    """Whether values differ and no majority says which is the odd one."""
    return len(set(values.values())) > 1 and minority(values) is None


def ordered(ranks: Iterable[int]) -> tuple[int, ...]:
    """Ranks, each once, in order."""
    return tuple(sorted(set(ranks)))
