"""The stores of `evener.embedding` behind dynamic variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.embedding import Options, Store, forget, names
from evener.embedding.tensorflow import _library
from evener.errors import UsageError


def open_store(name: str, options: Mapping[str, Any]) -> Store:
    """The store `name`, made at need. UsageError where it is there with other options."""
    try:
        return Store(name, dict(options))
    except ValueError as error:
        raise UsageError(
            f"embedding {name!r}: {error}", "give it another name, or close() the one that is there"
        ) from None


def unused_name(name: str) -> str:
    """`name`, or with a number behind it where a store has it."""
    taken, number, found = set(names()), 0, name
    while found in taken or f"{found}/part_0" in taken:
        number += 1
        found = f"{name}_{number}"
    return found


def close(name: str) -> None:
    """Takes the name away; memory goes with the last user."""
    forget(name)


def use_optimizer(store: Store, optimizer: Mapping[str, Any]) -> Store:
    """The store with `optimizer` and fresh slots. UsageError where it took steps of another.

    Rows that were only looked up are kept.
    """
    wanted = Options.from_dict({**store.options.to_dict(), "optimizer": dict(optimizer)})
    if wanted.optimizer == store.options.optimizer:
        return store
    if store.stats()["updated"] > 0:
        raise UsageError(
            f"embedding {store.name!r} has taken steps of {store.options.optimizer}",
            f"train it on with that, or give it another name: {wanted.optimizer} has other slots",
        )
    rows = list(store.export())
    forget(store.name)
    fresh = Store(store.name, wanted)
    for part in rows:
        fresh.upsert(part.keys, part.values)
    _library.forget()
    return fresh
