"""What a module and an optimizer share: one table, its place, and its gradients between them.

Forward asks for rows (`lookups.look`). Backward gives gradients back to the table; they go to their
owners when the whole backward pass is done, and wait there (`Waiting`) until the step. So what
holds for a dense parameter holds here: several backward passes add up, gradients can be clipped and
unscaled before the step, and a step that is skipped leaves nothing changed. `fused` tables step at
the end of each backward pass instead.

A name is one table: modules of one name share it, and a step is one step with the sum of their
gradients, as for a weight that two modules share.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from evener.base import settings
from evener.base.records import StatsFile
from evener.embedding import Options, Store
from evener.embedding.torch.cache import CachedRows
from evener.embedding.torch.forms import require
from evener.embedding.torch.rows import HostRows, Rows, as_options
from evener.embedding.torch.sharded import Ranks, Sharded
from evener.embedding.torch.traffic import Traffic
from evener.embedding.torch.waiting import Waiting
from evener.errors import UsageError

_NUMBERS = itertools.count()


@dataclass
class Ahead:
    """The batch that comes next: the tensor that was given, and what is known of it so far."""

    given: torch.Tensor
    version: int
    step: int
    future: Any = None
    keys: torch.Tensor | None = None
    inverse: torch.Tensor | None = None
    way: Any = None


_TABLES: weakref.WeakValueDictionary[str, Table] = weakref.WeakValueDictionary()


class Table:
    """One store as a torch program sees it. `step` is the number of the step that comes next."""

    @staticmethod
    def _there(name: str, store: Store) -> Table | None:
        """The table that modules of this name have, where it is of this very store."""
        there = _TABLES.get(name)
        return there if there is not None and there._store.is_(store) else None

    @classmethod
    def named(cls, options: Options, name: str | None, **how: Any) -> Table:
        """The table of this name, made if no module has it.

        Raises UsageError where a module has it and wants something else.
        """
        number = next(_NUMBERS)
        if name is None:
            return cls(number, Store(f"embedding-{number}", options), **how)
        store = Store(name, options)
        there = cls._there(name, store)
        if there is not None and there.made != how:
            gc.collect()  # a module that nobody has is no module
            there = cls._there(name, store)
        if there is None:
            there = _TABLES[name] = cls(number, store, **how)
        if there.made == how:
            return there
        other = [key for key, value in how.items() if there.made[key] != value]
        raise UsageError(
            f"embedding {name!r} is there already with other "
            + ", ".join(f"{key}={there.made[key]!r}" for key in other),
            "give both modules the same arguments, or names of their own",
        )

    def __init__(
        self,
        number: int,
        store: Store,
        *,
        device: torch.device,
        cache_rows: int,
        fused: bool,
        shard: bool,
        group: dist.ProcessGroup | None,
        wire: str,
        gradient_wire: str,
        average: bool,
    ) -> None:
        self.number, self.name = number, store.name
        self.made = {
            "device": device,
            "cache_rows": cache_rows,
            "fused": fused,
            "shard": shard,
            "group": group,
            "wire": wire,
            "gradient_wire": gradient_wire,
            "average": average,
        }
        self._store = store
        self.options = as_options(store.options)
        self.dim, self.lr = int(self._store.dim), float(self.options["optimizer"]["lr"])
        self.fused, self.average = fused, average
        self._wants_ranks, self._group = shard, group
        self._forms = (require(wire, "wire"), require(gradient_wire, "gradient_wire"))
        self.traffic = Traffic()
        self.device = device
        self.rows: Rows = HostRows(self._store, device)
        if cache_rows:
            self.rows = CachedRows(self._store, device, cache_rows)
        self.step = self.next_step()
        self._record: StatsFile | None = None
        self.waiting = Waiting(self.dim, device)
        # A rank whose own gradients are finite learns here that another's are not.
        self.overflow = Waiting(1, device)
        self.optimizer: Any = None
        self.local: list[tuple[Any, torch.Tensor | None]] = []  # gradients of this rank
        self.exchanges = True
        self._sharded: Sharded | None = None
        self.home: int | None = None  # the owner of all rows, where they are not spread
        self.together: list[Any] = []  # lookups of a resident collection, not exchanged yet
        self._ahead: Ahead | None = None
        self._looked = False  # in training, since the last step

    def next_step(self) -> int:
        """The number of the first step after those that the store has done; it begins with 0."""
        done = self._store.stats()
        return int(done["step"]) + 1 if done["steps"] else 0

    @property
    def store(self) -> Store:
        """The rows that this rank owns, up to date."""
        self.rows.flush()
        return self._store

    @property
    def sharded(self) -> Sharded | None:
        """The ranks that share this table; None where it lies on this one alone.

        The first call is collective where torch.distributed has a group of several ranks.
        """
        if self._sharded is None and self._wants_ranks and dist.is_initialized():
            size = dist.get_world_size(self._group)
            if size > 1:
                ranks = Ranks.of(self.device, self._group)
                self._sharded = Sharded(
                    self.rows, self.dim, self._forms, self.traffic, ranks, self.home
                )
        return self._sharded

    def reside(self, rows: Rows) -> None:
        """From now on rows are these. Nothing was looked up yet."""
        self.rows = rows
        if self._sharded is not None:
            self._sharded.rows = rows

    @property
    def repeats(self) -> bool:
        """Whether `look` may be asked for a key twice: the store does not mind, the rest does."""
        return (
            self.device.type == "cpu" and isinstance(self.rows, HostRows) and self.sharded is None
        )

    def begin(self) -> None:
        """A lookup in training comes. Raises UsageError where gradients wait for no optimizer."""
        if not self.fused and self.waiting.pieces and not self._stepped():
            raise UsageError(
                f"gradients of embedding {self.name!r} wait, and no optimizer takes them",
                "make a DynamicOptimizer(model) and call its step(), or give fused=True",
            )
        self._looked = True

    def _stepped(self) -> bool:
        return self.optimizer is not None and self.optimizer() is not None

    def ahead_of(self, keys: torch.Tensor) -> Any:
        """The way of these keys, where they were prefetched."""
        ahead, self._ahead = self._ahead, None
        return ahead.way if ahead is not None and ahead.keys is keys else None

    def unique(self, given: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [u], once each and ascending, and the place of each of `ids` [n] among them.

        `given` is the tensor that `ids` was made of: what was prefetched is known by it.
        """
        ahead = self._ahead
        if ahead is not None and ahead.given is given and ahead.version == given._version:
            if ahead.future is not None and isinstance(self.rows, CachedRows):
                return self.rows.wait(ahead.future)
            assert ahead.keys is not None and ahead.inverse is not None
            return ahead.keys, ahead.inverse
        unique, inverse = torch.unique(ids, return_inverse=True)
        return unique, inverse

    def prefetch(self, given: torch.Tensor, ids: torch.Tensor) -> Ahead | None:
        """The next lookup in training is of `given`, whose ids are `ids`.

        Gives what is known of it, whose keys the caller sends ahead where the table is sharded;
        None where nothing can be done ahead.
        """
        sharded = self.sharded
        if self.repeats:
            return None
        if self._looked and self.rows.evicts(self.step):
            return None  # rows that are new now would count as the newest when this step evicts
        ahead = Ahead(given, given._version, self.step + self._looked)
        if sharded is None and isinstance(self.rows, CachedRows):
            ahead.future = self.rows.prefetch_ids(ids, ahead.step)
        else:
            ahead.keys, ahead.inverse = torch.unique(ids, return_inverse=True)
            if sharded is None:
                self.rows.prefetch(ahead.keys, ahead.step)
        self._ahead = ahead
        return ahead

    def keep(self, way: Any, gradients: torch.Tensor | None) -> None:
        """Gradients [n, dim] of a lookup wait from here on; None: of no use on this rank."""
        if self.sharded is not None:
            self.local.append((way, gradients))
        elif gradients is not None:
            self.waiting.receive(way, gradients)

    def flag(self, bad: bool) -> None:
        """Gradients came whose sum is not finite (`bad`) on some rank, or is on all."""
        flag = torch.full((1, 1), float("nan") if bad else 0.0, device=self.device)
        self.overflow.receive(torch.zeros(1, dtype=torch.int64, device=self.device), flag)

    @contextmanager
    def no_exchange(self) -> Iterator[None]:
        """Backward passes inside keep gradients on their rank; the next one outside brings all."""
        before, self.exchanges = self.exchanges, False
        try:
            yield
        finally:
            self.exchanges = before

    def check(self) -> None:
        """Raise UsageError where a gradient that waits is not finite. Nothing is changed."""
        for _, flag in self.overflow.pieces:
            if not bool(flag.isfinite().all()):
                raise UsageError(
                    f"a gradient of embedding {self.name!r} is not finite: nothing was changed",
                    "look for the loss that is not finite, or use torch.amp.GradScaler",
                )
        for keys, gradients in self.waiting.pieces:
            wrong = ~gradients.isfinite().all(1)
            if bool(wrong.any()):
                key = int(keys[wrong][0])
                raise UsageError(
                    f"the gradient of key {key} of embedding {self.name!r} is not finite: "
                    "nothing was changed",
                    "look for the loss that is not finite, or use torch.amp.GradScaler",
                )

    def apply(self, lr: float) -> None:
        """One step with all that waits."""
        pieces = self.waiting.pieces
        # One piece goes as it is: keys that come twice in it are only where the store sums them up.
        if len(pieces) == 1:
            keys, gradients = pieces[0]
        elif pieces:
            keys, gradients = self.waiting.merged()
        else:
            keys = torch.empty(0, dtype=torch.int64, device=self.device)
            gradients = torch.empty(0, self.dim, device=self.device)
        self.rows.write(keys, gradients, self.step, lr)
        self.stepped()

    def stepped(self) -> None:
        """A step was done with all that waited."""
        self._looked = False
        self.discard()
        self._write_record()

    def _write_record(self) -> None:
        """What this table holds, for `evener embedding stats`: where EVENER_STATS_DIR asks."""
        if self._record is None:
            if not settings.EVENER_STATS_DIR.get():
                return
            rank = dist.get_rank() if dist.is_initialized() else 0
            self._record = StatsFile.open("embedding", rank)
        if self._record is None or not self._record.due:
            return
        table = {"name": self.name, "dim": self.dim, "store": self._store.stats()}
        if isinstance(self.rows, CachedRows):
            table["cache"] = self.rows.stats.to_json()
        if self._sharded is not None:
            table["traffic"] = self.traffic.to_json()
        self._record.write({"tables": [table]})

    def discard(self) -> None:
        """Forget the gradients that wait."""
        self.waiting.pieces, self.overflow.pieces, self.local = [], [], []
        self.together = []

    def evict(self) -> int:
        """Apply the eviction policy now; how many rows of this rank went."""
        self.rows.forget()
        return int(self._store.evict(self.step))
