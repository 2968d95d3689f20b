"""What all ranks sent last of one FSDP2 unit's weights, and how it is brought up to date, exactly.

Between two optimizer steps FSDP2 gathers the same weights again and again: in each forward pass, in
each backward pass, for each micro-batch. And a step moves most bf16 weights by a few units in the
last place. So each rank keeps a *mirror*: [world, n], a row for each rank. To refresh it is to

1. look: the own shard beside the mirror's own row;
2. announce: one number per rank (words of its message, 0 where nothing changed), and a checksum;
   of several units at once, because the host waits here;
3. exchange messages of differences (`codecs.differences`), none where no rank has any;
4. apply them to the mirror's rows, which are then the weights, and check them against the checksum.

Where a message would be no smaller than the weights, all ranks send them whole, as they do the
first time; they see it in the same numbers. A weight of 32 bits is not coded: it goes whole where
any rank's changed.

When mirrors are refreshed, and how FSDP2 gets its weights from them, is `comm.ahead`'s. The mirror
lies on the GPU or in pinned host memory, as large as the unit in the dtype that is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from evener.comm.codecs import checks, differences
from evener.comm.codecs.checks import bits
from evener.comm.errors import CommError
from evener.comm.groups import Communicators

# A message that is not at least this much smaller than the weights is not worth its decoding.
WORTH = 0.8
_WHOLE = -1
# Checksums of one unit, beside those of what came, before the verdicts on them become one.
_VERDICTS = 32


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

    `says`: what this rank announces, int64 [3] on the device: the words that its message would
    have (negative: it sends its weights), its checksum, and how many checksums were wrong.
    `headers`, `first`: of its message. `words`: by rank, those of its message. `stated`: every
    rank's checksum, int64 [ranks] on the device. `rows`: what came, by rank.
    """

    own: torch.Tensor
    before: torch.Tensor | None
    headers: torch.Tensor | None
    first: torch.Tensor | None
    says: torch.Tensor
    words: list[int] = field(default_factory=list)
    stated: torch.Tensor | None = None
    rows: list[torch.Tensor] | None = None

    @property
    def unchanged(self) -> bool:
        """Whether no rank has anything to send."""
        return all(count == 0 for count in self.words)

    @property
    def whole(self) -> bool:
        """Whether all ranks send their weights as they are."""
        return self.before is None or _WHOLE in self.words or self.headers is None

    def counts(self, said: int) -> int:
        """The words that a rank sends which announced `said`; `_WHOLE`: its weights."""
        if said < 0 or self.headers is None:
            return _WHOLE if said else 0
        if said == self.headers.numel():
            return 0  # headers alone say that nothing changed
        most = int(WORTH * self.own.nbytes / 4)
        return said if said <= most else _WHOLE


def announce(looked: Sequence[tuple[Mirror, Found]]) -> None:
    """Tell all ranks what each has of these units, and take what they say. The host waits.

    Collective. Raises CommError, on every rank, where one rank's weights were wrong.
    """
    first = looked[0][0]
    size = first.spread.size
    mine = torch.cat([found.says for _, found in looked])
    every = torch.empty(size * mine.numel(), dtype=torch.int64)
    # By the host: behind gradients on the GPU's communicator it would wait for their bytes.
    control = first.spread.communicators.control.handle
    dist.all_gather_into_tensor(every, mine.cpu(), group=control)
    table = every.view(size, len(looked), 3).transpose(0, 1)
    stated = table[:, :, 1].contiguous().to(mine.device, non_blocking=True)
    faults: list[tuple[str, int]] = []
    for (mirror, found), sums, said in zip(looked, stated, table.tolist(), strict=True):
        wrong = [rank for rank, row in enumerate(said) if row[2]]
        if wrong:
            faults.append((mirror.name, wrong[0]))
            mirror.forget()
        found.words, found.stated = [found.counts(row[0]) for row in said], sums
        mirror.traffic.unchanged += found.unchanged
    if faults:
        name, rank = faults[0]
        raise CommError(
            f"the weights of {name} that rank {rank} put together do not match what was sent, or "
            "were changed between a forward pass and the backward pass behind it: a step with "
            "wrong weights may lie behind you. Go back to the last checkpoint, and report this; "
            "mirror='off' gathers as plain FSDP2 does"
        )


