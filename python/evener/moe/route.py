"""The way of tokens between ranks: one hop or two, and back the same way.

**One hop** (flat): to every rank that has an expert for it, once per rank. **Two hops**: once to
every node that has one, to the rank with the sender's place in that node; that rank spreads it
inside. On the way back the sums are made at the same places: inside the node first, so one row per
node and token crosses the network, in each direction. (HierMoE, arXiv 2508.09591; DeepEP.)
`pairs` sends a row for each choice, as an all-to-all without de-duplication does: to compare with.

How many rows go where follows from each rank's own choices, so one all-gather of counts tells all
ranks everything, and the host waits once per layer and step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch.nn import functional

from evener.moe import permute
from evener.moe.positions import Positions

Way = Literal["two", "flat", "pairs"]


@dataclass(frozen=True)
class Ranks:
    """The ranks that share the experts: `nodes` of `each`, rank = node * each + place.

    group: all; outer: the ranks of this place on all nodes; inner: those of this node. The last two
    are None where there is no second level.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    nodes: int
    each: int
    outer: dist.ProcessGroup | None
    inner: dist.ProcessGroup | None

    @property
    def node(self) -> int:
        return self.rank // self.each

    def groups(self) -> list[dist.ProcessGroup]:
        return [g for g in (self.group, self.outer, self.inner) if g is not None]


@dataclass
class Hop:
    """Rows go to the ranks of `group`: `sent[i]` to its rank i, `got[i]` come from there."""

    at: Positions
    group: dist.ProcessGroup
    sent: list[int]
    got: list[int]

    def of_entries(self) -> Hop:
        """The same way for what has a row per entry, not per token."""
        at = Positions(self.at.rows.view(-1, 1), self.at.source, self.at.ends)
        return replace(self, at=at)

    def there(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, width] > [rows here, width]."""
        rows = permute.gather(x, self.at)
        out = torch.empty(sum(self.got), x.shape[1], dtype=x.dtype, device=x.device)
        dist.all_to_all_single(out, rows, self.got, self.sent, group=self.group)
        return out

    def returned(self, y: torch.Tensor) -> torch.Tensor:
        """[rows here, width] > [rows that left, width], each where it left."""
        rows = torch.empty(sum(self.sent), y.shape[1], dtype=y.dtype, device=y.device)
        dist.all_to_all_single(rows, y.contiguous(), self.sent, self.got, group=self.group)
        return rows

    def back(self, y: torch.Tensor) -> torch.Tensor:
        """[rows here, width] > [tokens, width]: the sum of each token's rows."""
        return permute.combine(self.returned(y), self.at)


