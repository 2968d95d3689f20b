"""Which GradScaler steps a model, without being told, and which steps it leaves out.

Residuals must follow the loss scale, and a script that turns top-k on by a variable never names its
scaler to Evener (`LIGHT_TOPK_ALLREDUCE=1`, Horovod's own interface has no place for one). But every
scaler is given the optimizer, in `step` or before it in `unscale_`: while it is watched, those
two methods of torch's class say so first. Nothing of what they do is changed, and when all who
watch have found theirs, the methods are torch's own again.

A scaler that finds an infinite gradient does not call the optimizer at all. Whoever counts steps as
the program sees them (`evener.comm.rounds`) is told of these by `Skips`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

_METHODS = ("step", "unscale_")
_WATCHERS: weakref.WeakSet[Watcher] = weakref.WeakSet()
_SKIPS: weakref.WeakSet[Skips] = weakref.WeakSet()
_ORIGINALS: dict[str, Callable[..., Any]] = {}


class Watcher:
    """Calls `found(scaler)` once, when a scaler that is enabled is given one of `parameters`."""

    def __init__(
        self, parameters: Iterable[torch.Tensor], found: Callable[[GradScaler], None]
    ) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._found = found
        _WATCHERS.add(self)
        _patch()

    def close(self) -> None:
        """Look no longer. May be called twice."""
        _WATCHERS.discard(self)
        _restore()

    def given(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> None:
        """`scaler` was given `optimizer`, before it does anything with it."""
        groups = optimizer.param_groups
        if any(id(p) in self._parameters for group in groups for p in group["params"]):
            self.close()
            self._found(scaler)


class Skips:
    """Calls `skipped(optimizer)` after a `step` of any scaler in which `taken(optimizer)`, the
    number of its steps, did not change; `taken` is None for the optimizers of others.
    """

    def __init__(
        self,
        taken: Callable[[torch.optim.Optimizer], int | None],
        skipped: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self.taken, self.skipped = taken, skipped
        _SKIPS.add(self)
        _patch()

    def close(self) -> None:
        """Look no longer. May be called twice."""
        _SKIPS.discard(self)
        _restore()


def _patch() -> None:
    if _ORIGINALS:
        return
    for name in _METHODS:
        _ORIGINALS[name] = getattr(GradScaler, name)
        setattr(GradScaler, name, _saying(_ORIGINALS[name]))


def _restore() -> None:
    if _WATCHERS or _SKIPS:
        return
    for name, original in _ORIGINALS.items():
        setattr(GradScaler, name, original)
    _ORIGINALS.clear()


def _saying(original: Callable[..., Any]) -> Callable[..., Any]:
    stepping = original.__name__ == "step"

    @functools.wraps(original)
    def method(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_enabled():
            for watcher in list(_WATCHERS):
                watcher.given(self, optimizer)
        before = [(one, one.taken(optimizer)) for one in _SKIPS] if stepping else []
        result = original(self, optimizer, *args, **kwargs)
        for one, taken in before:
            if taken is not None and one.taken(optimizer) == taken:
                one.skipped(optimizer)
        return result

    return method
