"""What forms share that send small integers in blocks, each block with a scale of its own.

Between two ranks each sends all of its codes and adds up both: one exchange, one rounding. Between
more, each rank reduces one part of the shard: codes go to the rank whose part they are
(all-to-all), are added in FP32, rounded again, and gathered: the bytes of an all-reduce, whatever
the number of ranks. What the second rounding takes away goes into the residual of the rank that
rounded, so that nothing is lost there either.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch

from evener.comm.buckets import padded
from evener.comm.codecs import int8
from evener.comm.groups import Route
from evener.comm.options import Options
from evener.comm.scratch import Scratch
from evener.comm.state import ShardState
from evener.comm.wires.base import Paper, Wire


class BlockWire(Wire):
    """See the module. A form says how large blocks and codes are, and how to write and add them."""

    lossy = feedback = True
    block: ClassVar[int]
    bits: ClassVar[int]

    def __init__(self, route: Route, options: Options) -> None:
        super().__init__(route, options)
        self._payload, self._received = Scratch(), Scratch()
        self._second, self._part = Scratch(), Scratch()

    @classmethod
    @abstractmethod
    def quantize(
        cls,
        values: torch.Tensor,
        residual: torch.Tensor | None,
        codes: torch.Tensor,
        scales: torch.Tensor,
        key: int,
        left: torch.Tensor | None = None,
    ) -> None:
        """`values` [n] plus `residual` [n] as uint8 codes and float32 scales; `key`: for chance.

        `left` <- what rounding took away; without it, `residual` keeps that.
        """

    @classmethod
    @abstractmethod
    def add_up(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor,
        factor: float,
        out: torch.Tensor,
        own: torch.Tensor | None = None,
    ) -> None:
        """`out` [n] = `factor` times the sum over ranks of codes [ranks, bytes] times scales.

        And + `own` [n]. Added in float32, `own` last.
        """

    @classmethod
    def paper(cls, ratio: float) -> Paper:
        """See `Wire`: the codes, and an FP32 scale a block."""
        del ratio
        return Paper(cls.name, (cls.bits / 8 + 4 / cls.block) / 4, True, 4.0)

    @classmethod
    def room(cls, n: int, parts: int = 1) -> int:
        """Entries for `n` values in `parts` equal parts of whole blocks."""
        return padded(n, cls.block * parts)

    @classmethod
    def size(cls, room: int) -> int:
        """Bytes of codes and scales for `room` entries; a multiple of 16, so that all align."""
        return padded(room * cls.bits // 8 + 4 * (room // cls.block), 16)

    @classmethod
    def views(cls, raw: torch.Tensor, room: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes, uint8 [ranks, ...], and scales, float32 [ranks, blocks], of [ranks, bytes]."""
        codes = room * cls.bits // 8
        end = codes + 4 * (room // cls.block)
        return raw[:, :codes], raw[:, codes:end].view(torch.float32)

    def exchange(self, shard: torch.Tensor, state: ShardState) -> None:
        """See `Wire`."""
        residual = state.residual_for(shard)
        if self.outer.size == 2:
            self._gather_all(shard, residual, state)
        else:
            self._by_parts(shard, residual, state)

    def _gather_all(self, shard: torch.Tensor, residual: torch.Tensor, state: ShardState) -> None:
        room = self.room(shard.numel())
        size = self.size(room)
        received = self._received.get(2 * size, torch.uint8, shard.device)
        payload, codes, scales, *both = self._cut(received, room)
        self.quantize(shard, residual, codes, scales, self._key(state, 0))
        self.outer.all_gather(received, payload)
        self.add_up(both[0], both[1], self.scaling.outer, shard)

    def _cut(self, received: torch.Tensor, room: int) -> tuple[torch.Tensor, ...]:
        """Payload, its codes and scales, and all that come: views, kept as long as `received` is.

        Making them takes a host as long as a kernel's launch.
        """
        kept: tuple[torch.Tensor, ...] | None = received.__dict__.get("evener_cut")
        if kept is not None:
            return kept
        payload = self.outer.room(received)
        own = payload is None
        if payload is None:
            payload = self._payload.get(received.numel() // 2, torch.uint8, received.device)
        codes, scales = self.views(payload.unsqueeze(0), room)
        found = (payload, codes[0], scales[0], *self.views(received.view(2, -1), room))
        if not own:
            received.__dict__["evener_cut"] = found
        return found

    def _by_parts(self, shard: torch.Tensor, residual: torch.Tensor, state: ShardState) -> None:
        peers, rank, n = self.outer.size, self.outer.rank, shard.numel()
        room = self.room(n, peers) // peers
        starts = [min(n, part * room) for part in range(peers + 1)]
        size = self.size(room)
        payload = self._payload.get(size * peers, torch.uint8, shard.device).view(peers, -1)
        codes, scales = self.views(payload, room)
        for part in range(peers):
            own = slice(starts[part], starts[part + 1])
            key = self._key(state, part)
            self.quantize(shard[own], residual[own], codes[part], scales[part], key)
        received = self._received.get(size * peers, torch.uint8, shard.device)
        self.outer.all_to_all(received, payload.view(-1))
        mine = slice(starts[rank], starts[rank + 1])
        total = self._part.get(mine.stop - mine.start, torch.float32, shard.device)
        self.add_up(*self.views(received.view(peers, -1), room), self.scaling.outer, total)
        second = self._second.get(size, torch.uint8, shard.device)
        codes, scales = self.views(second.unsqueeze(0), room)
        # `total` becomes its own residual: nothing was there before.
        left = torch.zeros_like(total)
        self.quantize(total, left, codes[0], scales[0], self._key(state, peers))
        residual[mine].add_(left, alpha=1.0 / self.scaling.outer)
        self.outer.all_gather(received, second)
        codes, scales = self.views(received.view(peers, -1), room)
        for part in range(peers):
            out = shard[starts[part] : starts[part + 1]]
            self.add_up(codes[part : part + 1], scales[part : part + 1], 1.0, out)

    def _key(self, state: ShardState, stream: int) -> int:
        place = 0 if self.route.scatter is None else self.route.scatter.rank
        return int8.key(state.steps, state.bucket, self.outer.rank, place, stream)

    def sent_bytes(self, numel: int, itemsize: int, state: ShardState | None = None) -> int:
        """See `Wire`."""
        del itemsize
        return super().sent_bytes(self.size(self.room(numel, self.outer.size)), 1)