class Mirror:
    """One unit's mirror. `look`, `announce`, `write`, `send` and `apply` in turn, in the lane's
    thread.

    `name`: the unit, for messages. `host`: keep it in pinned host memory.
    """

    def __init__(self, name: str, spread: Spread, traffic: Traffic, host: bool) -> None:
        self.name, self.spread, self.traffic, self.host = name, spread, traffic, host
        self.rank = spread.communicators.rank
        parts = slice(0, self.rank), slice(self.rank + 1, spread.size)
        self._others = [part for part in parts if part.start < part.stop]
        self.rows: torch.Tensor | None = None
        self.filled = False
        # What this rank announced last, and for each checksum since then how far it was off: on the
        # device.
        self.sum: torch.Tensor | None = None
        self._off: torch.Tensor | None = None
        self._held = 0

    def forget(self) -> None:
        """The next refresh sends all weights. Collective in effect."""
        self.rows, self.filled, self.sum, self._off, self._held = None, False, None, None, 0

    def look(self, own: torch.Tensor) -> Found:
        """`own` [n] beside what all know of it; only enqueues, on the current stream."""
        rows, off = self._kept(own)
        before = rows[self.rank].to(own.device, non_blocking=True) if self.filled else None
        headers = first = None
        says = torch.empty(3, dtype=torch.int64, device=own.device)
        if before is not None and differences.supports(own.dtype):
            headers = differences.plan(own, before)
            first = differences.places(headers, says)
        else:
            says.zero_()
            says[:1] = _WHOLE if before is None else -(bits(own) != bits(before)).any().long()
        checks.tell(own, off, says[1:])
        self.sum, self._held = says[1], 0
        return Found(own, before, headers, first, says)

    def write(self, found: Found) -> torch.Tensor:
        """What this rank sends, int32 or the weights themselves: as long as the longest."""
        before, headers, first = found.before, found.headers, found.first
        if found.whole or before is None or headers is None or first is None:
            return found.own
        message = torch.empty(max(found.words), dtype=torch.int32, device=found.own.device)
        if found.words[self.rank]:
            differences.write(found.own, before, headers, first, message)
        return message

    def send(self, found: Found, payload: torch.Tensor) -> None:
        """Collective, on the current stream."""
        self.traffic.whole += found.whole
        self.traffic.received += (self.spread.size - 1) * payload.nbytes
        found.rows = self.spread(payload)

    def apply(self, found: Found) -> None:
        """The mirror's rows <- the weights, on the current stream."""
        rows, came = self.rows, found.rows
        assert rows is not None and came is not None and found.stated is not None
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
            self._hold(weights, found.stated[rank])
            if weights.data_ptr() != row.data_ptr():
                row.copy_(weights, non_blocking=True)

    def copy(self, output: torch.Tensor, own: torch.Tensor) -> None:
        """The other ranks' rows into `output` [world * n], on the current stream.

        `own` [n]: what this rank gathers. It is held against what was announced; the next
        comparison tells all ranks where it was something else.
        """
        assert self.rows is not None and self.sum is not None
        target = output.view(self.rows.shape)
        if own.data_ptr() != output.data_ptr() + self.rank * own.nbytes:
            target[self.rank].copy_(own)
        self._hold(own, self.sum)
        for part in self._others:
            target[part].copy_(self.rows[part], non_blocking=True)

    def _hold(self, weights: torch.Tensor, stated: torch.Tensor) -> None:
        """`weights` against their checksum: what is found is told with the next `look`."""
        assert self._off is not None
        if self._held == len(self._off):  # many micro-batches: their verdicts become one
            wrong = self._off.count_nonzero()
            self._off.zero_()
            self._off[0] = wrong
            self._held = 1
        checks.hold(weights, stated, self._off, self._held)
        self._held += 1

    def _kept(self, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and verdicts; new ones where the unit is of another size or dtype than it was."""
        shape = (self.spread.size, own.numel())
        rows, off = self.rows, self._off
        if rows is None or off is None or rows.shape != shape or rows.dtype != own.dtype:
            pinned = self.host and own.is_cuda
            place = "cpu" if pinned else own.device
            rows = torch.empty(shape, dtype=own.dtype, device=place, pin_memory=pinned)
            off = torch.zeros(self.spread.size + _VERDICTS, dtype=torch.int64, device=own.device)
            self.rows, self._off, self._held, self.filled = rows, off, 0, False
        return rows, off
