"""What a rank that has joined must do beside the negotiation: the others' optimizer steps.

`hvd.join()` says that a rank has no more data; the others train on, and it contributes zeros. An
all-reduce that is negotiated brings the rank that has joined along by itself. The gradients of
`DistributedOptimizer` are not negotiated (`evener.comm.reducer` issues its buckets while backward
runs, in an order that all ranks know), so their collectives would wait for it.

Nothing is said of steps as long as nobody has joined: each rank notes which optimizer began which
step, and that is all. When the first rank joins, the coordinator tells all (`joining`), with how
many steps that rank has begun. From then on the others announce every later step, those that they
have begun already included, as a barrier of its own name that nobody waits for; the ranks that have
joined learn of it when all others have announced it, and do the step with gradients of zeros.

A rank joins when the steps that it began are done, so that the steps that the first one has begun
all others have begun too.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from evener.errors import EvenerError

JOINING = "joining"
_PREFIX = "step "
# Ranks run ahead of each other by a few steps at most; this many are remembered.
_KEPT = 4096


class Stepper(Protocol):
    """An optimizer, as seen from here."""

    def step_for_others(self) -> None:
        """Take part in the others' step with gradients of zeros; nothing here changes."""


class Steps:
    """The steps of this process's optimizers in one world. Thread-safe."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        """announce(name): submit a barrier that nobody waits for."""
        self._announce = announce
        self._lock = threading.Lock()
        self._begun = 0
        self._last: collections.deque[int] = collections.deque(maxlen=_KEPT)
        self._announcing = self._joined = False

    def begins(self, optimizer: int) -> None:
        """Optimizer number `optimizer` begins a step: all its gradients are there."""
        with self._lock:
            self._begun += 1
            self._last.append(optimizer)
            if self._announcing:
                self._say(self._begun)

    def joins(self) -> int:
        """This rank joins, and announces nothing any more: how many steps it has begun."""
        with self._lock:
            self._joined = True
            return self._begun

    def all_joined(self) -> None:
        """Everybody has joined, and goes on."""
        with self._lock:
            self._announcing = self._joined = False

    def take(self, name: str, begun: list[int]) -> None:
        """A launch that nobody here asked for: `joining`, or a step of the others'.

        begun: how many steps the first rank that joined had begun.
        """
        if name == JOINING:
            with self._lock:
                if self._joined:
                    return
                self._announcing = True
                for number in range(begun[0] + 1, self._begun + 1):
                    self._say(number)
            return
        if not name.startswith(_PREFIX):
            return
        optimizer, number = map(int, name.removeprefix(_PREFIX).split())
        with self._lock:
            if number <= self._begun:
                return  # done here too, before this rank joined
            self._begun += 1
            self._last.append(optimizer)
        stepper = _OPTIMIZERS.get(optimizer)
        if stepper is None:
            raise RuntimeError(
                f"the other ranks step their DistributedOptimizer number {optimizer}, which this "
                "rank, that has joined, did not make or has dropped"
            )
        try:
            stepper.step_for_others()
        except EvenerError as error:
            raise RuntimeError(str(error)) from error

    def _say(self, number: int) -> None:
        self._announce(f"{_PREFIX}{self._last[number - self._begun - 1]} {number}")


_OPTIMIZERS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_COUNT = 0


def enlist(optimizer: Stepper) -> int:
    """A number for an optimizer: the same on all ranks, which make them in the same order."""
    global _COUNT
    _COUNT += 1
    _OPTIMIZERS[_COUNT] = optimizer
    return _COUNT
