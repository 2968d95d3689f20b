"""An optimizer's `state`, while updates that change it may be on their way.

A program that reads or edits it after `step()` (restarts of moments, pruning, what is logged) must
find the step in it. So it is a dict that tells of every use but those of the optimizer's own step.
Whoever was given a part of it may have kept that: then steps are not deferred until it is gone.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from evener.comm import holders

_PLAIN = defaultdict


class Watched(defaultdict[Any, Any]):
    """The state itself, not a copy; `told` is called before each use by others."""

    told: Callable[[], None] | None = None

    def __copy__(self) -> Any:
        return self.copy()

    def copy(self) -> Any:
        """A plain one, as a copy or a pickle of the optimizer has it."""
        _tell(self)
        return _PLAIN(self.default_factory, _PLAIN.items(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.copy().__reduce_ex__(protocol)


def _tell(state: Watched) -> None:
    if state.told is not None:
        state.told()


def _telling(name: str) -> Any:
    inner = getattr(_PLAIN, name)

    def method(self: Watched, *args: Any, **kwargs: Any) -> Any:
        _tell(self)
        return inner(self, *args, **kwargs)

    method.__name__ = name
    return method


# `__iter__` makes `dict(state)` and `{**state}` come here too.
for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__reversed__"),
    *("__len__", "__eq__", "__ne__", "__or__", "__ior__", "__ror__", "__repr__", "get", "items"),
    *("keys", "values", "pop", "popitem", "setdefault", "update", "clear"),
):
    setattr(Watched, _name, _telling(_name))


class StateWatch:
    """Watches one optimizer: calls `used` before anybody but its own steps uses its state."""

    def __init__(self, optimizer: torch.optim.Optimizer, used: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._used = weakref.WeakMethod(used)
        self._own = 0
        self._state: Watched | None = None
        # Whether others may have been given a part of it.
        self._given = True

    def _told(self) -> None:
        if self._own:
            return
        self._given = True
        if (used := self._used()) is not None:
            used()

    def given(self) -> None:
        """Others are given parts of it now, as by `state_dict()`."""
        self._given = True

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """While the optimizer itself steps."""
        self._own += 1
        try:
            yield
        finally:
            self._own -= 1

    @contextlib.contextmanager
    def of_the_step(self) -> Iterator[None]:
        """The same for an update that was deferred: on the state that there was at `step()`.

        The program may have replaced the optimizer's state meanwhile.
        """
        optimizer, state = self._optimizer, self._state
        now = optimizer.__dict__["state"]
        if now is not state:
            optimizer.__dict__["state"] = state
        try:
            with self.own():
                yield
        finally:
            if now is not state:
                optimizer.__dict__["state"] = now

    def seen(self) -> str:
        """Who might see this step's change of the state while it is on its way; or nothing."""
        with self.own():
            if self._optimizer.__dict__.get("state") is not self._state and not self._take():
                return "optimizer.state is kept by the program"
            if self._given and self._kept():
                return "parts of optimizer.state are kept by the program"
            self._given = False
            return ""

    def _take(self) -> bool:
        """Watch the state that the optimizer has now; not where others hold it."""
        found = self._optimizer.__dict__.get("state")
        if type(found) is not _PLAIN or sys.getrefcount(found) > _alone():
            return False
        watched = Watched(found.default_factory, found)
        told = weakref.WeakMethod(self._told)
        watched.told = lambda: None if (call := told()) is None else call()
        self._optimizer.__dict__["state"] = self._state = watched
        self._given = True
        return True

    def _kept(self) -> bool:
        assert self._state is not None
        alone = _alone_within()
        for values in _PLAIN.values(self._state):
            if not isinstance(values, dict) or sys.getrefcount(values) > alone:
                return True
            if holders.values_are_kept(values):
                return True
        return False

    def close(self) -> None:
        """The optimizer's state is a plain dict again."""
        state = self._state
        self._state = None
        if state is None:
            return
        state.told = None
        there = self._optimizer.__dict__.get("state") is state
        if there:
            self._optimizer.__dict__["state"] = state.copy()


class _Has:
    def __init__(self) -> None:
        self.state: defaultdict[Any, Any] = _PLAIN(dict)


def _alone() -> int:
    has = _Has()
    found = has.__dict__.get("state")
    return sys.getrefcount(found)


def _alone_within() -> int:
    found = {"one": {"two": 1}}
    for values in found.values():
        return sys.getrefcount(values)
    raise AssertionError
