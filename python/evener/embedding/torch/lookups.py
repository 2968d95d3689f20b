"""Lookups of several tables at once, and their gradients: one exchange between ranks for all.

`look` asks any number of tables for rows; those that lie on ranks go through `Ranks` together. The
tables of one lookup are one node of autograd, which gives each table its gradients. A table whose
values no loss used gets none, as if it had not been looked up.

Backward passes end in one place (`_Pass`), where tables are taken in the order in which they were
made: so all ranks exchange in the same order, whatever order autograd takes, and all tables that
the pass touched exchange together, whether they were looked up together or not. A pass that ends
with an error is forgotten with the gradients that it brought to `fused` tables.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from evener.embedding.torch.pooled import Exchange, Way
from evener.embedding.torch.resident import Arena, ResidentRows
from evener.embedding.torch.sharded import Asked, Ranks
from evener.embedding.torch.table import Ahead, Table


def look(asked: Sequence[tuple[Table, torch.Tensor]], train: bool) -> list[torch.Tensor]:
    """float32 [n, dim] for int64 keys [n] of each table, which comes once in `asked`.

    `train`: with a gradient, and new keys get rows. Collective where a table is sharded: all ranks
    ask the same tables. Raises UsageError where gradients wait that no optimizer takes.
    """
    if not train:
        return _fetch(asked, False)[0]
    for table, _ in asked:
        table.begin()
    anchor = torch.empty(0, requires_grad=True)
    return list(_Look.apply(anchor, asked))


def pooled(exchange: Exchange, given: Any, train: bool) -> tuple[torch.Tensor, ...]:
    """float32 [batch, columns] of a resident collection, and each feature's of them [batch, dim].
    Collective on several ranks.

    `train`: with a gradient. Raises UsageError as `look` does, and for ids that have no row.
    """
    if train:
        for table in exchange.tables:
            table.begin()
    way = exchange.way(given)
    if not train:
        whole = exchange.values(way)
        return whole, *whole.split(exchange.dims, 1)
    for feature, ids in zip(exchange.features, way.seen, strict=True):
        feature.seen[0] += ids
        feature.seen[1] += way.layout.batch
    anchor = torch.empty(0, requires_grad=True)
    found: tuple[torch.Tensor, ...] = _Pooled.apply(anchor, exchange, way)
    return found


def prefetch(asked: Sequence[tuple[Table, torch.Tensor, torch.Tensor]]) -> None:
    """The next lookup in training is of these: table, the tensor that was given, its ids.

    Collective where a table is sharded.
    """
    ways: dict[Ranks, list[tuple[Table, Ahead]]] = {}
    for table, given, ids in asked:
        ahead = table.prefetch(given, ids)
        if ahead is not None and table.sharded is not None:
            ways.setdefault(table.sharded.ranks, []).append((table, ahead))
    for ranks, each in ways.items():
        routed = ranks.first.route([_asked(table, ahead.keys, ahead.step) for table, ahead in each])
        for (table, ahead), way in zip(each, routed, strict=True):
            ahead.way = way
            table.rows.prefetch(way.bottom.keys, ahead.step)


def exchange(tables: Sequence[Table]) -> list[Table]:
    """Bring gradients to the ranks that own the rows; the tables that any rank has some for.

    Collective where a table is sharded: all ranks bring the same tables.
    """
    waits: dict[Ranks, list[tuple[Table, Any, torch.Tensor | None]]] = {}
    touched = []
    for table in tables:
        together, table.together = table.together, []
        for of, way, gradients in together:
            touched += of.give(way, gradients[0], gradients[1:])
    for table in tables:
        local, table.local = table.local, []
        if table.sharded is None:
            if table not in touched:
                touched.append(table)
        elif local:
            waits.setdefault(table.sharded.ranks, []).extend((table, *each) for each in local)
    for ranks, each in waits.items():
        given, finite = ranks.give([way for _, way, _ in each], [gradient for *_, gradient in each])
        bad: dict[Table, bool] = {}
        for (table, *_), part, fine in zip(each, given, finite, strict=True):
            if part.there:
                sums = part.sums / ranks.size if table.average else part.sums
                table.waiting.receive(part.keys, sums)
                bad[table] = bad.get(table, False) or not fine
        for table, wrong in bad.items():
            table.flag(wrong)
            touched.append(table)
    return sorted(set(touched), key=lambda table: table.number)


def check(tables: Sequence[Table]) -> None:
    """Raise UsageError where a gradient that waits is not finite. Nothing is changed.

    A device is waited for once, whatever the number of tables.
    """
    parts, inside = [], set()
    for arena in _arenas(tables):
        assert arena.pending is not None
        if arena.pending.finite != arena.pending.sums._version:
            parts.append(arena.pending.sums)
        inside |= {id(table) for table, _ in arena.pending.pieces}
    for table in tables:
        parts += [flag for _, flag in table.overflow.pieces]
        if id(table) not in inside:
            parts += [gradients for _, gradients in table.waiting.pieces]
    largest: dict[torch.device, list[torch.Tensor]] = {}
    for part in parts:
        if part.numel():
            norm = torch.linalg.vector_norm(part, ord=math.inf)
            largest.setdefault(part.device, []).append(norm)
    if not all(bool(torch.stack(each).isfinite().all()) for each in largest.values()):
        for table in tables:
            table.check()


def apply(tables: Sequence[Table], rates: Sequence[float]) -> None:
    """One step of each table with all that waits in it, which is finite; arenas at once."""
    rate = dict(zip(map(id, tables), rates, strict=True))
    done = set()
    for arena in _arenas(tables):
        pending, arena.pending = arena.pending, None
        assert pending is not None
        own = [table for table, _ in pending.pieces]
        one = {(rate[id(table)], table.step, table.rows.t) for table in own}  # type: ignore[attr-defined]
        if len(one) > 1:
            continue
        ((lr, step, t),) = one
        arena.step(pending.places, pending.sums, step, t + 1, lr)
        for table in own:
            table.rows.count_step(step, lr)  # type: ignore[attr-defined]
            table.stepped()
            done.add(id(table))
    for table, lr in zip(tables, rates, strict=True):
        if id(table) not in done:
            table.apply(lr)


def _arenas(tables: Sequence[Table]) -> list[Arena]:
    """Those of which all that waits can be stepped at once."""
    there = {id(table) for table in tables}
    found = {
        id(rows.arena): rows.arena
        for table in tables
        if isinstance(rows := table.rows, ResidentRows)
    }
    return [
        arena
        for arena in found.values()
        if arena.pending is not None
        and arena.pending.whole
        and all(id(table) in there for table, _ in arena.pending.pieces)
    ]


def _asked(table: Table, keys: torch.Tensor | None, step: int | None) -> Asked:
    assert table.sharded is not None and keys is not None
    return Asked(table.sharded, keys, step)


def _fetch(
    asked: Sequence[tuple[Table, torch.Tensor]], train: bool
) -> tuple[list[torch.Tensor], list[Any]]:
    """Values, and the way of each lookup back: its keys, or how they went to other ranks."""
    values: list[Any] = [None] * len(asked)
    ways: list[Any] = [keys for _, keys in asked]
    together: dict[Ranks, list[int]] = {}
    for i, (table, keys) in enumerate(asked):
        if table.sharded is not None:
            together.setdefault(table.sharded.ranks, []).append(i)
        else:
            rows = table.rows
            values[i] = rows.read(keys, table.step) if train else rows.peek(keys)
    for ranks, places in together.items():
        for i in places:
            ways[i] = asked[i][0].ahead_of(asked[i][1]) if train else None
        new = [i for i in places if ways[i] is None]
        if new:
            parts = [_asked(*asked[i], asked[i][0].step if train else None) for i in new]
            for i, way in zip(new, ranks.first.route(parts), strict=True):
                ways[i] = way
        found = ranks.first.values([ways[i] for i in places])
        for i, each in zip(places, found, strict=True):
            values[i] = each
    return values, ways


class _Pass:
    """One backward pass: the tables that it touched, and what fused ones got in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[int, Table] = {}
        self._kept: list[tuple[Table, Any, torch.Tensor | None]] = []
        self._together: list[tuple[Exchange, Way, tuple[torch.Tensor | None, ...]]] = []

    def add_pooled(
        self, of: Exchange, way: Way, gradients: tuple[torch.Tensor | None, ...]
    ) -> None:
        with self._lock:
            self._tables.update((table.number, table) for table in of.tables)
            self._together.append((of, way, gradients))

    def add(self, table: Table, way: Any, gradients: torch.Tensor | None) -> None:
        if gradients is None and table.sharded is None:
            return
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
        for each in self._together:
            each[0].tables[0].together.append(each)
        touched = exchange([table for table in tables if table.exchanges])
        fused = [table for table in touched if table.fused]
        try:
            # The store refuses a gradient that is not finite; with several tables or ranks nothing
            # may have been changed before it does.
            if len(fused) > 1 or any(table.sharded is not None for table in fused):
                check(fused)
            waits = [table for table in fused if table.waiting.pieces]
            apply(waits, [table.lr for table in waits])
            for table in fused:
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


class _Look(torch.autograd.Function):
    """A lookup. The anchor makes autograd come back here; no tensor of the graph is a table."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,  # noqa: ARG004 - makes autograd come back here
        asked: Sequence[tuple[Table, torch.Tensor]],
    ) -> tuple[torch.Tensor, ...]:
        values, ctx.ways = _fetch(asked, True)
        ctx.tables = [table for table, _ in asked]
        ctx.set_materialize_grads(False)
        return tuple(values)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        current = _BACKWARD.current()
        for table, way, gradient in zip(ctx.tables, ctx.ways, gradients, strict=True):
            current.add(table, way, None if gradient is None else gradient.float())
        return None, None


class _Pooled(torch.autograd.Function):
    """A lookup of a resident collection, pooled by the owners. The anchor is as in `_Look`."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,  # noqa: ARG004 - makes autograd come back here
        exchange: Exchange,
        way: Way,
    ) -> tuple[torch.Tensor, ...]:
        ctx.exchange, ctx.way = exchange, way
        ctx.set_materialize_grads(False)
        whole = exchange.values(way)
        return whole, *whole.split(exchange.dims, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        _BACKWARD.current().add_pooled(ctx.exchange, ctx.way, gradients)
        return None, None, None
