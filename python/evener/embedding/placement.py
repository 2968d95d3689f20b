"""Where the rows of tables lie, and what a step moves: a plan, from `use` and `measure`.

Rows are spread over ranks by the hash of their keys. Each rank has its rows in host memory; the
least used are on an SSD where they must, and copies of the most used on the GPU where they may.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from evener.base.budget import Budget
from evener.embedding import measure
from evener.embedding.options import Options, RowWiseAdagrad
from evener.embedding.use import Use
from evener.errors import UsageError

GAPS = 2
"""How many times the bytes of its rows an SSD's file may take: it is cleaned at half gaps."""

FROM_SSD = 9.3e-6
"""Seconds to read a row from the device, one thread (benchmarks/results/
embedding-tier-choice.json)."""

_ENDLESS = 1 << 60

_MOST = (1 << 31) - (1 << 14)  # rows of a store: ids have 31 bits, and shards take them in runs

PAYLOAD = 0.94
"""What TCP over IPv4 carries of a network's rate: 1448 of 1538 bytes of a frame."""


@dataclass(frozen=True)
class Table:
    """`rows` of these `options`; a sample has `ids` of them."""

    name: str
    rows: int
    ids: float
    options: Options
    use: Use


@dataclass(frozen=True)
class Cluster:
    """`nodes` with `ranks` each, which train `batch` samples each per step."""

    batch: int = 8192
    ranks: int = 1
    nodes: int = 1

    @property
    def size(self) -> int:
        """All ranks."""
        return self.ranks * self.nodes


@dataclass(frozen=True)
class Place:
    """Where one rank keeps its rows of one table. Rows on the GPU are copies of some on the host.

    `distinct`: rows that a step asks this rank for. Bytes of each tier; `kept` and `cold`: shares
    of `distinct` that are on the GPU, and that come from the SSD. `crossing`: bytes that this rank
    sends to other nodes per step. `row_bytes`: of a row in memory, its part of the index included.
    """

    table: Table
    rows: int
    row_bytes: float
    gpu_rows: int
    ssd_rows: int
    gpu_bytes: int
    host_bytes: int
    ssd_bytes: int
    distinct: float
    kept: float
    cold: float
    crossing: float

    @property
    def host_rows(self) -> int:
        """Rows in host memory; with an SSD tier at most."""
        return self.rows - self.ssd_rows


@dataclass(frozen=True)
class Plan:
    """A place for each table on a rank, beside the budget of a rank."""

    places: list[Place]
    budget: Budget

    def bytes(self, tier: str) -> int:
        """Return how many bytes all tables take in a tier: "gpu", "host" or "ssd"."""
        return sum(int(getattr(place, f"{tier}_bytes")) for place in self.places)

    @property
    def fits(self) -> bool:
        """Whether host memory and the SSD hold all; the GPU's rows are as many as fit."""
        return all(self.bytes(t) <= getattr(self.budget, t) for t in ("host", "ssd"))


def split(
    rows: Sequence[np.ndarray],
    worth: Sequence[np.ndarray],
    bytes: Sequence[float],
    least: Sequence[int],
    room: float,
) -> list[int]:
    """Rows of each table that go into `room` bytes, where a row is worth most per byte.

    rows, worth: of each table, its classes and what one row of each is worth, best first. A table
    gets no row or at least `least`: these are taken as one.
    """
    items: list[tuple[float, int, float, bool]] = []
    for i, (counts, each, size) in enumerate(zip(rows, worth, bytes, strict=True)):
        ends = np.cumsum(counts)
        value = np.interp(least[i], np.append(0, ends), np.append(0, np.cumsum(counts * each)))
        items.append((value / max(least[i], 1) / size, i, least[i], True))
        for end, count, one in zip(ends, counts, each, strict=True):
            if end > least[i] and one > 0:
                items.append((one / size, i, min(count, end - least[i]), False))
    taken, begun = [0.0] * len(rows), [False] * len(rows)
    for _, i, count, first in sorted(items, key=lambda item: -item[0]):
        fits = room / bytes[i]
        if first:
            begun[i] = fits >= count
        if begun[i]:
            more = min(count, fits)
            taken[i] += more
            room -= more * bytes[i]
    return [int(each + 1e-6) for each in taken]


