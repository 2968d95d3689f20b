"""Where the rows of a rank are: the interface, and its plain form, the store in host memory."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from evener.embedding import Store


class Rows(Protocol):
    """The rows that this rank owns. Keys are int64 [n] on `device`, values float32 [n, dim]."""

    device: torch.device

    def read(self, keys: torch.Tensor, step: int) -> torch.Tensor:
        """Values for training: keys that admission lets in get a row. May repeat keys."""

    def peek(self, keys: torch.Tensor) -> torch.Tensor:
        """Values for inference: nothing is inserted or counted. May repeat keys."""

    def write(self, keys: torch.Tensor, gradients: torch.Tensor, step: int, lr: float) -> None:
        """One step of the optimizer. Raises with nothing changed where a gradient is not finite."""

    def prefetch(self, keys: torch.Tensor, step: int) -> None:
        """A `read` of exactly these keys comes next: begin to fetch them."""

    def evicts(self, step: int) -> bool:
        """Whether eviction runs by itself with this step."""

    def flush(self) -> None:
        """Bring the store up to date with all that was written."""

    def forget(self) -> None:
        """Bring the store up to date, and keep no copy: its rows are about to be changed."""

    def reload(self) -> None:
        """The store has other rows and another count of steps now."""


class HostRows:
    """The store itself; tensors of a GPU go through pinned memory."""

    def __init__(self, store: Store, device: torch.device) -> None:
        self.store, self.device = store, device
        self._every = interval(as_options(store.options))

    def _room(self, n: int) -> torch.Tensor:
        pinned = self.device.type == "cuda"
        return torch.empty(n, self.store.dim, dtype=torch.float32, pin_memory=pinned)

    def read(self, keys: torch.Tensor, step: int) -> torch.Tensor:
        values = self._room(keys.numel())
        self.store.lookup(keys.cpu(), step, out=values)
        return values.to(self.device, non_blocking=True)

    def peek(self, keys: torch.Tensor) -> torch.Tensor:
        values = self._room(keys.numel())
        self.store.lookup_infer(keys.cpu(), out=values)
        return values.to(self.device, non_blocking=True)

    def write(self, keys: torch.Tensor, gradients: torch.Tensor, step: int, lr: float) -> None:
        self.store.apply(keys.cpu(), gradients.cpu(), step, lr=lr)

    def prefetch(self, keys: torch.Tensor, step: int) -> None:
        """Nothing to do: the rows are where they are."""

    def evicts(self, step: int) -> bool:
        return due(self._every, step)

    def flush(self) -> None:
        """The store is the rows."""

    def forget(self) -> None:
        """No copy is kept."""

    def reload(self) -> None:
        """Nothing is remembered."""


def interval(options: dict[str, Any]) -> int:
    """Eviction runs by itself after this many steps; 0: never."""
    return int(options["evict_every"]) if options["eviction"]["kind"] != "none" else 0


def due(every: int, step: int) -> bool:
    """As the store has it."""
    return bool(every) and step // every > (step - 1) // every


def as_options(options: Any) -> dict[str, Any]:
    """A store's options as plain values."""
    import json

    return dict(json.loads(options.to_json()))
