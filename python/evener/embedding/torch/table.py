"""What a module and an optimizer share: one table, its place, and its gradients between them.

Forward asks `Table.look` for rows. Backward gives gradients back to the table, which brings them to
their owners when the whole backward pass is done, and keeps them (`Waiting`) until the step. So
what holds for a dense parameter holds here: several backward passes add up, gradients can be
clipped and unscaled before the step, and a step that is skipped leaves nothing changed. `fused`
tables step at the end of each backward pass instead.

Backward passes end in one place (`_Pass`), where tables are taken in the order in which they were
made: so all ranks exchange in the same order, whatever order autograd takes. A pass that ends with
an error is forgotten with the gradients that it brought to `fused` tables.

A name is one table: modules of one name share it, and a step is one step with the sum of their
gradients, as for a weight that two modules share.
"""

from __future__ import annotations

import gc
import itertools
import threading
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
from evener.embedding.torch.sharded import Sharded
from evener.embedding.torch.traffic import Traffic
from evener.embedding.torch.waiting import Waiting
from evener.errors import UsageError

_NUMBERS = itertools.count()


@dataclass
class _Ahead:
    """The batch that comes next: the tensor that was given, and what is known of it so far."""

    given: torch.Tensor
    version: int
    future: Any = None
    keys: torch.Tensor | None = None
    inverse: torch.Tensor | None = None
    way: Any = None


class _Pass:
    """One backward pass: the tables that it touched, and what fused ones got in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[int, Table] = {}
        self._kept: list[tuple[Table, Any, torch.Tensor]] = []

    def add(self, table: Table, way: Any, gradients: torch.Tensor) -> None:
        with self._lock:
            self._tables[table.number] = table
            if table.fused:
                self._kept.append((table, way, gradients))
                return
        table.keep(way, gradients)

    def end(self) -> None:
        """All gradients are here. Collective if a table is sharded."""
        tables = [table for _, table in sorted(self._tables.items())]
        for table, way, gradients in self._kept:
            table.keep(way, gradients)
        ready = [table for table in tables if table._exchanges]
        for table in ready:
            table.exchange()
        fused = [table for table in ready if table.fused]
        try:
            # The store refuses a gradient that is not finite; with several tables or ranks nothing
            # may have been changed before it does.
            for table in fused:
                if len(fused) > 1 or table._sharded is not None:
                    table.check()
            for table in fused:
                if table.waiting.pieces:
                    table.apply(table.lr)
                table.step += 1
        finally:
            for table in fused:
                table.discard()


class _Backward:
    """The backward passes that run, by autograd's number.

    The callback at the end of a pass owns it. Autograd drops the callbacks of a pass that fails, so
    nothing of it is left for the next one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passes: weakref.WeakValueDictionary[int, _Pass] = weakref.WeakValueDictionary()

    def current(self) -> _Pass:
        number = torch._C._current_graph_task_id()
        with self._lock:
            found = self._passes.get(number)
            if found is None:
                found = self._passes[number] = _Pass()
                engine: Any = torch.autograd.Variable._execution_engine
                engine.queue_callback(found.end)
        return found


