"""The send and receive buffers of one rank: what goes in, what must be in them after.

`raw` memory in bytes; every collective looks at it with its own type, length and offset. In place,
the send buffer is a part of the receive buffer (or the other way round), where nccl-tests puts it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evener.tools.bench.collectives import values
from evener.tools.bench.collectives.shapes import Collective, Shape


class Buffers:
    """One rank's memory. `first`: bytes of misalignment (-u)."""

    def __init__(self, send: Tensor, receive: Tensor, rank: int, ranks: int, unalign: int) -> None:
        self._send, self._receive = send, receive
        self.rank, self.ranks, self.unalign = rank, ranks, unalign

    def send(self, shape: Shape, kind: str, in_place: bool) -> Tensor:
        """What the call sends from."""
        if in_place:
            offset = shape.send_offset * self.rank
            return self._part(self._receive, kind, offset, shape.send)
        return self._part(self._send, kind, 0, shape.send)

    def receive(self, shape: Shape, kind: str, in_place: bool) -> Tensor:
        """What the call receives into."""
        offset = shape.receive_offset * self.rank if in_place else 0
        return self._part(self._receive, kind, offset, shape.receive)

    def _part(self, raw: Tensor, kind: str, offset: int, count: int) -> Tensor:
        dtype = values.DTYPES[kind]
        item = torch.empty((), dtype=dtype).element_size()
        start = (self.unalign + offset) * item
        return raw[start : start + count * item].view(dtype)

    def fill(
        self, one: Collective, shape: Shape, kind: str, op: str, in_place: bool, repetition: int
    ) -> None:
        """Clear the receive buffer and put this rank's contribution in."""
        self._receive.zero_()
        send = self.send(shape, kind, in_place)
        if one.name in ("alltoall", "scatter"):
            for block in range(self.ranks):
                part = send[block * shape.count : (block + 1) * shape.count]
                values.fill(part, self._moved(kind, self.rank, repetition, block))
        elif one.name == "reduce_scatter":
            for block in range(self.ranks):
                part = send[block * shape.count : (block + 1) * shape.count]
                values.fill(part, self._put(kind, op, repetition + block))
        elif one.reduces:
            values.fill(send, self._put(kind, op, repetition))
        else:
            values.fill(send, self._moved(kind, self.rank, repetition))

    def wrong(
        self, one: Collective, shape: Shape, kind: str, op: str, root: int,
        in_place: bool, repetition: int,
    ) -> int:  # fmt: skip
        """Elements of the result that are not what they must be."""
        got = self.receive(shape, kind, in_place)
        if one.reduces:
            if one.name == "reduce" and self.rank != root:
                return 0
            # Each block has values of its own, so that a block in the wrong place is seen.
            block = self.rank if one.name == "reduce_scatter" else 0
            want = values.reduced(kind, op, self.ranks, repetition + block)
            return values.wrong(got, want, values.tolerance(kind, op, self.ranks))
        if one.name == "broadcast":
            return values.wrong(got, self._moved(kind, root, repetition))
        if one.name == "sendrecv":
            return values.wrong(got, self._moved(kind, (self.rank - 1) % self.ranks, repetition))
        if one.name == "scatter":
            return values.wrong(got, self._moved(kind, root, repetition, self.rank))
        if one.name == "gather" and self.rank != root:
            return 0
        mine = self.rank if one.name == "alltoall" else 0
        return sum(
            values.wrong(
                got[source * shape.count : (source + 1) * shape.count],
                self._moved(kind, source, repetition, mine),
            )
            for source in range(self.ranks)
        )

    def _put(self, kind: str, op: str, repetition: int) -> Tensor:
        return values.contribution(kind, op, self.rank, self.ranks, repetition)

    def _moved(self, kind: str, rank: int, repetition: int, block: int = 0) -> Tensor:
        return values.contribution(kind, "none", rank, self.ranks, repetition, block)


def needed(largest: int, unalign: int) -> int:
    """Bytes of each buffer: a shape's larger side is at most the size that was asked for."""
    return max(largest, 1) + 8 * unalign
