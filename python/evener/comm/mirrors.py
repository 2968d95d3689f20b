"""What all ranks sent last of one FSDP2 unit's weights, and how it is brought up to date, exactly.

Between two optimizer steps FSDP2 gathers the same weights again and again: in each forward pass, in
each backward pass, for each micro-batch. And a step moves most bf16 weights by a few units in the
last place. So each rank keeps a *mirror*: [world, n], a row for each rank. To refresh it is to

1. compare: the own shard with the mirror's own row;
2. announce: one number per rank (words of its message, 0 where nothing changed), and a checksum;
3. exchange messages of differences (`codecs.differences`), none where no rank has any;
4. apply them to the mirror's rows, which are then the weights, and check them against the checksum.

Where a message would be no smaller than the weights, all ranks send them whole, as they do the
first time; they see it in the same numbers. A weight of 32 bits is not coded: it goes whole where
any rank's changed.

When mirrors are refreshed, and how FSDP2 gets its weights from them, is `comm.ahead`'s. The mirror
lies on the GPU or in pinned host memory, as large as the unit in the dtype that is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from evener.comm.codecs import differences
from evener.comm.errors import CommError
from evener.comm.groups import Communicators

# A message that is not at least this much smaller than the weights is not worth its decoding.
WORTH = 0.8
_WHOLE = -1


@dataclass
class Traffic:
    """What the gathers of a model have moved; bytes are those that this rank received.

    `gathers`: calls of FSDP2. `unchanged`, `whole`: units that were compared and found so.
    """

    gathers: int = 0
    unchanged: int = 0
    whole: int = 0
    received: int = 0
    plain: int = 0

    def share(self) -> float:
        """Bytes received of those that plain FSDP2 would have received."""
        return self.received / self.plain if self.plain else 1.0


class Spread:
    """An all-gather in two levels: between nodes once for each node, then inside the node."""

    def __init__(self, communicators: Communicators) -> None:
        self.communicators = communicators
        self.size = communicators.size
        route = communicators.route
        self.outer, self.inner = route.outer, route.gather
        if route.levels.uneven:
            raise ValueError("nodes of unequal size have no inner level here")

    def __call__(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `payload` [n], in rank order: views of one buffer, on the current stream."""
        n, nodes = payload.numel(), self.outer.size
        found = payload.new_empty(nodes * n)
        self.outer.all_gather(found, payload)
        if self.inner is None:
            return list(found.view(nodes, n))
        every = payload.new_empty(self.inner.size * nodes * n)
        self.inner.all_gather(every, found)
        places = order(self.communicators)
        rows = every.view(-1, n)
        return [rows[place] for place in places]


def order(communicators: Communicators) -> list[int]:
    """For each rank, where [local rank, node] holds what is its."""
    levels = communicators.route.levels
    width, nodes = max(levels.sizes), len(levels.sizes)
    if not levels.two_level:
        return list(range(communicators.size))
    # Blocks in order of nodes and, within them, of ranks: as `topology.levels` makes them.
    seen: dict[str, list[int]] = {}
    for rank, host in enumerate(communicators.hosts):
        seen.setdefault(host, []).append(rank)
    blocks = [node[i : i + width] for node in seen.values() for i in range(0, len(node), width)]
    found = [0] * communicators.size
    for node, block in enumerate(blocks):
        for local, rank in enumerate(block):
            found[rank] = local * nodes + node
    return found


@dataclass
class Found:
    """One unit between its comparison and its end.

    `words`: by rank, those of its message. `rows`: what came, by rank.
    """

    own: torch.Tensor
    before: torch.Tensor | None
    headers: torch.Tensor | None
    words: list[int]
    stated: list[int]
    rows: list[torch.Tensor] | None = None

    @property
    def unchanged(self) -> bool:
        """Whether no rank has anything to send."""
        return all(count == 0 for count in self.words)

    @property
    def whole(self) -> bool:
        """Whether all ranks send their weights as they are."""
        return self.before is None or _WHOLE in self.words or self.headers is None