_BACKWARD = _Backward()
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
        self._local: list[tuple[Any, torch.Tensor]] = []
        self._exchanges = True
        self._sharded: Sharded | None = None
        self._ahead: _Ahead | None = None
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
                self._sharded = Sharded(self.rows, self.dim, self._forms, self.traffic, self._group)
        return self._sharded

    @property
    def repeats(self) -> bool:
        """Whether `look` may be asked for a key twice: the store does not mind, the rest does."""
        return (
            self.device.type == "cpu" and isinstance(self.rows, HostRows) and self.sharded is None
        )

    def look(self, keys: torch.Tensor, train: bool) -> torch.Tensor:
        """float32 [n, dim] for int64 keys [n]. `train`: with a gradient. Collective if sharded."""
        if not train:
            return self._fetch(keys, None)[0]
        if not self.fused and self.waiting.pieces and not self._stepped():
            raise UsageError(
                f"gradients of embedding {self.name!r} wait, and no optimizer takes them",
                "make a DynamicOptimizer(model) and call its step(), or give fused=True",
            )
        self._looked = True
        anchor = torch.empty(0, requires_grad=True)
        found: torch.Tensor = _Look.apply(anchor, self, keys)
        return found

    def _stepped(self) -> bool:
        return self.optimizer is not None and self.optimizer() is not None

    def _fetch(self, keys: torch.Tensor, step: int | None) -> tuple[torch.Tensor, Any]:
        sharded = self.sharded
        if sharded is None:
            values = self.rows.peek(keys) if step is None else self.rows.read(keys, step)
            return values, keys
        ahead, way = self._ahead, None
        if step is not None:
            self._ahead = None
            if ahead is not None and ahead.keys is keys:
                way = ahead.way
        if way is None:
            way = sharded.first.route(keys, step)
        return sharded.first.values(way), way

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

    def prefetch(self, given: torch.Tensor, ids: torch.Tensor) -> None:
        """The next lookup in training is of `given`, whose ids are `ids`. Collective if sharded."""
        sharded = self.sharded
        if self.repeats:
            return
        if self._looked and self.rows.evicts(self.step):
            return  # rows that are new now would count as the newest when this step evicts
        step = self.step + self._looked
        ahead = _Ahead(given, given._version)
        if sharded is None and isinstance(self.rows, CachedRows):
            ahead.future = self.rows.prefetch_ids(ids, step)
        else:
            ahead.keys, ahead.inverse = torch.unique(ids, return_inverse=True)
            if sharded is None:
                self.rows.prefetch(ahead.keys, step)
            else:
                bottom = ahead.way = sharded.first.route(ahead.keys, step)
                while not isinstance(bottom, tuple):
                    bottom = bottom.below
                self.rows.prefetch(bottom[0], step)
        self._ahead = ahead

    def keep(self, way: Any, gradients: torch.Tensor) -> None:
        """Gradients [n, dim] of a lookup wait from here on."""
        if self.sharded is None:
            self.waiting.receive(way, gradients)
        else:
            self._local.append((way, gradients))

    def exchange(self) -> None:
        """Bring gradients to the ranks that own the rows. Collective if sharded."""
        if self._sharded is None:
            return
        local, self._local = self._local, []
        finite = True
        for way, gradients in local:
            keys, sums = self._sharded.first.give(way, gradients)
            if self.average:
                sums = sums / self._sharded.size
            self.waiting.receive(keys, sums)
            finite = finite and bool(sums.isfinite().all())
        bad = self._sharded.largest(0.0 if finite else 1.0)
        flag = torch.full((1, 1), float("nan") if bad else 0.0, device=self.device)
        self.overflow.receive(torch.zeros(1, dtype=torch.int64, device=self.device), flag)

    @contextmanager
    def no_exchange(self) -> Iterator[None]:
        """Backward passes inside keep gradients on their rank; the next one outside brings all."""
        before, self._exchanges = self._exchanges, False
        try:
            yield
        finally:
            self._exchanges = before

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
        self.waiting.pieces, self.overflow.pieces, self._local = [], [], []

    def evict(self) -> int:
        """Apply the eviction policy now; how many rows of this rank went."""
        self.rows.forget()
        return int(self._store.evict(self.step))


class _Look(torch.autograd.Function):
    """A lookup. The anchor makes autograd come back here; no tensor of the graph is the table."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,  # noqa: ARG004 - makes autograd come back here
        table: Table,
        keys: torch.Tensor,
    ) -> torch.Tensor:
        values, ctx.way = table._fetch(keys, table.step)
        ctx.table = table
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradients: torch.Tensor) -> Any:
        _BACKWARD.current().add(ctx.table, ctx.way, gradients.float())
        return None, None, None
