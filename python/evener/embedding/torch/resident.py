"""Tables of a known size whose rows all lie on their device, whole: values and optimizer's slots.

A row is found by its number, so nothing is searched, fetched or evicted. Tables of one dim and one
optimizer lie one behind another in an `Arena`, and are stepped together. The store has the rows
too: it begins them, and gets those that changed before a checkpoint or a delta reads it.
The step is the store's arithmetic (`updates`), as in a cache of hot rows, on a GPU in one kernel
(`kernels`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from evener.embedding import Store, slots
from evener.embedding.torch import kernels, updates
from evener.embedding.torch.rows import as_options
from evener.errors import UsageError

if TYPE_CHECKING:
    from evener.embedding.torch.table import Table

_CHUNK = 1 << 18
Piece = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Pending:
    """Gradients [n, dim] of rows `places` of an arena, and the piece of each table in them."""

    places: torch.Tensor
    sums: torch.Tensor
    pieces: list[tuple[Table, Piece]]
    finite: int = -1  # the version of `sums` that is known to be finite

    def found_finite(self) -> None:
        """All of `sums` is finite, until it is changed."""
        self.finite = self.sums._version

    @property
    def whole(self) -> bool:
        """Whether this is all that waits in its tables; what was changed in place counts."""
        return all(
            len(table.waiting.pieces) == 1 and table.waiting.pieces[0] is piece
            for table, piece in self.pieces
        )


class Arena:
    """Rows of several tables of one device, dim and optimizer; `counts` of each."""

    def __init__(
        self, stores: Sequence[Store], counts: Sequence[int], device: torch.device
    ) -> None:
        self.dim, self.device = stores[0].dim, device
        total, extra = sum(counts), slots(stores[0].options)
        self.weight = torch.zeros(total, self.dim, device=device)
        self.slots = torch.zeros(total, extra, device=device)
        self.version = torch.zeros(total, dtype=torch.int64, device=device)
        self.frequency = torch.zeros(total, dtype=torch.int64, device=device)
        self.held = updates.Held(
            as_options(stores[0].options), self.weight, self.slots, self.version, self.frequency
        )
        self.pending: Pending | None = None
        self.rows: list[ResidentRows] = []
        start = 0
        for store, count in zip(stores, counts, strict=True):
            self.rows.append(ResidentRows(self, store, start, count))
            start += count
        self.starts = torch.tensor([rows.start for rows in self.rows]).to(device)

    def ready(self) -> None:
        """Every table's rows are here, and are those of its store."""
        for rows in self.rows:
            rows.load()

    def step(
        self, places: torch.Tensor, gradients: torch.Tensor, step: int, t: int, lr: float
    ) -> None:
        """Step rows `places`, once each, with finite gradients [n, dim]. `t`: which step of all."""
        kernels.step(self.held, places, gradients, step, t, updates.rounded(lr))


class ResidentRows:
    """`Rows` of one table of an arena: keys from 0 to `count` - 1."""

    def __init__(self, arena: Arena, store: Store, start: int, count: int) -> None:
        self.arena, self.store, self.device = arena, store, arena.device
        self.start, self.count = start, count
        self._there = False
        self._clean = self._last = 0  # rows of a version after `_clean` changed since a flush
        self._owed: list[tuple[int, float]] = []  # steps that the store has not counted yet
        self.t = 0

    def _part(self, of: torch.Tensor) -> torch.Tensor:
        return of[self.start : self.start + self.count]

    def load(self) -> None:
        """Take the rows from the store, which begins those that it has not."""
        if self._there:
            return
        done, arena = self.store.stats(), self.arena
        step = int(done["step"]) + 1 if done["steps"] else 0
        self.t, self._clean, self._last = int(done["steps"]), step - 1, step - 1
        for start in range(0, self.count, _CHUNK):
            keys = torch.arange(start, min(start + _CHUNK, self.count))
            rows, *counts, _ = self.store.take_rows(keys, step)
            to = slice(start, start + len(keys))
            whole = torch.from_numpy(rows)
            self._part(arena.weight)[to] = whole[:, : arena.dim].to(self.device)
            self._part(arena.slots)[to] = whole[:, arena.dim :].to(self.device)
            for of, part in zip((arena.frequency, arena.version), counts, strict=True):
                self._part(of)[to] = torch.from_numpy(part).to(self.device)
        self._there = True

    def read(self, keys: torch.Tensor, step: int) -> torch.Tensor:
        return self.peek(keys)

    def peek(self, keys: torch.Tensor) -> torch.Tensor:
        self.load()
        self._known(keys)
        return self._part(self.arena.weight)[keys]

    def _known(self, keys: torch.Tensor) -> None:
        if bool(((keys < 0) | (keys >= self.count)).any()):
            raise UsageError(
                f"embedding {self.store.name!r} has rows 0 to {self.count - 1} on its device",
                "give ids in that range, or make the collection without resident=True",
            )

    def write(self, keys: torch.Tensor, gradients: torch.Tensor, step: int, lr: float) -> None:
        self.load()
        if keys.numel():
            self._known(keys)
            if not bool(gradients.isfinite().all()):
                raise UsageError(
                    f"a gradient of embedding {self.store.name!r} is not finite: nothing was "
                    "changed",
                    "look for the loss that is not finite, or use torch.amp.GradScaler",
                )
            self.arena.step(keys + self.start, gradients, step, self.t + 1, lr)
        self.count_step(step, lr)

    def count_step(self, step: int, lr: float) -> None:
        """A step was done here; the store counts it when it is brought up to date."""
        self._owed.append((step, lr))
        self._last = step
        self.t += 1

    def prefetch(self, keys: torch.Tensor, step: int) -> None:
        """Nothing to do: the rows are here."""

    def evicts(self, step: int) -> bool:
        return False

    def flush(self) -> None:
        if not self._there:
            return
        nothing = torch.empty(0, dtype=torch.int64)
        owed, self._owed = self._owed, []
        for step, lr in owed:
            self.store.apply(nothing, torch.empty(0, self.arena.dim), step, lr=lr)
        arena = self.arena
        version = self._part(arena.version)
        changed = torch.nonzero(version > self._clean)[:, 0]
        for keys in changed.split(_CHUNK):
            rows = torch.cat([self._part(of)[keys] for of in (arena.weight, arena.slots)], 1)
            counts = [self._part(of)[keys].cpu() for of in (arena.frequency, arena.version)]
            self.store.put_rows(keys.cpu(), rows.cpu(), *counts)
        self._clean = self._last

    def forget(self) -> None:
        self.flush()
        self._there = False

    def reload(self) -> None:
        """The store was restored: begin with what it has now."""
        self._there, self._owed = False, []
