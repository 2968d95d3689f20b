"""Bags of resident tables: pooled by the rank that owns the table, all tables in one exchange.

A table lies whole on one rank. A rank sends the owner the ids of its bags, and the owner sends back
a row per bag. Where a table has fewer rows than the batch has bags, it is cheaper the other way
round: the owner sends the table, no ids travel, and the rank pools by itself. Both sides know from
the batch size which it is. Gradients take the same way: a row per bag, or a row per row of a table
that was sent, with a flag for those that are in a bag.

A step has four collectives, on any number of hosts: sizes, ids, rows, gradients. The host waits for
the device where it must know how much comes, and nowhere else.

The owner sums gradients in the order of ranks, so the sum is the same in every run. What is not
finite is found as in `sharded`: by bounds that go with the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from evener.embedding.torch import kernels, routes
from evener.embedding.torch.forms import Form, decode, encode, width
from evener.embedding.torch.layouts import Feature, Group, Layout, Plan, Side
from evener.embedding.torch.resident import Arena, Pending
from evener.embedding.torch.sharded import _ABSENT, _SAFE, Ranks, _added
from evener.embedding.torch.table import Table
from evener.embedding.torch.waiting import summed
from evener.errors import UsageError


@dataclass
class Way:
    """One lookup: how its ids went, for rows to come back and gradients to follow."""

    layout: Layout
    lengths: torch.Tensor | None  # [inputs, batch], where a table's rows are averaged
    ids: list[torch.Tensor]  # of whole tables, and where bags of them end
    ends: list[torch.Tensor]
    batches: list[int]  # of each rank
    asked: list[torch.Tensor]  # rows that all ranks ask this one for, of each group
    stops: list[torch.Tensor]
    counts: list[list[int]]  # bags that each rank asks for, of each group
    seen: list[int]  # ids of each feature


_SUMS = _SAFE / 2**31
"""A row may be in each of a rank's bags: what a sum of gradients below this makes is finite."""


