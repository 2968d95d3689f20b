"""Which rank has which resident table, and what a batch of some size asks of whom.

All that is here follows from the tables and from numbers that ranks have told one another, so every
rank knows it of every other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evener.embedding.torch import updates
from evener.embedding.torch.columns import Columns
from evener.embedding.torch.forms import Form
from evener.embedding.torch.sharded import Ranks
from evener.embedding.torch.table import Table
from evener.errors import UsageError


@dataclass(frozen=True)
class Feature:
    """A column of the result. `table`: its number in the collection; `mean`: divide by lengths;
    `seen`: ids and samples that training has looked up."""

    name: str
    table: int
    mean: bool
    seen: list[int]


@dataclass(frozen=True)
class Group:
    """Tables of one dim, one optimizer, and one way to cross. `owned[r]`: tables of rank r, in the
    order of their arena there; those that are sent whole for a large batch are the last."""

    dim: int
    forms: tuple[Form, Form]
    average: bool
    owned: list[list[int]]


@dataclass
class Side:
    """Features of a group that cross in one way, in the order in which they cross: by owner.

    `features`: their numbers; `columns`: theirs in the result; `inputs`: which input each reads, on
    the device; `bases`: what is added to its ids; `cuts`: how many of each owner.
    """

    features: list[int]
    columns: Columns
    inputs: torch.Tensor
    bases: torch.Tensor
    cuts: list[int]
    places: list[int]  # `inputs`, on the host
    tables: torch.Tensor  # the table of each
    means: torch.Tensor | None  # bool [features, 1]: whose sums are divided; None: of none


@dataclass(frozen=True)
class Slots:
    """Each way of each feature, in the order in which `routes.fill` puts them into one tensor.

    `blocks`: inputs of slots that lie one behind another: of each rank and group, and then, of each
    group, of what is pooled here. `counts`: whether a block has lengths, or ends. `inputs`,
    `bases`, `lengths`: of each slot, on the device.
    """

    alone: bool
    blocks: list[list[int]]
    counts: list[bool]
    inputs: torch.Tensor
    bases: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, bags: Sequence[Side], whole: Sequence[Side], device: torch.device) -> Slots:
        ranks = len(bags[0].cuts)
        blocks: list[list[int]] = []
        bases: list[int] = []
        begins = [0] * len(bags)
        for r in range(ranks):
            for g, side in enumerate(bags):
                part = slice(begins[g], begins[g] + side.cuts[r])
                begins[g] += side.cuts[r]
                blocks.append(side.places[part])
                bases += side.bases.tolist()[part]
        counts = [ranks > 1] * len(blocks) + [False] * len(whole)
        for side in whole:
            blocks.append(side.places)
            bases += side.bases.tolist()
        lengths = [own for own, block in zip(counts, blocks, strict=True) for _ in block]
        inputs, *rest = (
            torch.tensor(each, dtype=torch.int64).to(device)
            for each in ([i for block in blocks for i in block], bases, lengths)
        )
        return cls(ranks == 1, blocks, counts, inputs, *rest)


@dataclass
class Layout:
    """What a batch of `batch` samples of these inputs needs, of each group."""

    batch: int
    at: torch.Tensor  # where each input begins, among offsets
    limits: torch.Tensor  # rows of the smallest table of each input
    bags: list[Side]
    whole: list[Side]
    sent: list[list[int]]  # rows of each owner's tables that are sent whole
    lies: list[torch.Tensor]  # the table of each such row, of all owners
    mask: torch.Tensor  # int64 [owners * groups, inputs]: whose ids go where
    slots: Slots


class Plan:
    """The tables of one collection, and where each lies."""

    def __init__(
        self,
        tables: Sequence[Table],
        rows: Sequence[int],
        features: Sequence[Feature],
        ranks: Ranks | None,
    ) -> None:
        """Collective where there are `ranks`."""
        self.tables, self.rows, self.features = list(tables), list(rows), list(features)
        self.device, self.ranks = tables[0].device, ranks
        self.size, self.rank = (1, 0) if ranks is None else (ranks.size, ranks.rank)
        places = [0] if ranks is None else ranks.places()
        self.owner = [places.index(table.home or 0) for table in tables]
        self.remote = [False] if ranks is None else ranks.remote
        self.of_table = [
            [i for i, each in enumerate(features) if each.table == t] for t in range(len(tables))
        ]
        self.dims = [tables[feature.table].dim for feature in features]
        self.columns = [0, *itertools.accumulate(self.dims)][:-1]
        self.nothing = torch.empty(0, device=self.device)
        self.groups = self._grouped()
        self._layouts: dict[Any, Layout] = {}

    def _grouped(self) -> list[Group]:
        kinds: dict[Any, list[int]] = {}
        for t, table in enumerate(self.tables):
            updates.of(table.options)  # refused on all ranks, whoever has the table
            optimizer = {k: v for k, v in table.options["optimizer"].items() if k != "lr"}
            kind = (table.dim, str(optimizer), table.options["dtype"], table._forms, table.average)
            kinds.setdefault(kind, []).append(t)
        groups = []
        for (dim, *_, forms, average), members in kinds.items():
            # What a table costs more as rows than as bags grows with the rows per feature.
            members.sort(key=lambda t: (-self.rows[t] / len(self.of_table[t]), t))
            owned = [[t for t in members if self.owner[t] == r] for r in range(self.size)]
            most = max(sum(self.rows[t] for t in each) for each in owned)
            if most >= 2**31:
                raise UsageError(
                    f"tables of dim {dim} have {most} rows on one rank",
                    "resident=True has room for 2^31: take more ranks, or leave it out",
                )
            groups.append(Group(dim, forms, average, owned))
        return groups

    def first_whole(self, group: Group, owner: int, batch: int) -> int:
        """How many of an owner's tables a rank with this batch asks for bags."""
        for i, t in enumerate(group.owned[owner]):
            if self.rows[t] <= batch * len(self.of_table[t]):
                return i
        return len(group.owned[owner])

    def sent(self, group: Group, owner: int, batch: int) -> tuple[int, int, int]:
        """Bags that a rank with this batch gets from an owner; the first row that it gets, and the
        last."""
        first = self.first_whole(group, owner, batch)
        tables = group.owned[owner]
        bags = batch * sum(len(self.of_table[t]) for t in tables[:first])
        before = sum(self.rows[t] for t in tables[:first])
        return bags, before, before + sum(self.rows[t] for t in tables[first:])

    def layout(self, inputs: tuple[str, ...], batch: int) -> Layout:
        known = self._layouts.get((inputs, batch))
        if known is not None:
            return known
        number = {name: i for i, name in enumerate(inputs)}
        for feature in self.features:
            if feature.name not in number:
                raise UsageError(
                    f"table {self.tables[feature.table].name!r} looks up feature "
                    f"{feature.name!r}, which is not given",
                    f"features given: {', '.join(inputs)}",
                )
        limits = [-1] * len(inputs)
        for feature in self.features:
            i, most = number[feature.name], self.rows[feature.table]
            limits[i] = most if limits[i] < 0 else min(limits[i], most)
        bags: list[Side] = []
        whole: list[Side] = []
        sent, lies = [], []
        mask = torch.zeros(self.size, len(self.groups), len(inputs), dtype=torch.int64)
        for g, group in enumerate(self.groups):
            sides: list[tuple[list[int], list[int], list[int]]] = [([], [], []), ([], [], [])]
            rows_sent, of_rows, received = [], [], 0
            for owner, tables in enumerate(group.owned):
                first = self.first_whole(group, owner, batch)
                start = 0
                for side, part in zip(sides, (tables[:first], tables[first:]), strict=True):
                    before = len(side[0])
                    for t in part:
                        base = start if side is sides[0] else received
                        side[0].extend(self.of_table[t])
                        side[1].extend([base] * len(self.of_table[t]))
                        start += self.rows[t]
                        if side is sides[1]:
                            received += self.rows[t]
                            of_rows.append(torch.full((self.rows[t],), t))
                        else:
                            for f in self.of_table[t]:
                                mask[owner, g, number[self.features[f].name]] += 1
                    side[2].append(len(side[0]) - before)
                rows_sent.append(sum(self.rows[t] for t in tables[first:]))
            for side, to in zip(sides, (bags, whole), strict=True):
                places = [number[self.features[f].name] for f in side[0]]
                own = [self.features[f] for f in side[0]]
                means = self.up([f.mean for f in own]).bool().unsqueeze(1)
                to.append(
                    Side(
                        side[0],
                        Columns.of([self.columns[f] for f in side[0]], self.nothing),
                        self.up(places),
                        self.up(side[1]),
                        side[2],
                        places,
                        self.up([f.table for f in own]),
                        means if any(f.mean for f in own) else None,
                    )
                )
            sent.append(rows_sent)
            lies.append(torch.cat([torch.empty(0, dtype=torch.int64), *of_rows]).to(self.device))
        made = Layout(
            batch,
            torch.arange(len(inputs) + 1, device=self.device) * batch,
            self.up(limits),
            bags,
            whole,
            sent,
            lies,
            mask.view(-1, len(inputs)).to(self.device),
            Slots.of(bags, whole, self.device),
        )
        if len(self._layouts) > 16:
            self._layouts.clear()
        self._layouts[(inputs, batch)] = made
        return made

    def up(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self.device)
