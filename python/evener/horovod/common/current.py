"""The framework whose collectives this process has begun: what is common asks it.

`horovod.torch` and `horovod.tensorflow` have a state and an engine each, and say here which one it
is when `init` begins. Neither is imported for the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from evener.comm.world.ranks import Ranks
from evener.horovod.common.exceptions import NotInitializedError


class Set(Protocol):
    """A process set. ranks: global, in order. place: this process's, None where it is not in it."""

    ranks: list[int]
    place: int | None


class Engine(Protocol):
    """What runs the operations."""

    sets: dict[int, Any]

    def set_of(self, number: int | None) -> Any:
        """The process set of that number. ValueError where there is none."""

    def add_set(self, ranks: Sequence[int]) -> int:
        """Make a set, collectively; its number, or -1 where there is one of these ranks."""

    def remove_set(self, number: int) -> bool:
        """Forget a set, collectively; whether it was there."""


class State(Protocol):
    """The job as one framework sees it."""

    @property
    def initialized(self) -> bool:
        """Between `init` and `shutdown`."""

    @property
    def ranks(self) -> Ranks:
        """This process's place. Raises NotInitializedError."""

    @property
    def engine(self) -> Any:
        """Raises NotInitializedError."""

    def end_collectives(self) -> None:
        """End what is under way, after a rank has died; what is restored next waits for nothing."""


_state: State | None = None


def begin(state: State) -> None:
    """`init` begins with this framework."""
    global _state
    _state = state


def state() -> State:
    """Raises NotInitializedError where no framework has begun."""
    if _state is None:
        raise NotInitializedError
    return _state
