"""The stores of `evener.embedding` behind dynamic variables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evener.embedding import Options, Sgd, Store, forget, names
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


def find(name: str) -> Store:
    """The store `name`, with the options that it has now."""
    return Store.find(name)


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
    _library.forget(name)


def thaw(name: str) -> None:
    """Lets the store `name`, which came out of a SavedModel, be trained on.

    Raises UsageError where there is none.
    """
    if name not in names():
        raise UsageError(f"there is no embedding {name!r}", f"use one of {sorted(names())}")
    Store.find(name).frozen = False


def use_optimizer(store: Store, optimizer: Mapping[str, Any]) -> None:
    """The store does this step from now on. UsageError where it took steps of another kind."""
    plain = {**store.options.to_dict(), "optimizer": dict(optimizer)}
    wanted = Options.from_dict(plain).optimizer
    if wanted == store.options.optimizer:
        return
    try:
        if store.stats()["steps"] == 0:
            # Other numbers of the same kind would leave the slots of rows as they started.
            store.set_optimizer(Sgd())
        store.set_optimizer(wanted)
    except ValueError as error:
        raise UsageError(
            f"embedding {store.name!r}: {error}", "train it on with that, or give it another name"
        ) from None


def _file(store: Store, folder: Path) -> Path:
    return folder / f"{store.name.replace('/', '.')}.evs"


def save(store: Store, folder: Path) -> None:
    """Writes the store to its file in `folder`."""
    store.save(_file(store, folder))


def restore(store: Store, folder: Path) -> None:
    """Reads it back. UsageError, with nothing changed, where the file does not fit."""
    try:
        store.restore(_file(store, folder))
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"embedding {store.name!r}: {error.args[0] if error.args else error}",
            "give a folder of save_to_file_system, for a table of this name, dim and optimizer",
        ) from None