class Exchange(Plan):
    """What ranks send one another for the tables of one collection."""

    def __init__(
        self,
        tables: Sequence[Table],
        rows: Sequence[int],
        features: Sequence[Feature],
        ranks: Ranks | None,
    ) -> None:
        """Collective where there are `ranks`."""
        super().__init__(tables, rows, features, ranks)
        self.arenas = [self._arena(group.owned[self.rank]) for group in self.groups]
        self._ahead: tuple[torch.Tensor, int, Way, Any] | None = None
        self._side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def _arena(self, mine: Sequence[int]) -> Arena | None:
        if not mine:
            return None
        stores = [self.tables[t]._store for t in mine]
        arena = Arena(stores, [self.rows[t] for t in mine], self.device)
        for t, rows in zip(mine, arena.rows, strict=True):
            self.tables[t].reside(rows)
        return arena

    def _swap(self, parts: Sequence[torch.Tensor], came: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """All-to-all: part r to rank r; what came from each rank, whose sizes are known."""
        if self.ranks is None:
            return (parts[0],)
        data = torch.cat(list(parts))
        received = data.new_empty(sum(came))
        sizes = [part.numel() for part in parts]
        dist.all_to_all_single(received, data, list(came), sizes, group=self.ranks.everyone)
        return tuple(received.split(list(came)))

    # Ids go.

    def prefetch(self, given: Any) -> None:
        """Send the ids of the next batch ahead, while this one trains. Collective."""
        values, ends = given.values(), given.offsets()
        ready = None
        if self._side is None:
            way = self.route(given)
        else:
            self._side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._side):
                way = self.route(given)
            ready = self._side.record_event()
            for part in (values, ends):
                if part.device == self.device:
                    part.record_stream(self._side)
        self._ahead = (values, values._version, way, ready)

    def way(self, given: Any) -> Way:
        """How this batch's ids went: ahead, or now."""
        ahead, self._ahead = self._ahead, None
        values = given.values()
        if ahead is None or ahead[0] is not values or ahead[1] != values._version:
            return self.route(given)
        _, _, way, ready = ahead
        if ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(ready)
            for part in (way.lengths, *way.ids, *way.ends, *way.asked, *way.stops):
                if part is not None:
                    part.record_stream(stream)
        return way

    @torch.no_grad()
    def route(self, given: Any) -> Way:
        """Send the ids of bags to their owners. Collective.

        Raises UsageError, on all ranks, for what does not fit.
        """
        inputs = tuple(given.keys())
        values: torch.Tensor = given.values().to(self.device)
        ends = given.offsets().to(self.device)
        batch = (ends.numel() - 1) // max(1, len(inputs))
        layout = self.layout(inputs, batch)
        n = len(self.groups)
        known = routes.look(values, ends, layout)
        if self.ranks is None:
            head = known.tolist()
            told = [[max(head[:2]), batch, *head[3 + len(inputs) :]]]
        else:
            goes = known[3 + len(inputs) :].view(self.size, n)
            first = known[:2].sum().expand(self.size, 1)
            mine = torch.cat((first, goes.new_full((self.size, 1), batch), goes), 1)
            came = torch.empty_like(mine)
            dist.all_to_all_single(came, mine, group=self.ranks.everyone)
            both = torch.cat((known, came.flatten())).tolist()
            head, rest = both[: len(known)], both[len(known) :]
            told = [rest[r * (2 + n) : (r + 1) * (2 + n)] for r in range(self.size)]
        start = head[2 : 3 + len(inputs)]
        self._refuse(head[:2], any(each[0] for each in told), values, ends, layout, inputs)
        filled = routes.fill(values, ends, layout, start)
        batches = [each[1] for each in told]
        counts = [[self.sent(group, self.rank, b)[0] for b in batches] for group in self.groups]
        asked, stops = filled.asked, filled.stops
        if self.ranks is not None:
            sizes = [
                [x for g in range(n) for x in (counts[g][r], told[r][2 + g])]
                for r in range(self.size)
            ]
            arrived = self._swap(filled.bodies, [sum(each) for each in sizes])
            pieces = [part.split(each) for part, each in zip(arrived, sizes, strict=True)]
            asked = [torch.cat([p[2 * g + 1] for p in pieces]) for g in range(n)]
            stops = [routes.ends_of(torch.cat([p[2 * g] for p in pieces])) for g in range(n)]
        self._count_keys(layout, start)
        averages = any(side.means is not None for side in (*layout.bags, *layout.whole))
        return Way(
            layout,
            ends.diff().view(len(inputs), batch) if averages else None,
            filled.near,
            filled.ends,
            batches,
            asked,
            stops,
            counts,
            [start[i + 1] - start[i] for i in map(inputs.index, (f.name for f in self.features))],
        )

    def _refuse(
        self,
        bad: list[int],
        any_bad: bool,
        values: torch.Tensor,
        ends: torch.Tensor,
        layout: Layout,
        inputs: Sequence[str],
    ) -> None:
        if not any_bad:
            return
        if bad[1]:
            raise UsageError(
                f"lengths of {len(inputs)} features do not fit {len(values)} ids",
                "give a length per feature and sample, whose sum is the number of ids",
            )
        if bad[0]:
            wrong, which = routes.out_of_range(values, ends[layout.at].long(), layout)
            at = int(torch.nonzero(wrong)[0])
            i = int(which[at])
            raise UsageError(
                f"feature {inputs[i]!r} has id {int(values[at])}, and its table has "
                f"num_embeddings={int(layout.limits[i])}",
                "give ids from 0; tables of any id cannot be resident",
            )
        raise UsageError("another rank's features do not fit", "its own error says why")

    def _count_keys(self, layout: Layout, start: list[int]) -> None:
        """Bytes of ids and lengths; sizes count for the first table."""
        for side in layout.bags:
            for f, i in zip(side.features, side.places, strict=True):
                t = self.features[f].table
                self._add(t, "keys", 4 * (start[i + 1] - start[i] + layout.batch), self.owner[t])
        for r in range(self.size):
            self._add(0, "counts", 8 * (2 + len(self.groups)), r)

    def _add(self, table: int, what: str, n: int, peer: int) -> None:
        if peer != self.rank:
            self.tables[table].traffic.count(what if self.remote[peer] else "inside", n)

    # Rows come.

    def _form(self, form: Form, peer: int) -> Form:
        return form if self.remote[peer] else "exact"

    @torch.no_grad()
    def values(self, way: Way) -> torch.Tensor:
        """[batch, columns]: features side by side, in their order. Collective."""
        layout = way.layout
        out = torch.empty(layout.batch, sum(self.dims), device=self.device)
        if self.ranks is None:
            for g, arena in enumerate(self.arenas):
                assert arena is not None
                arena.ready()
                _, first, last = self.sent(self.groups[g], 0, layout.batch)
                self._put(out, way, g, arena.weight, arena.weight[first:last], way.asked[g])
            return out
        parts: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        for g, (group, arena) in enumerate(zip(self.groups, self.arenas, strict=True)):
            if arena is None:
                continue
            arena.ready()
            pooled = kernels.pool(arena.weight, way.asked[g], way.stops[g]).split(way.counts[g])
            for r, batch in enumerate(way.batches):
                _, first, last = self.sent(group, self.rank, batch)
                form = self._form(group.forms[0], r)
                parts[r] += [_coded(pooled[r], form), _coded(arena.weight[first:last], form)]
                self._count_rows(group, "values", batch, self.rank, r)
        sizes = [
            [x for g, group in enumerate(self.groups) for x in self._back(layout, g, group, r)]
            for r in range(self.size)
        ]
        whole = [
            torch.cat(part) if part else torch.empty(0, dtype=torch.uint8, device=self.device)
            for part in parts
        ]
        arrived = self._swap(whole, [sum(each) for each in sizes])
        pieces = [part.split(each) for part, each in zip(arrived, sizes, strict=True)]
        for g, group in enumerate(self.groups):
            forms = [self._form(group.forms[0], r) for r in range(self.size)]
            bags, rows = (
                torch.cat(
                    [
                        _plain(p[2 * g + i], form, group.dim)
                        for p, form in zip(pieces, forms, strict=True)
                    ]
                )
                for i in (0, 1)
            )
            self._put(out, way, g, bags, rows)
        return out

    def _put(
        self,
        out: torch.Tensor,
        way: Way,
        g: int,
        bags: torch.Tensor,
        rows: torch.Tensor,
        ids: torch.Tensor | None = None,
    ) -> None:
        """Put features of a group into their columns: `bags`, or what `ids` name of them, and what
        this rank pools of `rows`."""
        sides = way.layout.bags[g], way.layout.whole[g]
        ends = None if ids is None else way.stops[g]
        given = (bags, ids, ends), (rows, way.ids[g], way.ends[g])
        for side, each in zip(sides, given, strict=True):
            if not side.features or not way.layout.batch:
                continue
            to = side.columns.like(out)
            if side.means is None:
                kernels.pool(*each, to)
                continue
            pooled = kernels.pool(*each).view(len(side.features), way.layout.batch, -1)
            kernels.pool(self._divided(side, pooled, way).flatten(0, 1), to=to)

    def _back(self, layout: Layout, g: int, group: Group, owner: int) -> tuple[int, int]:
        """Bytes of bags and of rows that an owner sends."""
        each = width(self._form(group.forms[0], owner), group.dim)
        return layout.bags[g].cuts[owner] * layout.batch * each, layout.sent[g][owner] * each

    def _count_rows(self, group: Group, what: str, batch: int, owner: int, peer: int) -> None:
        """Bytes of rows between an owner and a rank with this batch, one way."""
        other = peer if owner == self.rank else owner
        if other == self.rank:
            return
        form = group.forms[0 if what == "values" else 1]
        each = width(self._form(form, other), group.dim)
        first = self.first_whole(group, owner, batch)
        for i, t in enumerate(group.owned[owner]):
            n = batch * len(self.of_table[t]) if i < first else self.rows[t]
            self._add(t, what, n * each, other)

    def _divided(self, side: Side, rows: torch.Tensor, way: Way) -> torch.Tensor:
        """[features, batch, dim], those of tables with pooling MEAN divided by their lengths."""
        if side.means is None or way.lengths is None:
            return rows
        lengths = way.lengths[side.inputs]
        parts = torch.where(side.means, lengths.clamp(min=1), torch.ones_like(lengths))
        return rows / parts.unsqueeze(2)

    # Gradients go.

    @torch.no_grad()
    def give(
        self, way: Way, whole: torch.Tensor | None, gradients: Sequence[torch.Tensor | None]
    ) -> list[Table]:
        """Bring gradients to the owners: of what `values` gave as a `whole`, and of each feature's
        columns [batch, dim], None where there is none.

        The tables that any rank has some for. Collective.
        """
        layout = way.layout
        used = [whole is not None or gradient is not None for gradient in gradients]
        idle = [t for t, of in enumerate(self.of_table) if not any(used[f] for f in of)]
        given = self._side_by_side(layout.batch, whole, gradients)
        bounds = torch.zeros(len(self.tables), device=self.device)
        parts: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        tail: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        for g, group in enumerate(self.groups):
            sides = layout.bags[g], layout.whole[g]
            bags = kernels.take(sides[0].columns.like(given), group.dim, bounds, sides[0].tables)
            near = kernels.take(sides[1].columns.like(given), group.dim)
            bags, near = (
                self._divided(side, each, way)
                for side, each in zip(sides, (bags, near), strict=True)
            )
            total = sum(layout.sent[g])
            rows = kernels.spread(near.flatten(0, 1), way.ids[g], way.ends[g], total)
            flags = torch.zeros(total, dtype=torch.uint8, device=self.device)
            if total:
                bounds.scatter_reduce_(0, layout.lies[g], kernels.sizes(rows), "amax")
                flags.index_fill_(0, way.ids[g].long(), 1)
            for r, (bag, row, flag) in enumerate(
                zip(
                    bags.split(sides[0].cuts),
                    rows.split(layout.sent[g]),
                    flags.split(layout.sent[g]),
                    strict=True,
                )
            ):
                form = self._form(group.forms[1], r)
                parts[r] += [_coded(bag.flatten(0, 1), form), _coded(row, form)]
                tail[r].append(flag)
                self._count_rows(group, "gradients", layout.batch, r, self.rank)
        if idle:
            bounds[idle] = _ABSENT
        head = bounds.view(torch.uint8)
        bodies = [[head, *parts[r], *tail[r]] for r in range(self.size)]
        if self.ranks is None:
            return self._received(way, bodies, bounds.unsqueeze(0))
        for r in range(self.size):
            for t in range(len(self.tables)):
                self._add(t, "counts", 4, r)
        sizes = [self._brought(b, r) for r, b in enumerate(way.batches)]
        arrived = self._swap([torch.cat(body) for body in bodies], [sum(each) for each in sizes])
        pieces = [part.split(each) for part, each in zip(arrived, sizes, strict=True)]
        of_ranks = torch.stack([_floats(p[0]) for p in pieces])
        return self._received(way, pieces, of_ranks)

    def _side_by_side(
        self, batch: int, whole: torch.Tensor | None, gradients: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """[batch, columns]: gradients of all features, 0 where there is none."""
        if whole is not None and all(each is None for each in gradients):
            return whole.float().contiguous()
        found = torch.cat(
            [
                torch.zeros(batch, dim, device=self.device) if each is None else each.float()
                for each, dim in zip(gradients, self.dims, strict=True)
            ],
            1,
        )
        return found if whole is None else found + whole

    def _brought(self, batch: int, rank: int) -> list[int]:
        """Bytes of each part of what a rank with this batch brings here."""
        found, tail = [4 * len(self.tables)], []
        for group in self.groups:
            bags, first, last = self.sent(group, self.rank, batch)
            each = width(self._form(group.forms[1], rank), group.dim)
            found += [bags * each, (last - first) * each]
            tail.append(last - first)
        return found + tail

    def _received(self, way: Way, pieces: Any, of_ranks: torch.Tensor) -> list[Table]:
        """Sums of what all ranks brought wait in their tables."""
        n, waits, marks = len(self.groups), [], [of_ranks.T.double().flatten()]
        for g, (group, arena) in enumerate(zip(self.groups, self.arenas, strict=True)):
            if arena is None:
                continue
            forms = [self._form(group.forms[1], r) for r in range(self.size)]
            bags = torch.cat(
                [
                    _plain(p[1 + 2 * g], form, group.dim)
                    for p, form in zip(pieces, forms, strict=True)
                ]
            )
            own = [self.sent(group, self.rank, b)[1] for b in way.batches]
            first = min(own)
            rows = [
                _plain(p[2 + 2 * g], form, group.dim) for p, form in zip(pieces, forms, strict=True)
            ]
            flags = [p[1 + 2 * n + g] for p in pieces]
            more, there = (rows[0], flags[0]) if self.size == 1 else _aligned(rows, flags)
            near = torch.nonzero(there)[:, 0]
            places, sums = kernels.add(way.asked[g], bags, way.stops[g], (near + first, more[near]))
            if len(set(own)) > 1:  # a table that one rank asked for bags, and another had whole
                places, sums = summed(places, sums)
            if group.average and self.size > 1:
                sums = sums / self.size
            marks.append(torch.searchsorted(places, arena.starts).double())
            lies = torch.bucketize(places, arena.starts, right=True) - 1  # the table of each
            keys = places - arena.starts[lies]
            waits.append((group, arena, places, keys, sums))
        known = torch.cat(marks).tolist()
        size = len(self.tables) * self.size
        bound = [
            _added(known[t * self.size : (t + 1) * self.size]) for t in range(len(self.tables))
        ]
        cuts = [int(each) for each in known[size:]]
        finite = [math.isfinite(each) for each in bound]
        mine: dict[int, torch.Tensor] = {}
        made: list[tuple[Pending, list[int]]] = []
        for group, arena, places, keys, sums in waits:
            ends = [*cuts[: len(arena.rows)], len(places)]
            cuts = cuts[len(arena.rows) :]
            waiting = []
            for i, t in enumerate(group.owned[self.rank]):
                if bound[t] < 0:
                    continue
                part = slice(ends[i], ends[i + 1])
                piece = (keys[part], sums[part])
                mine[t] = piece[1]
                self.tables[t].waiting.pieces.append(piece)
                waiting.append((self.tables[t], piece))
            arena.pending = None
            if waiting and sum(len(piece[0]) for _, piece in waiting) == len(places):
                arena.pending = Pending(places, sums, waiting)
                made.append((arena.pending, [t for t in group.owned[self.rank] if bound[t] >= 0]))
        large = [t for t, each in enumerate(bound) if finite[t] and each >= _SUMS]
        if large and self.ranks is not None:  # the same on all ranks, as bounds are
            spoilt = [float(t in mine and not bool(mine[t].isfinite().all())) for t in large]
            for t, bad in zip(large, self.ranks.largest(spoilt), strict=True):
                finite[t] = not bad
        touched = [t for t, each in enumerate(bound) if not each < 0]
        for pending, of in made:
            if all(finite[t] and (bound[t] < _SUMS or self.ranks is not None) for t in of):
                pending.found_finite()
        # A rank without rows has no gradient that torch's GradScaler could look at: one has a flag.
        for t in touched if self.ranks is not None else ():
            if not finite[t] or t == touched[0]:
                self.tables[t].flag(not finite[t])
        return [self.tables[t] for t in touched]


def _aligned(
    rows: Sequence[torch.Tensor], flags: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of rows and of flags that end together, in the order of ranks."""
    most = max(rows, key=len)
    found = torch.zeros_like(most)
    there = torch.zeros(len(most), dtype=torch.uint8, device=most.device)
    for row, flag in zip(rows, flags, strict=True):
        found[len(most) - len(row) :] += row
        there[len(most) - len(row) :] |= flag
    return found, there


def _coded(rows: torch.Tensor, form: Form) -> torch.Tensor:
    return encode(rows, form).reshape(-1)


def _floats(data: torch.Tensor) -> torch.Tensor:
    """Bytes as float32; copied where they lie at an odd place."""
    return (data.clone() if data.storage_offset() % 4 else data).view(torch.float32)


def _plain(data: torch.Tensor, form: Form, dim: int) -> torch.Tensor:
    """float32 [n, dim] of bytes."""
    if form == "exact":
        return _floats(data).view(-1, dim)
    codes = data.clone() if data.storage_offset() % 4 else data
    return decode(codes.view(-1, width(form, dim)), form, dim)
