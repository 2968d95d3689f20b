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
import torch.nn.functional as F  # noqa: N812 - its name everywhere

from evener.embedding.torch.forms import Form, decode, encode, width
from evener.embedding.torch.kernels import add, spread
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
    lengths: list[torch.Tensor]  # of each group's features: those of bags, then of whole tables
    ids: list[torch.Tensor]  # of whole tables, and where bags of them end
    ends: list[torch.Tensor]
    batches: list[int]  # of each rank
    asked: list[torch.Tensor]  # rows that all ranks ask this one for, of each group
    stops: list[torch.Tensor]
    counts: list[list[int]]  # bags that each rank asks for, of each group
    seen: list[int]  # ids of each feature


def pool(ids: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[bags, dim]: sums of rows."""
    if not ids.numel():
        return rows.new_zeros(ends.numel() - 1, rows.shape[1])
    return F.embedding_bag(ids, rows, ends, mode="sum", include_last_offset=True)


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
            for part in (*way.lengths, *way.ids, *way.ends, *way.asked, *way.stops):
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
        lengths = ends.diff()
        at = ends[layout.at]
        each = at.diff()
        which = torch.searchsorted(
            at[1:].contiguous(), torch.arange(len(values), device=at.device), right=True
        )
        most = layout.limits[which.clamp_(max=len(inputs) - 1)]
        wrong = ((values < 0) | (values >= most)) & (most >= 0)
        odd = (ends[0] != 0) | (ends[-1] != len(values)) | (lengths < 0).any()
        bad = torch.stack((wrong.any(), odd)).long()
        goes = (layout.mask * each).sum(1).view(self.size, -1)
        told = torch.cat(
            (bad.sum().expand(self.size, 1), goes.new_full((self.size, 1), batch), goes), 1
        )
        came = torch.cat(self._swap(list(told), [told.shape[1]] * self.size)).view(self.size, -1)
        known = torch.cat((bad, at, came.flatten(), goes.flatten())).tolist()
        bad_here, start, told_by = known[:2], known[2 : 3 + len(inputs)], known[3 + len(inputs) :]
        half = came.numel()
        of = [told_by[r * came.shape[1] : (r + 1) * came.shape[1]] for r in range(self.size)]
        self._refuse(bad_here, any(each[0] for each in of), values, which, most, inputs, wrong)
        goes_to, n = told_by[half:], len(self.groups)

        def taken(side: Side) -> torch.Tensor:
            """Ids of these features, one behind another."""
            if not side.features:
                return values.new_empty(0).int()
            parts = [values[start[i] : start[i + 1]] for i in side.places]
            total = sum(map(len, parts))
            bases = torch.repeat_interleave(side.bases, each[side.inputs], output_size=total)
            return (torch.cat(parts) + bases).int()

        by_input = lengths.view(len(inputs), batch).int()
        long = [by_input[side.inputs] for side in layout.bags]
        ids = [taken(side) for side in layout.bags]
        bodies: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        for g, side in enumerate(layout.bags):
            parts = ids[g].split([goes_to[r * n + g] for r in range(self.size)])
            for r, (of_ids, of_lengths) in enumerate(
                zip(parts, long[g].split(side.cuts), strict=True)
            ):
                bodies[r] += [of_lengths.flatten(), of_ids]
        batches = [each[1] for each in of]
        counts = [[self.sent(group, self.rank, b)[0] for b in batches] for group in self.groups]
        sizes = [
            [x for g in range(n) for x in (counts[g][r], of[r][2 + g])] for r in range(self.size)
        ]
        arrived = self._swap([torch.cat(body) for body in bodies], [sum(each) for each in sizes])
        pieces = [part.split(each) for part, each in zip(arrived, sizes, strict=True)]
        asked = [torch.cat([p[2 * g + 1] for p in pieces]) for g in range(n)]
        stops = [_ends(torch.cat([p[2 * g] for p in pieces])) for g in range(n)]
        near = [taken(side) for side in layout.whole]
        short = [by_input[side.inputs] for side in layout.whole]
        self._count_keys(layout, start)
        return Way(
            layout,
            [torch.cat(each) for each in zip(long, short, strict=True)],
            near,
            [_ends(each.flatten()) for each in short],
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
        values: Any,
        which: Any,
        most: Any,
        inputs: Any,
        wrong: Any,
    ) -> None:
        if not any_bad:
            return
        if bad[1]:
            raise UsageError(
                f"lengths of {len(inputs)} features do not fit {len(values)} ids",
                "give a length per feature and sample, whose sum is the number of ids",
            )
        if bad[0]:
            at = int(torch.nonzero(wrong)[0])
            raise UsageError(
                f"feature {inputs[int(which[at])]!r} has id {int(values[at])}, and its table has "
                f"num_embeddings={int(most[at])}",
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
    def values(self, way: Way) -> list[torch.Tensor]:
        """[batch, dim] of each feature. Collective."""
        layout = way.layout
        parts: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        for g, (group, arena) in enumerate(zip(self.groups, self.arenas, strict=True)):
            if arena is None:
                continue
            arena.ready()
            pooled = pool(way.asked[g], arena.weight, way.stops[g]).split(way.counts[g])
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
        found: list[Any] = [None] * len(self.features)
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
            near = pool(way.ids[g], rows, way.ends[g])
            sides = (layout.bags[g], layout.whole[g])
            lengths = way.lengths[g].split([len(side.features) for side in sides])
            for side, each, long in zip(sides, (bags, near), lengths, strict=True):
                if not side.features:
                    continue
                each = self._divided(
                    side, each.view(len(side.features), layout.batch, group.dim), long
                )
                for f, part in zip(side.features, each.unbind(0), strict=True):
                    found[f] = part
        return found

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

    def _divided(self, side: Side, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """[features, batch, dim], those of tables with pooling MEAN divided by their lengths."""
        if side.means is None:
            return rows
        parts = torch.where(side.means, lengths.clamp(min=1), torch.ones_like(lengths))
        return rows / parts.unsqueeze(2)

    # Gradients go.

    @torch.no_grad()
    def give(self, way: Way, gradients: Sequence[torch.Tensor | None]) -> list[Table]:
        """Bring gradients [batch, dim] of each feature to the owners, None where there is none.

        The tables that any rank has some for. Collective.
        """
        layout = way.layout
        used = [gradient is not None for gradient in gradients]
        idle = [t for t, of in enumerate(self.of_table) if not any(used[f] for f in of)]
        bounds = torch.zeros(len(self.tables), device=self.device)
        parts: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        tail: list[list[torch.Tensor]] = [[] for _ in range(self.size)]
        for g, group in enumerate(self.groups):
            bags, near = (
                self._stacked(side, gradients, group.dim, layout.batch)
                for side in (layout.bags[g], layout.whole[g])
            )
            lengths = way.lengths[g].split(
                [len(side.features) for side in (layout.bags[g], layout.whole[g])]
            )
            bags, near = (
                self._divided(side, each, long)
                for side, each, long in zip(
                    (layout.bags[g], layout.whole[g]), (bags, near), lengths, strict=True
                )
            )
            total = sum(layout.sent[g])
            rows = spread(near.flatten(0, 1), way.ids[g], lengths[1].flatten(), total)
            if layout.bags[g].features and layout.batch:
                bounds.scatter_reduce_(0, layout.bags[g].tables, _largest(bags.flatten(1)), "amax")
            bounds.scatter_reduce_(0, layout.lies[g], _largest(rows), "amax")
            flags = torch.zeros(total, dtype=torch.uint8, device=self.device)
            flags[way.ids[g].long()] = 1
            for r, (bag, row, flag) in enumerate(
                zip(
                    bags.split(layout.bags[g].cuts),
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
        for r in range(self.size):
            for t in range(len(self.tables)):
                self._add(t, "counts", 4, r)
        sizes = [self._brought(b, r) for r, b in enumerate(way.batches)]
        arrived = self._swap(
            [torch.cat([head, *parts[r], *tail[r]]) for r in range(self.size)],
            [sum(each) for each in sizes],
        )
        pieces = [part.split(each) for part, each in zip(arrived, sizes, strict=True)]
        of_ranks = torch.stack([_floats(p[0]) for p in pieces])
        return self._received(way, pieces, of_ranks)

    def _stacked(
        self, side: Side, gradients: Sequence[torch.Tensor | None], dim: int, batch: int
    ) -> torch.Tensor:
        """[features, batch, dim]; 0 where there is none."""
        if not side.features:
            return torch.zeros(0, batch, dim, device=self.device)
        nothing = torch.zeros(batch, dim, device=self.device)
        found = [gradients[f] for f in side.features]
        return torch.stack([nothing if each is None else each.float() for each in found])

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
            places, sums = add(way.asked[g], bags, way.stops[g].diff())
            own = [self.sent(group, self.rank, b)[1] for b in way.batches]
            first = min(own)
            rows = torch.zeros(len(arena.weight) - first, group.dim, device=self.device)
            flags = torch.zeros(len(rows), dtype=torch.bool, device=self.device)
            for p, form, start in zip(pieces, forms, own, strict=True):
                rows[start - first :] += _plain(p[2 + 2 * g], form, group.dim)
                flags[start - first :] |= p[1 + 2 * n + g].bool()
            near = torch.nonzero(flags)[:, 0]
            places = torch.cat((places.long(), near + first))
            sums = torch.cat((sums, rows[near]))
            if len(set(own)) > 1:  # a table that one rank asked for bags, and another had whole
                places, sums = summed(places, sums)
            if group.average:
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
        for group, arena, places, keys, sums in waits:
            ends = [*cuts[: len(arena.rows)], len(places)]
            cuts = cuts[len(arena.rows) :]
            there = []
            for i, t in enumerate(group.owned[self.rank]):
                if bound[t] < 0:
                    continue
                part = slice(ends[i], ends[i + 1])
                piece = (keys[part], sums[part])
                mine[t] = piece[1]
                self.tables[t].waiting.pieces.append(piece)
                there.append((self.tables[t], piece))
            whole = sum(len(piece[0]) for _, piece in there) == len(places)
            arena.pending = Pending(places, sums, there) if there and whole else None
        large = [t for t, each in enumerate(bound) if finite[t] and each >= _SAFE]
        if large and self.ranks is not None:  # the same on all ranks, as bounds are
            spoilt = [float(t in mine and not bool(mine[t].isfinite().all())) for t in large]
            for t, bad in zip(large, self.ranks.largest(spoilt), strict=True):
                finite[t] = not bad
        touched = [t for t, each in enumerate(bound) if not each < 0]
        if self.ranks is not None and touched:
            flags = torch.tensor([[0.0 if finite[t] else math.nan] for t in touched]).to(
                self.device
            )
            zero = torch.zeros(1, dtype=torch.int64, device=self.device)
            for t, flag in zip(touched, flags.split(1), strict=True):
                self.tables[t].overflow.receive(zero, flag)
        return [self.tables[t] for t in touched]


def _ends(lengths: torch.Tensor) -> torch.Tensor:
    """int32 [bags + 1]."""
    zero = lengths.new_zeros(1)
    return torch.cat((zero, lengths.cumsum(0, dtype=torch.int32)))


def _largest(rows: torch.Tensor) -> torch.Tensor:
    """[n]: the largest magnitude of each row; infinite where one is not finite."""
    found: torch.Tensor = torch.linalg.vector_norm(rows, ord=math.inf, dim=1)
    return found.nan_to_num_(nan=math.inf, posinf=math.inf)


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