def pack(x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """Two tensors of as many rows > int32 [rows, words]: one collective instead of two."""
    parts = []
    for each in (x, more):
        whole = each.contiguous().view(torch.uint8)
        parts.append(functional.pad(whole, (0, -whole.shape[1] % 16)))
    return torch.cat(parts, 1).view(torch.int32)


def unpack(
    rows: torch.Tensor, x: torch.Tensor, more: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `pack` took, as views; `x` and `more` say widths and dtypes."""
    start = -(-x.shape[1] * x.element_size() // 16) * 16 // more.element_size()
    return (rows.view(x.dtype)[:, : x.shape[1]],
            rows.view(more.dtype)[:, start : start + more.shape[1]])  # fmt: skip


@dataclass
class Trip:
    """A chunk's way: its hops, and for the experts here their rows.

    at: rows of the experts here; weights: of the rows that came.
    """

    ranks: Ranks
    way: Way
    counts: Counts
    chunk: int
    hops: list[Hop] = field(default_factory=list)
    at: Positions | None = None
    weights: torch.Tensor | None = None

    def start(
        self, x: torch.Tensor, meta: torch.Tensor, owner: torch.Tensor, slot: torch.Tensor,
        held: int,
    ) -> torch.Tensor:  # fmt: skip
        """Tokens go to their experts, choices and weights in their rows; the way is kept.

        x [tokens, width]; meta [tokens, 2k]: choices, then weights. owner, slot [experts + 1]: of
        each expert its rank and its place there; -1 for none, which is the last entry.
        """
        ranks, counts, chunk = self.ranks, self.counts, self.chunk
        k = meta.shape[1] // 2
        to = owner[meta[:, :k].long()]
        if self.way == "pairs":
            each = torch.stack((meta[:, :k].reshape(-1), meta[:, k:].reshape(-1)), 1)
            self._hop(to, ranks.size, ranks.group, *counts.pairs(chunk))
            hop = self.hops[0]
            come, meta = hop.there(x), hop.of_entries().there(each)
        else:
            inner = ranks.inner if self.way == "two" else None
            if inner is not None:
                assert ranks.outer is not None
                nodes = torch.where(to < 0, -1, to.div(ranks.each, rounding_mode="floor"))
                self._hop(_once(nodes, ranks.nodes), ranks.nodes, ranks.outer, *counts.outer(chunk))
            else:
                self._hop(_once(to, ranks.size), ranks.size, ranks.group, *counts.flat(chunk))
            rows = self.hops[0].there(pack(x, meta))
            if inner is not None:
                to = owner[unpack(rows, x, meta)[1][:, :k].long()]
                here = (to >= 0) & (to.div(ranks.each, rounding_mode="floor") == ranks.node)
                inside = torch.where(here, to % ranks.each, -1)
                self._hop(_once(inside, ranks.each), ranks.each, inner, *counts.inner(chunk))
                rows = self.hops[1].there(rows)
            come, meta = unpack(rows, x, meta)
        chosen, weights = meta.chunk(2, 1)
        chosen = chosen.long()
        mine = torch.where(owner[chosen] == ranks.rank, slot[chosen], -1)
        self.at = permute.positions(mine, held).first(counts.here(chunk))
        self.weights = weights.contiguous()
        return come

    def _hop(
        self, to: torch.Tensor, ends: int, group: dist.ProcessGroup, sent: list[int], got: list[int]
    ) -> None:
        self.hops.append(Hop(permute.positions(to, ends).first(sum(sent)), group, sent, got))

    def there(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens go to their experts."""
        for hop in self.hops:
            x = hop.there(x)
        return x

    def back(self, y: torch.Tensor) -> torch.Tensor:
        """Sums come back to their tokens."""
        for hop in reversed(self.hops):
            y = hop.back(y)
        return y

    def gradients_back(
        self, y: torch.Tensor, weights: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of tokens and of weights [rows, k] > [tokens, width] and [tokens, k].

        A weight's is made on one rank; the others add zeros.
        """
        if self.way == "pairs":
            hop = self.hops[0]
            return hop.back(y), hop.of_entries().back(weights).view(-1, k)
        for hop in reversed(self.hops):
            of_tokens, of_weights = unpack(hop.returned(pack(y, weights)), y, weights)
            y, weights = permute.combine(of_tokens, hop.at), permute.combine(of_weights, hop.at)
        return y, weights


def _once(to: torch.Tensor, ends: int) -> torch.Tensor:
    """[tokens, k] destinations, some equal > [tokens, ends]: each once, or -1."""
    hit = hits(to, ends)
    return torch.where(hit, torch.arange(ends, device=to.device), -1)


def hits(to: torch.Tensor, ends: int) -> torch.Tensor:
    """bool [tokens, ends]: whether one of a token's destinations `to` [tokens, k] is that."""
    hit = torch.zeros(len(to), ends + 1, dtype=torch.bool, device=to.device)
    return hit.scatter_(1, torch.where(to < 0, ends, to), True)[:, :ends]


def count(to: torch.Tensor, ranks: Ranks, chunks: int) -> torch.Tensor:
    """What one rank tells all: int64 [chunks, nodes + 2 size], from the ranks `to` [tokens, k].

    For each chunk: tokens for each node, tokens for each rank, choices of each rank.
    """
    hit = hits(to, ranks.size)
    by_node = hit.view(len(to), ranks.nodes, ranks.each).any(2)
    pairs = torch.zeros(len(to), ranks.size + 1, dtype=torch.int32, device=to.device)
    pairs.scatter_add_(
        1, torch.where(to < 0, ranks.size, to), torch.ones_like(to, dtype=torch.int32)
    )
    each = torch.cat((by_node.int(), hit.int(), pairs[:, :-1]), 1)
    return torch.stack([part.sum(0) for part in each.tensor_split(chunks)])


class Counts:
    """The counts of all ranks, on the host: [rank][chunk][nodes + 2 size]."""

    def __init__(self, ranks: Ranks, told: list[list[list[int]]]) -> None:
        self.ranks, self.told = ranks, told

    def _cells(self, chunk: int, start: int, stop: int) -> list[list[int]]:
        return [each[chunk][start:stop] for each in self.told]

    def outer(self, chunk: int) -> tuple[list[int], list[int]]:
        """Sent to, and come from, the ranks of this place."""
        ranks, cells = self.ranks, self._cells(chunk, 0, self.ranks.nodes)
        peers = [node * ranks.each + ranks.rank % ranks.each for node in range(ranks.nodes)]
        return cells[ranks.rank], [cells[peer][ranks.node] for peer in peers]

    def inner(self, chunk: int) -> tuple[list[int], list[int]]:
        """Sent to, and come from, the ranks of this node, for all who send through them."""
        ranks = self.ranks
        cells = self._cells(chunk, ranks.nodes, ranks.nodes + ranks.size)
        base = ranks.node * ranks.each

        def through(place: int, to: int) -> int:
            return sum(cells[node * ranks.each + place][base + to] for node in range(ranks.nodes))

        own = ranks.rank % ranks.each
        return ([through(own, to) for to in range(ranks.each)],
                [through(place, own) for place in range(ranks.each)])  # fmt: skip

    def flat(self, chunk: int) -> tuple[list[int], list[int]]:
        ranks = self.ranks
        cells = self._cells(chunk, ranks.nodes, ranks.nodes + ranks.size)
        return cells[ranks.rank], [each[ranks.rank] for each in cells]

    def pairs(self, chunk: int) -> tuple[list[int], list[int]]:
        ranks = self.ranks
        cells = self._cells(chunk, ranks.nodes + ranks.size, ranks.nodes + 2 * ranks.size)
        return cells[ranks.rank], [each[ranks.rank] for each in cells]

    def here(self, chunk: int) -> int:
        """Rows of the experts of this rank."""
        return sum(self.pairs(chunk)[1])