class Mirror:
    """One unit's mirror. `compare`, `send` and `apply` in turn, in the lane's thread.

    `name`: the unit, for messages. `host`: keep it in pinned host memory.
    """

    def __init__(self, name: str, spread: Spread, traffic: Traffic, host: bool) -> None:
        self.name, self.spread, self.traffic, self.host = name, spread, traffic, host
        self.rank = spread.communicators.rank
        self.rows: torch.Tensor | None = None
        self.filled = False
        # What this rank announced last, and how often a checksum did not match: on the device.
        self.sum: torch.Tensor | None = None
        self.wrong: torch.Tensor | None = None

    def forget(self) -> None:
        """The next refresh sends all weights. Collective in effect."""
        self.rows, self.filled, self.sum, self.wrong = None, False, None, None

    def compare(self, own: torch.Tensor) -> Found:
        """`own` [n] with what all know of it; what every rank has to send. The host waits.

        Collective. Raises CommError, on every rank, where one rank's weights were wrong.
        """
        rows, wrong = self._kept(own)
        coded = self.filled and differences.supports(own.dtype)
        before = rows[self.rank].to(own.device, non_blocking=True) if self.filled else None
        headers = differences.plan(own, before) if coded and before is not None else None
        mine = torch.zeros(3, dtype=torch.int64, device=own.device)
        if before is None:
            mine[0] = _WHOLE
        elif headers is None:
            mine[0] = torch.where((bits(own) != bits(before)).any(), _WHOLE, 0)
        else:
            size = differences.size(headers)
            most = int(WORTH * own.numel() * own.element_size() / 4)
            size = torch.where(size > most, _WHOLE, size)
            # Headers alone say that nothing changed.
            mine[0] = torch.where(size == headers.numel(), 0, size)
        self.sum = checksum(own)
        mine[1], mine[2] = self.sum, wrong
        # By the host: behind gradients on the GPU's communicator it would wait for their bytes.
        every = torch.empty(self.spread.size * 3, dtype=torch.int64)
        control = self.spread.communicators.control.handle
        dist.all_gather_into_tensor(every, mine.cpu(), group=control)
        announced = every.view(-1, 3).tolist()
        at_fault = [rank for rank, row in enumerate(announced) if row[2]]
        if at_fault:
            self.forget()
            raise CommError(
                f"the weights of {self.name} that rank {at_fault[0]} put together do not match "
                "what was sent, or were changed between a forward pass and the backward pass "
                "behind it: a step with wrong weights may lie behind you. Go back to the last "
                "checkpoint, and report this; mirror='off' gathers as plain FSDP2 does"
            )
        words, stated = [row[0] for row in announced], [row[1] for row in announced]
        found = Found(own, before, headers, words, stated)
        self.traffic.unchanged += found.unchanged
        return found

    def write(self, found: Found) -> torch.Tensor:
        """What this rank sends, int32 or the weights themselves: as long as the longest."""
        if found.whole or found.headers is None or found.before is None:
            return found.own
        message = torch.empty(max(found.words), dtype=torch.int32, device=found.own.device)
        if found.words[self.rank]:
            differences.write(found.own, found.before, found.headers, message)
        return message

    def send(self, found: Found, payload: torch.Tensor) -> None:
        """Collective, on the current stream."""
        self.traffic.whole += found.whole
        self.traffic.received += (self.spread.size - 1) * payload.nbytes
        found.rows = self.spread(payload)

    def apply(self, found: Found) -> None:
        """The mirror's rows <- the weights, on the current stream."""
        rows, came = self.rows, found.rows
        assert rows is not None and came is not None and self.wrong is not None
        if found.whole:
            for row, weights in zip(rows, came, strict=True):
                row.copy_(weights, non_blocking=True)
            self.filled = True
            return
        for rank, (count, message) in enumerate(zip(found.words, came, strict=True)):
            if not count:
                continue
            row = rows[rank]
            if rank == self.rank:
                row.copy_(found.own, non_blocking=True)
                continue
            weights = row.to(found.own.device, non_blocking=True)  # a copy, if it is not there
            differences.read(message[:count], weights)
            self.wrong += checksum(weights) != found.stated[rank]
            if weights.data_ptr() != row.data_ptr():
                row.copy_(weights, non_blocking=True)

    def copy(self, output: torch.Tensor, own: torch.Tensor) -> None:
        """The other ranks' rows into `output` [world * n], on the current stream.

        `own` [n]: what this rank gathers. It is held against what was announced; the next
        comparison tells all ranks where it was something else.
        """
        assert self.rows is not None and self.sum is not None and self.wrong is not None
        target = output.view(self.rows.shape)
        if own.data_ptr() != target[self.rank].data_ptr():
            target[self.rank].copy_(own)
        self.wrong += checksum(own) != self.sum
        for part in (slice(0, self.rank), slice(self.rank + 1, None)):
            target[part].copy_(self.rows[part], non_blocking=True)

    def _kept(self, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and counter; new ones where the unit is of another size or dtype than it was."""
        shape = (self.spread.size, own.numel())
        rows, wrong = self.rows, self.wrong
        if rows is None or wrong is None or rows.shape != shape or rows.dtype != own.dtype:
            pinned = self.host and own.is_cuda
            place = "cpu" if pinned else own.device
            rows = torch.empty(shape, dtype=own.dtype, device=place, pin_memory=pinned)
            wrong = torch.zeros((), dtype=torch.int64, device=own.device)
            self.rows, self.wrong, self.filled = rows, wrong, False
        return rows, wrong


def bits(weights: torch.Tensor) -> torch.Tensor:
    """As whole numbers of their width: minus zero is not zero, NaN is itself."""
    kinds: dict[int, Any] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return weights.view(kinds[weights.element_size()])


def checksum(weights: torch.Tensor) -> torch.Tensor:
    """An int64 scalar that differs where bits do, but for luck: a weighted sum that wraps."""
    flat = weights.reshape(-1)
    each = 8 // flat.element_size()
    if flat.storage_offset() % each:
        flat = flat.clone()
    words = flat[: flat.numel() // each * each].view(torch.int64)
    rest = bits(flat[words.numel() * each :]).to(torch.int64)
    # Odd factors, so that no bit of a word is lost.
    factors = torch.arange(1, 2 * words.numel() + 1, 2, device=flat.device)
    return (words * factors).sum() + (
        rest * torch.arange(3, 3 + rest.numel(), device=flat.device)
    ).sum()
