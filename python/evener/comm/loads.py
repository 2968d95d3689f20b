"""Hears of `load_state_dict`: who keeps something of a training must know that another one came."""

from __future__ import annotations

import weakref
from typing import Any, Protocol


class Loaded(Protocol):
    """What keeps something beside a model's weights: weights of its own (`rounds.Rounds`,
    `hub.rounds.NodeRounds`) or gradients (`shards.FormedReduceScatter`)."""

    def will_load(self) -> None:
        """Other weights are about to be loaded into the model."""


class LoadHook:
    """Tells `rounds` of a `load_state_dict`. Copies of a module, by any way, have an idle one."""

    def __init__(self, rounds: Loaded | None = None) -> None:
        self._rounds = None if rounds is None else weakref.ref(rounds)

    def __call__(self, *_: Any) -> None:
        rounds = None if self._rounds is None else self._rounds()
        if rounds is not None:
            rounds.will_load()

    def __reduce__(self) -> Any:
        return LoadHook, ()
