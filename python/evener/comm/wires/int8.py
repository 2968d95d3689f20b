"""INT8 in blocks: a quarter of FP32's bytes (`evener.comm.int8`), with error feedback.

Between two ranks each sends all of its codes and adds up both: one exchange, one rounding. Between
more, each rank reduces one part of the shard: codes go to the rank whose part they are
(all-to-all), are added in FP32, rounded again, and gathered: the bytes of an all-reduce, whatever
the number of ranks. What the second rounding takes away goes into the residual of the rank that
rounded, so that nothing is lost there either.
"""

from __future__ import annotations

import torch

from evener.comm import int8
from evener.comm.buckets import padded
from evener.comm.groups import Route
from evener.comm.options import Options
from evener.comm.scratch import Scratch
from evener.comm.state import ShardState
from evener.comm.wires.base import Limits, Paper, Wire, register


@register
class Int8Wire(Wire):
    """See the module."""

    name = "int8"
    title = "INT8"
    what = "8-bit integers in blocks between nodes, with error feedback"
    place = 20
    first_update = 0.05
    milder, rows_as = "bf16", "int8"
    lossy = feedback = True
    limits = Limits(residual=1.0, cosine=0.9)

    def __init__(self, route: Route, options: Options) -> None:
        super().__init__(route, options)
        self._payload, self._received = Scratch(), Scratch()
        self._second, self._part = Scratch(), Scratch()

    @classmethod
    def paper(cls, ratio: float) -> Paper:
        """See `Wire`: a byte an entry, and an FP32 scale a block."""
        del ratio
        return Paper(cls.name, (1 + 4 / int8.BLOCK) / 4, True, 4.0)

    def exchange(self, shard: torch.Tensor, state: ShardState) -> None:
        """See `Wire`."""
        residual = state.residual_for(shard)
        if self.outer.size == 2:
            self._gather_all(shard, residual, state)
        else:
            self._by_parts(shard, residual, state)

    def _gather_all(self, shard: torch.Tensor, residual: torch.Tensor, state: ShardState) -> None:
        room = int8.room(shard.numel())
        payload = self._payload.get(_bytes(room), torch.uint8, shard.device)
        codes, scales = _views(payload.unsqueeze(0), room)
        int8.quantize(shard, residual, codes[0], scales[0], self._key(state, 0))
        received = self._received.get(payload.numel() * 2, torch.uint8, shard.device)
        self.outer.all_gather(received, payload)
        self._add_up(received.view(2, -1), room, shard)

    def _by_parts(self, shard: torch.Tensor, residual: torch.Tensor, state: ShardState) -> None:
        peers, rank, n = self.outer.size, self.outer.rank, shard.numel()
        room = int8.room(n, peers) // peers
        starts = [min(n, part * room) for part in range(peers + 1)]
        size = _bytes(room)
        payload = self._payload.get(size * peers, torch.uint8, shard.device).view(peers, -1)
        codes, scales = _views(payload, room)
        for part in range(peers):
            own = slice(starts[part], starts[part + 1])
            key = self._key(state, part)
            int8.quantize(shard[own], residual[own], codes[part], scales[part], key)
        received = self._received.get(size * peers, torch.uint8, shard.device)
        self.outer.all_to_all(received, payload.view(-1))
        mine = slice(starts[rank], starts[rank + 1])
        total = self._part.get(mine.stop - mine.start, torch.float32, shard.device)
        self._add_up(received.view(peers, -1), room, total)
        second = self._second.get(size, torch.uint8, shard.device)
        codes, scales = _views(second.unsqueeze(0), room)
        # `total` becomes its own residual: nothing was there before.
        left = torch.zeros_like(total)
        int8.quantize(total, left, codes[0], scales[0], self._key(state, peers))
        residual[mine].add_(left, alpha=1.0 / self.scaling.outer)
        self.outer.all_gather(received, second)
        codes, scales = _views(received.view(peers, -1), room)
        for part in range(peers):
            out = shard[starts[part] : starts[part + 1]]
            self._decode(codes[part : part + 1], scales[part : part + 1], 1.0, out)

    def _add_up(self, received: torch.Tensor, room: int, out: torch.Tensor) -> None:
        codes, scales = _views(received, room)
        self._decode(codes, scales, self.scaling.outer, out)

    def _decode(
        self, codes: torch.Tensor, scales: torch.Tensor, factor: float, out: torch.Tensor
    ) -> None:
        if out.dtype == torch.float32 or out.device.type != "cpu":
            int8.dequantize_sum(codes, scales, factor, out)
            return
        wide = torch.empty(out.numel())
        int8.dequantize_sum(codes, scales, factor, wide)
        out.copy_(wide)

    def _key(self, state: ShardState, stream: int) -> int:
        place = 0 if self.route.scatter is None else self.route.scatter.rank
        return int8.key(state.steps, state.bucket, self.outer.rank, place, stream)

    def sent_bytes(self, numel: int, itemsize: int) -> int:
        """See `Wire`."""
        del itemsize
        peers = self.outer.size
        return super().sent_bytes(_bytes(int8.room(numel, peers)), 1)

    @classmethod
    def rows_bytes(cls, numel: int, dtype: torch.dtype) -> int:
        """See `Wire`."""
        del dtype
        return _bytes(int8.room(numel))

    @classmethod
    def rows_write(cls, values: torch.Tensor, factor: float, raw: torch.Tensor, key: int) -> None:
        """See `Wire`; without a residual, because other rows come in every step."""
        del factor
        codes, scales = _views(raw.unsqueeze(0), _room(raw.numel()))
        int8.quantize(values, None, codes[0], scales[0], key)

    @classmethod
    def rows_read(
        cls, raw: torch.Tensor, factor: float, final: float, out: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """See `Wire`."""
        del dtype
        codes, scales = _views(raw.unsqueeze(0), _room(raw.numel()))
        int8.dequantize_sum(codes, scales, factor * final, out)
        return out


def _bytes(room: int) -> int:
    """Of `room` codes and their scales; a multiple of 16, so that all codes are aligned."""
    return padded(room + 4 * (room // int8.BLOCK), 16)


def _room(size: int) -> int:
    """The other way round."""
    return size // (int8.BLOCK + 4) * int8.BLOCK


def _views(raw: torch.Tensor, room: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, int8 [ranks, room], and scales, float32 [ranks, blocks], of uint8 [ranks, bytes]."""
    end = room + 4 * (room // int8.BLOCK)
    return raw[:, :room].view(torch.int8), raw[:, room:end].view(torch.float32)
