"""A table whose rows lie on several ranks: who owns a key, and how parts become a table again.

A key belongs to the rank that its hash names, whatever the framework. So what ranks of one
framework or number have saved, a part of each, ranks of another read: each takes what it owns.
"""

from __future__ import annotations

import operator
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from evener.embedding.options import Options
from evener.embedding.store import Store, forget
from evener.errors import UsageError

# 2^64 / golden ratio and another odd number, as signed int64: multiplication wraps on every device.
_MIX = (-7046029254386353131, -4417276706812531889)


def hashes(keys: Any, right: Callable[[Any, int], Any] = operator.rshift) -> Any:
    """Numbers of at least 0, well spread, the same on every device and in every process.

    `keys`: an int64 array or tensor of numpy, torch or TensorFlow. `right`: its shift to the right.
    """
    mixed = keys * _MIX[0]
    mixed = (mixed ^ (right(mixed, 32) & 0xFFFFFFFF)) * _MIX[1]
    return right(mixed, 17) & 0x7FFFFFFF


@dataclass(frozen=True)
class Held:
    """What this rank holds of a table. `step`: which step comes next, or came last.

    `place` and `size`: of the owners, this one and how many; `owner`: the places of keys. `largest`
    gives the largest of all ranks' numbers, and is where ranks meet.
    """

    name: str
    options: dict[str, Any]
    step: int
    store: Store
    place: int
    size: int
    owner: Callable[[np.ndarray], np.ndarray]
    largest: Callable[[int], int]


def fits(name: str, mine: dict[str, Any], theirs: dict[str, Any], where: str) -> None:
    """Refuse rows that mean something else here."""
    for field in ("dim", "dtype", "keys"):
        if mine[field] != theirs[field]:
            raise UsageError(
                f"{where} has {field}={theirs[field]!r}, and embedding {name!r} has "
                f"{field}={mine[field]!r}",
                "make the module with the options that it was saved with",
            )
    if mine["optimizer"]["kind"] != theirs["optimizer"]["kind"]:
        raise UsageError(
            f"{where} has slots of {theirs['optimizer']['kind']}, and embedding {name!r} "
            f"steps {mine['optimizer']['kind']}",
            "make the module with the optimizer that it was saved with",
        )


def restore(held: Held, parts: Sequence[Path | bytes]) -> None:
    """Rows and counts of admission, which lie in a part for each rank that saved."""
    store = held.store
    if len(parts) == held.size:
        read(store, parts[held.place])
        return
    # The first part brings the count of steps with it, which is the same on all ranks.
    read(store, parts[0])
    keep_own(held, store)
    for each in parts[1:]:
        with aside(held, each) as other:
            for chunk in other.export_rows():
                store.put_rows(*chunk)
            store.set_counts(*other.counts())
            store.raise_counters(other.counters())


@contextmanager
def aside(held: Held, part: Path | bytes) -> Iterator[Store]:
    """A store with those rows and counts of `part` that this rank owns."""
    options = Options.from_dict({**held.options, "tier": None})
    store = Store(f"part-{uuid.uuid4().hex}", options)
    try:
        read(store, part)
        keep_own(held, store)
        yield store
    finally:
        forget(store.name)


def keep_own(held: Held, store: Store) -> None:
    """Take away what another rank owns."""
    if held.size == 1:
        return

    def other(keys: np.ndarray) -> np.ndarray:
        found: np.ndarray = held.owner(keys) != held.place
        return found

    for chunk in list(store.export_rows()):
        store.remove(chunk.keys[other(chunk.keys)])
    keys, counts = store.counts()
    store.set_counts(keys, np.where(other(keys), 0, counts))


def read(store: Store, part: Path | bytes) -> None:
    """Replace the rows of a store."""
    if isinstance(part, Path):
        store.restore(part)
    else:
        store.restore_bytes(part)