def coldest(
    rows: Sequence[np.ndarray],
    worth: Sequence[np.ndarray],
    left: Callable[[np.ndarray], float],
    room: float,
) -> np.ndarray:
    """Rows of each table that go to the SSD, float64 [n]: as few as leave `room` bytes, those first
    that are worth least per byte. `left` says how many bytes there are without these rows."""
    table = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
    order = np.argsort(np.concatenate(worth), kind="stable")
    table, counts = table[order], np.concatenate(rows)[order]
    before = np.cumsum(counts) - counts

    def gone(total: float) -> np.ndarray:
        return np.asarray(np.bincount(table, np.clip(total - before, 0, counts), len(rows)).round())

    low, high = 0.0, float(counts.sum())
    if left(gone(low)) <= room:
        return gone(low)
    while high - low > 1:
        middle = (low + high) / 2
        low, high = (low, middle) if left(gone(middle)) <= room else (middle, high)
    return gone(high)


def plan(tables: Sequence[Table], cluster: Cluster, budget: Budget) -> Plan:
    """Where the rows of a rank lie. `budget`: of each GPU, and of the host memory and the SSD of a
    node, whose ranks share them."""
    budget = replace(budget, host=budget.host // cluster.ranks, ssd=budget.ssd // cluster.ranks)
    own = [math.ceil(table.rows / cluster.size) for table in tables]
    if (most := max(own)) > _MOST:
        raise UsageError(
            f"a table has {most:,} rows on a rank, and {_MOST:,} is the most of a store",
            f"give --nodes or --ranks: {math.ceil(most * cluster.size / _MOST)} ranks in all",
        )
    draws = [cluster.batch * cluster.size * table.ids for table in tables]
    met = [table.use.met(n) for table, n in zip(tables, draws, strict=True)]
    classes = [table.use.rows / cluster.size for table in tables]
    distinct = [float(n @ q) for n, q in zip(classes, met, strict=True)]
    each = [measure.row(table.options) for table in tables]
    free, index = zip(*(measure.index(n) for n in own), strict=True)

    def host(gone: np.ndarray) -> np.ndarray:
        """Bytes of each table. A step brings rows back from the SSD beside those that stay."""
        back = np.where(gone > 0, np.minimum(gone, distinct), 0)
        places = (np.array(own) - gone + back + free) * [row.host for row in each]
        return np.asarray(
            places + index + (gone > 0) * [row.buffer * measure.SHARDS for row in each]
        )

    none = np.zeros(len(tables))

    def worthwhile(gone: np.ndarray) -> np.ndarray:
        """Without the tables whose tier would take more memory than it frees."""
        return np.where(host(gone) < host(none), np.minimum(gone, np.array(own) - 1), 0)

    gone = none
    if budget.ssd:
        worth = [of / row.host for of, row in zip(met, each, strict=True)]
        gone = worthwhile(
            coldest(classes, worth, lambda g: float(host(worthwhile(g)).sum()), budget.host)
        )
    copies = [0] * len(tables)
    if budget.gpu:
        # A cache must have room for the different rows of any batch: their mean and 6 deviations.
        least = [
            min(table.rows, math.ceil(u + 6 * math.sqrt(u) + 1))
            for table, u in zip(tables, distinct, strict=True)
        ]
        on_gpu = [measure.cached(table.options) for table in tables]
        copies = split(classes, met, on_gpu, least, budget.gpu)
    places = []
    for i, table in enumerate(tables):
        ssd = int(gone[i])
        kept = table.use.kept(draws[i], copies[i] * cluster.size) if copies[i] else 0.0
        warm = table.use.kept(draws[i], (own[i] - ssd) * cluster.size) if ssd else 1.0
        place = Place(
            table,
            rows=own[i],
            row_bytes=host(none)[i] / own[i],
            gpu_rows=copies[i],
            ssd_rows=ssd,
            gpu_bytes=math.ceil(copies[i] * on_gpu[i]) if copies[i] else 0,
            host_bytes=math.ceil(host(gone)[i]),
            ssd_bytes=math.ceil(
                ssd and GAPS * ssd * each[i].file + each[i].buffer * measure.SHARDS
            ),
            distinct=distinct[i],
            kept=kept,
            cold=1 - max(kept, warm),
            crossing=_crossing(table, cluster),
        )
        places.append(place)
    return Plan(places, budget)


def _crossing(table: Table, cluster: Cluster) -> float:
    """Bytes that a rank sends to other nodes: its share of the different keys of its node, as many
    values for others, gradients of its own; and 16 bytes per node for counts (`torch.sharded`)."""
    keys = table.use.distinct(cluster.batch * cluster.ranks * table.ids) / cluster.ranks
    others = cluster.nodes - 1
    return others * (keys / cluster.nodes * (8 + 2 * 4 * table.options.dim) + 16)


def seconds(plan: Plan, cluster: Cluster, rate: int) -> dict[str, float]:
    """What a step takes at least, by what takes it; `rate`: bits per second of a node's network.

    The ranks of a node share its processors, which are taken to be those of this machine.
    """
    looked = stepped = cold = 0.0
    for place in plan.places:
        # One rank without a GPU asks the store for every id; others for different rows alone.
        alone = cluster.size == 1 and not place.gpu_rows
        rows = cluster.batch * place.table.ids if alone else place.distinct
        lookups, steps = measure.speed(place.table.options)
        looked += rows * (1 - place.kept) / lookups
        stepped += rows * (1 - place.kept) / steps
        cold += place.distinct * place.cold * FROM_SSD
    crossing = sum(place.crossing for place in plan.places) * cluster.ranks
    return {
        "lookups": looked * cluster.ranks,
        "optimizer": stepped * cluster.ranks,
        "SSD": cold,
        "network": crossing * 8 / (PAYLOAD * rate),
    }


def nearest(tables: Sequence[Table], cluster: Cluster, budget: Budget, at: Plan) -> Iterator[str]:
    """What would make it fit, one thing at a time, each tried."""

    def fits(budget: Budget = budget, cluster: Cluster = cluster, **options: Any) -> Plan | None:
        changed = [replace(t, options=replace(t.options, **options)) for t in tables]
        made = plan(changed, cluster, replace(budget, gpu=0))
        return made if made.fits else None

    if made := fits(replace(budget, ssd=_ENDLESS)):
        need = made.bytes("ssd") * cluster.ranks
        yield f"--ssd {budget.folder or '/mnt/nvme'}:{_gigabytes(need)}"
    if fits(optimizer=RowWiseAdagrad()):
        yield "RowWiseAdagrad"
    if fits(dtype="f16"):
        yield "dtype f16"
    # Each table has a part that does not shrink, so one node more than the sum says may be needed.
    more = max(
        cluster.nodes + 1, math.ceil(cluster.nodes * at.bytes("host") / max(at.budget.host, 1))
    )
    for nodes in (more, more + 1):
        if fits(cluster=replace(cluster, nodes=nodes)):
            yield f"--nodes {nodes}"
            break
    if made := fits(replace(budget, host=_ENDLESS)):
        yield f"--host {_gigabytes(made.bytes('host') * cluster.ranks)}"


def _gigabytes(size: int) -> str:
    """Return bytes as GB, rounded up: to 0.1 GB below 10 GB."""
    return f"{math.ceil(size / 1e8) / 10:g}GB" if size < 1e10 else f"{math.ceil(size / 1e9)}GB"
