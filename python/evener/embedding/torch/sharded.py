"""Tables that lie on all ranks: keys go to their owners, values come back, gradients follow.

Each key has one owner, by a hash. A `Stage` is one hop: it sends every key of this rank once to the
rank of its group that the key's hash names, and what arrives from all peers, each key once again,
goes on to what is below: another stage, or the rows of this rank. Values take the same way back;
gradients take it forth, and are summed at each stage in the order of ranks, so the sum is the same
in every run.

A stage takes a list of parts, one per lookup, and all of them cross together: one exchange of
counts and one of keys, one of values back, and one of gradients, whatever the number of tables,
their dims and their forms. What a rank sends to a peer is its parts one behind another, as bytes.
A part's rows and sums are the same bits as if it had gone alone.

With its gradients a rank sends the largest magnitude of each part, or -1 where the part has no
gradient. The sum of these bounds every sum of gradients on every rank, so all ranks know from it,
without another exchange, that no sum can overflow; only near the end of float32 they ask.

Between hosts of several ranks there are two stages. The first stays inside the host, and brings the
same key of all its ranks together; the second crosses the network, where each key of a host goes
once. Groups and hosts come from `evener.comm`. Its transports move equal parts, and parts here are
as long as the keys happen to be, so NCCL or Gloo carries them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from evener.comm.groups import Communicators
from evener.comm.options import Options as CommOptions
from evener.embedding.parts import hashes
from evener.embedding.torch.forms import Form, decode, encode, width
from evener.embedding.torch.rows import Rows
from evener.embedding.torch.traffic import Traffic
from evener.embedding.torch.waiting import add_rows

# Sums of gradients whose bound is below this are finite, whatever form they cross in.
_SAFE = 1e38
_ABSENT = -1.0


@dataclass(frozen=True)
class Asked:
    """Keys of a table, once each. `step` is None for inference."""

    table: Sharded
    keys: torch.Tensor
    step: int | None


@dataclass(frozen=True)
class Way:
    """How the keys of one lookup went, for the values to come back and gradients to follow."""

    asked: Asked
    order: torch.Tensor  # positions of the keys, by peer
    sent: list[int]  # how many to each peer
    came: list[int]  # how many from each
    place: torch.Tensor  # of each that came, in the keys that went on
    below: Any  # a Way of the next stage, or what is asked of this rank

    @property
    def bottom(self) -> Asked:
        """What is asked of the rows of this rank."""
        below = self.below
        return below.bottom if isinstance(below, Way) else below


@dataclass(frozen=True)
class Given:
    """Gradients of one lookup: `sums` [n, dim] of `keys`, which this rank owns.

    `bound`: no sum of this part is larger, on any rank; NaN or infinite where a gradient was not
    finite. Below 0: no rank has a gradient.
    """

    keys: torch.Tensor
    sums: torch.Tensor
    bound: float

    @property
    def there(self) -> bool:
        """Whether any rank has a gradient: the same on all."""
        return not self.bound < 0


class Below(Protocol):
    """What a stage asks, all parts at once. Keys of a part are given once each."""

    def route(self, asked: Sequence[Asked]) -> list[Any]:
        """Take keys there."""

    def values(self, ways: Sequence[Any]) -> list[torch.Tensor]:
        """[n, dim], float32, of each."""

    def give(
        self, ways: Sequence[Any], gradients: Sequence[torch.Tensor], bounds: Sequence[float]
    ) -> list[Given]:
        """Take gradients [n, dim] to the owners."""


class Here:
    """The bottom: the rows of this rank."""

    def route(self, asked: Sequence[Asked]) -> list[Asked]:
        return list(asked)

    def values(self, ways: Sequence[Asked]) -> list[torch.Tensor]:
        return [
            each.table.rows.peek(each.keys)
            if each.step is None
            else each.table.rows.read(each.keys, each.step)
            for each in ways
        ]

    def give(
        self, ways: Sequence[Asked], gradients: Sequence[torch.Tensor], bounds: Sequence[float]
    ) -> list[Given]:
        return [
            Given(*each) for each in zip((w.keys for w in ways), gradients, bounds, strict=True)
        ]


class Stage:
    """One hop; see the head of this file.

    `stride`: a key of hash h goes to rank h // stride % size of `group`. `remote`: for each rank of
    the group, whether it is on another host.
    """

    def __init__(
        self, group: dist.ProcessGroup, rank: int, stride: int, below: Below, remote: list[bool]
    ) -> None:
        self.group, self.rank, self.stride, self.below = group, rank, stride, below
        self.remote, self.size = remote, len(remote)
        self.leaves = any(remote)

    def _forms(self, way: Way) -> tuple[Form, Form]:
        """The forms of values and gradients. Inside a host both go as they are."""
        return way.asked.table.forms if self.leaves else ("exact", "exact")

    def _count(self, traffic: Traffic, what: str, numbers: Sequence[int], width: int) -> None:
        for peer, (n, remote) in enumerate(zip(numbers, self.remote, strict=True)):
            if peer != self.rank:
                traffic.count(what if remote else "inside", n * width)

    def _move(
        self,
        parts: Sequence[torch.Tensor],
        sent: Sequence[Sequence[int]],
        came: Sequence[Sequence[int]],
    ) -> list[torch.Tensor]:
        """All-to-all of 1-D parts of one dtype: `sent[i][r]` of part i to rank r, in that order.

        Gives each part as it came, the rank that sent it before the next, in memory of its own.
        """
        pieces = [part.split(list(each)) for part, each in zip(parts, sent, strict=True)]
        peers = range(self.size)
        data = torch.cat([of[peer] for peer in peers for of in pieces])
        received = data.new_empty(sum(map(sum, came)))
        taken, gone = ([sum(each[r] for each in way) for r in peers] for way in (came, sent))
        dist.all_to_all_single(received, data, taken, gone, group=self.group)
        arrived = received.split([each[peer] for peer in peers for each in came])
        n = len(parts)
        return [torch.cat([arrived[peer * n + i] for peer in peers]) for i in range(n)]

    def route(self, asked: Sequence[Asked]) -> list[Way]:
        n = len(asked)
        sizes = [len(each.keys) for each in asked]
        # Which part and which peer, in one number: one short sort orders all parts.
        narrow = torch.int16 if n * self.size < 2**15 else torch.int32
        to = torch.cat(
            [
                (each.table.hashes(each.keys) // self.stride % self.size + i * self.size).to(narrow)
                for i, each in enumerate(asked)
            ]
        )
        order = torch.argsort(to, stable=True).split(sizes)
        counts = torch.bincount(to, minlength=n * self.size).view(n, self.size)
        told = torch.empty_like(counts)
        dist.all_to_all_single(told.view(-1), counts.T.contiguous().view(-1), group=self.group)
        came = told.view(self.size, n).T.tolist()
        sent = counts.tolist()
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + size)
        orders = [each - start for each, start in zip(order, starts, strict=False)]
        keys = [each.keys[by] for each, by in zip(asked, orders, strict=True)]
        found = [torch.unique(each, return_inverse=True) for each in self._move(keys, sent, came)]
        on = [
            Asked(each.table, unique, each.step)
            for each, (unique, _) in zip(asked, found, strict=True)
        ]
        for i, each in enumerate(asked):
            self._count(each.table.traffic, "counts", [1] * self.size, 8)
            self._count(each.table.traffic, "keys", sent[i], 8)
        below = self.below.route(on)
        return [
            Way(each, orders[i], sent[i], came[i], found[i][1], below[i])
            for i, each in enumerate(asked)
        ]

    def _bytes(self, way: Way, form: Form) -> tuple[list[int], list[int]]:
        """Bytes of rows in `form` to each peer and from each, one row per key."""
        each = width(form, way.asked.table.dim)
        return [n * each for n in way.sent], [n * each for n in way.came]

    def values(self, ways: Sequence[Way]) -> list[torch.Tensor]:
        found = self.below.values([way.below for way in ways])
        forms = [self._forms(way)[0] for way in ways]
        moves = [self._bytes(way, form) for way, form in zip(ways, forms, strict=True)]
        parts = [
            encode(rows[way.place], form).view(-1)
            for rows, way, form in zip(found, ways, forms, strict=True)
        ]
        back = self._move(parts, [came for _, came in moves], [sent for sent, _ in moves])
        result = []
        for way, form, rows in zip(ways, forms, back, strict=True):
            table = way.asked.table
            each = width(form, table.dim)
            self._count(table.traffic, "values", way.came, each)
            values = torch.empty(len(way.order), table.dim, device=rows.device)
            values[way.order] = decode(rows.view(-1, each), form, table.dim)
            result.append(values)
        return result

    def give(
        self, ways: Sequence[Way], gradients: Sequence[torch.Tensor], bounds: Sequence[float]
    ) -> list[Given]:
        forms = [self._forms(way)[1] for way in ways]
        moves = [self._bytes(way, form) for way, form in zip(ways, forms, strict=True)]
        device = gradients[0].device
        own = torch.tensor(bounds, dtype=torch.float64, device=device).view(torch.uint8)
        parts = [own.repeat(self.size)]
        parts += [
            encode(each[way.order], form).view(-1)
            for each, way, form in zip(gradients, ways, forms, strict=True)
        ]
        ahead = [own.numel()] * self.size
        told, *arrived = self._move(
            parts, [ahead, *(sent for sent, _ in moves)], [ahead, *(came for _, came in moves)]
        )
        of_peers = told.view(torch.float64).view(self.size, len(ways)).T.tolist()
        sums = []
        for way, form, rows in zip(ways, forms, arrived, strict=True):
            table = way.asked.table
            each = width(form, table.dim)
            self._count(table.traffic, "counts", [1] * self.size, 8)
            self._count(table.traffic, "gradients", way.sent, each)
            keys = way.below.asked.keys if isinstance(way.below, Way) else way.below.keys
            decoded = decode(rows.view(-1, each), form, table.dim)
            sums.append(add_rows(decoded, way.place, len(keys)))
        return self.below.give([way.below for way in ways], sums, [_added(of) for of in of_peers])


def _added(bounds: Sequence[float]) -> float:
    """A bound of sums, from those of what is added."""
    there = [bound for bound in bounds if not bound < 0]
    return sum(there) if there else _ABSENT


class Ranks:
    """The ranks of `group` (default: all) and the stages between them; made on all together."""

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        # "nccl" is the collective library, whichever it is: on CPUs Gloo.
        self._groups = Communicators(CommOptions(outer="nccl"), device, group)
        self.rank, self.size = self._groups.rank, self._groups.size
        route, hosts = self._groups.route, self._groups.hosts
        if route.levels.uneven:  # owners of keys are counted by inner groups of one size
            route = self._groups.flat()
        inner, mine = route.levels.inner, hosts[self.rank]
        remote = [hosts[place] != mine for place in route.levels.outer]
        self.first = Stage(route.outer.handle, route.outer.rank, len(inner), Here(), remote)
        if route.scatter is not None:
            near = [False] * len(inner)
            self.first = Stage(route.scatter.handle, route.scatter.rank, 1, self.first, near)
        self.hosts, self._levels = route.levels.nodes, route.levels
        # Of one flat exchange: the group of all ranks, who has which place, and who is elsewhere.
        self.everyone = group or dist.group.WORLD
        self.remote = [host != mine for host in hosts]

    @classmethod
    def of(cls, device: torch.device, group: dist.ProcessGroup | None) -> Ranks:
        """Those that tables of this device and group share. The first call is collective."""
        base = group or dist.group.WORLD
        assert base is not None
        by_device = _RANKS.setdefault(base, {})
        if device not in by_device:
            by_device[device] = cls(device, group)
        return by_device[device]

    @property
    def place(self) -> int:
        """The number of this rank among owners: `owner(key) == place` where the key is here."""
        levels = self._levels
        inner = levels.inner.index(self.rank)
        return levels.outer.index(self.rank) * len(levels.inner) + inner

    def places(self) -> list[int]:
        """The place of each rank. Collective."""
        told = torch.zeros(self.size, dtype=torch.float64)
        told[self.rank] = self.place
        return [int(each) for each in self.sum(told)]

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """The largest of all ranks' numbers, each by itself."""
        told = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._groups.control.handle)
        return [float(each) for each in told]

    def sum(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' numbers (float64, on the CPU)."""
        numbers = numbers.clone()
        dist.all_reduce(numbers, group=self._groups.control.handle)
        return numbers

    def give(
        self, ways: Sequence[Way], gradients: Sequence[torch.Tensor | None]
    ) -> tuple[list[Given], list[bool]]:
        """Gradients [n, dim] of lookups, None where a backward pass did not come there.

        Gives what this rank owns, and of each whether all its sums are finite, on every rank.
        """
        whole = [
            torch.zeros(len(way.order), way.asked.table.dim, device=way.order.device)
            if each is None
            else each
            for way, each in zip(ways, gradients, strict=True)
        ]
        largest = [
            each.abs().amax().double() if each.numel() else torch.zeros((), device=each.device)
            for each in whole
        ]
        bounds = torch.stack([each.double() for each in largest]).tolist()
        for i, each in enumerate(gradients):
            if each is None:
                bounds[i] = _ABSENT
        given = self.first.give(ways, whole, bounds)
        finite = [math.isfinite(each.bound) for each in given]
        near = [i for i, each in enumerate(given) if finite[i] and each.bound >= _SAFE]
        if near:  # the same on all ranks, as bounds are
            own = [0.0 if bool(given[i].sums.isfinite().all()) else 1.0 for i in near]
            for i, bad in zip(near, self.largest(own), strict=True):
                finite[i] = not bad
        return given, finite


_RANKS: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Ranks]] = (
    weakref.WeakKeyDictionary()
)


class Sharded:
    """A table over ranks; its lookups and gradients go through `ranks`, beside other tables'.

    `forms`: of values and of gradients, where they cross between hosts.
    """

    def __init__(
        self,
        rows: Rows,
        dim: int,
        forms: tuple[Form, Form],
        traffic: Traffic,
        ranks: Ranks,
        home: int | None = None,
    ) -> None:
        """home: the `place` of the rank that owns all rows; None: rows are spread."""
        self.rows, self.dim, self.forms, self.traffic = rows, dim, forms, traffic
        self.ranks, self.home = ranks, home
        self.size, self.place = ranks.size, ranks.place

    def owner(self, keys: torch.Tensor) -> torch.Tensor:
        """The rank of each key, by the number that `place` gives this rank."""
        return self.hashes(keys) % self.size

    def hashes(self, keys: torch.Tensor) -> torch.Tensor:
        """int64 [n], at least 0: what says which rank owns each key."""
        if self.home is not None:
            return torch.full_like(keys, self.home)
        found: torch.Tensor = hashes(keys)
        return found
