"""Sparse forms: only the largest entries cross, the rest waits in the residual.

Deep Gradient Compression, Lin et al., arXiv 1712.01887: error feedback; momentum correction (where
`Options.momentum` is set, momentum is accumulated before the selection, and forgotten for what was
sent); warm-up of the ratio. Norms and biases stay dense (`Bucket.dense`).

Among few ranks each sends its entries to all others, and adds what came peer by peer in rank order,
so that all end with the same bits. What a rank receives grows with their number, and so from
`_MANY` ranks on they reduce in two halves (SparCML, Renggli et al., arXiv 1802.08021; Ok-Topk, Li
and Hoefler, arXiv 2201.07598): each rank has a part of the shard, gets everybody's entries of it
(all-to-all), adds them up, selects the largest sums, and all gather those. A rank sends less than
two payloads, whatever the number of ranks. What the second selection leaves goes into the residual
of the rank that selected, so nothing is lost there either. Parts are of equal length and each sends
its own largest: with a fixed payload no rank has to tell another how much will come.
"""

from __future__ import annotations

from abc import abstractmethod
from itertools import pairwise

import torch

from evener.comm.buckets import ALIGN, padded
from evener.comm.codecs import chunks, topk
from evener.comm.codecs.payload import Payload
from evener.comm.groups import Route
from evener.comm.options import Options
from evener.comm.scratch import Scratch
from evener.comm.state import SentEntries, ShardState
from evener.comm.wires.base import Limits, Paper, Wire, register

# DGC begins with a quarter of the entries and divides by four four times.
_WARM, _STAGES = 0.25, 5
# Ranks from which on two halves send less than one payload to everybody: 2 (N - 1) / N < N - 1 from
# three on, and with three it is not worth the second selection.
_MANY = 4


def ratio_at(step: int, ratio: float, warmup: int) -> float:
    """The share that is sent in `step` (from 0): from 25% down to `ratio` within `warmup` steps."""
    if step >= warmup or ratio >= _WARM:
        return ratio
    stage = step * _STAGES // warmup
    return float(_WARM * (ratio / _WARM) ** (stage / _STAGES))


class SparseWire(Wire):
    """What exact and chunk-wise top-k share."""

    milder = "int8"
    lossy = feedback = sparse = True
    late = "sparse"
    # Measured: docs/benchmarks/accuracy.md, "The guard's limits".
    limits = Limits(residual=100.0)
    strict = Limits(residual=0.25)

    def __init__(self, route: Route, options: Options) -> None:
        super().__init__(route, options)
        self._payload, self._received, self._sum = Scratch(), Scratch(), Scratch()
        self._second, self._part, self._left = Scratch(), Scratch(), Scratch()

    @property
    def by_parts(self) -> bool:
        """Whether it goes in two halves."""
        return self.outer.size >= _MANY

    def exchange(self, shard: torch.Tensor, state: ShardState) -> None:
        """See `Wire`."""
        ratio = ratio_at(state.steps, self.options.ratio, self.options.warmup_steps)
        gradient = shard
        if state.velocity is not None:
            gradient = state.with_momentum(shard, self.options.momentum)
        total = shard
        if shard.dtype != torch.float32:
            total = self._sum.get(shard.numel(), torch.float32, shard.device)
        if self.by_parts:
            self._by_parts(gradient, total, state, ratio)
        else:
            self._to_all(gradient, total, state, ratio)
        if total is not shard:
            shard.copy_(total)

    @abstractmethod
    def _size(self, n: int, ratio: float) -> int:
        """Bytes of a payload of `n` entries; a multiple of 16, so that every peer's is aligned."""

    @abstractmethod
    def _unit(self) -> int:
        """A part's length is a multiple of this many entries."""

    @abstractmethod
    def _select(
        self, gradient: torch.Tensor, residual: torch.Tensor, raw: torch.Tensor, ratio: float
    ) -> None:
        """Move the largest of `residual` += `gradient`, [n], to a payload."""

    @abstractmethod
    def _add_up(
        self, received: torch.Tensor, factor: float, ratio: float, out: torch.Tensor
    ) -> None:
        """`out` [n] float32 = `factor` times the sum of payloads [ranks, bytes], in rank order."""

    @abstractmethod
    def _entries(
        self, raw: torch.Tensor, n: int, ratio: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A payload's values, float32, and places, int64. With 0 a place may come twice."""

    def _to_all(
        self, gradient: torch.Tensor, total: torch.Tensor, state: ShardState, ratio: float
    ) -> None:
        """Select from `gradient` plus the residual, gather, add up into `total`, float32 [n]."""
        n, peers = total.numel(), self.outer.size
        payload = self._payload.get(self._size(n, ratio), torch.uint8, total.device)
        self._select(gradient, state.residual_for(total), payload, ratio)
        received = self._received.get(payload.numel() * peers, torch.uint8, total.device)
        self.outer.all_gather(received, payload)
        if state.velocity is not None or state.keep_sent:
            values, places = self._entries(payload, n, ratio)
            _forget(state, places)
            if state.keep_sent:
                state.sent = SentEntries(values.clone(), places.clone())
        self._add_up(received.view(peers, -1), self.scaling.outer, ratio, total)

    def _by_parts(
        self, gradient: torch.Tensor, total: torch.Tensor, state: ShardState, ratio: float
    ) -> None:
        """The same in two halves."""
        n, peers, rank = total.numel(), self.outer.size, self.outer.rank
        residual = state.residual_for(total)
        starts = self._starts(n)
        spans = [slice(a, b) for a, b in pairwise(starts)]
        size = self._size(starts[1], ratio)
        payload = self._payload.get(size * peers, torch.uint8, total.device).view(peers, size)
        for raw, span in zip(payload, spans, strict=True):
            self._select(gradient[span], residual[span], raw, ratio)
            if state.velocity is not None and span.stop > span.start:
                places = self._entries(raw, span.stop - span.start, ratio)[1]
                _forget(state, places + span.start)
        received = self._received.get(size * peers, torch.uint8, total.device)
        self.outer.all_to_all(received, payload.view(-1))
        mine = spans[rank]
        own = self._part.get(mine.stop - mine.start, torch.float32, total.device)
        self._add_up(received.view(peers, size), self.scaling.outer, ratio, own)
        left = self._left.get(own.numel(), torch.float32, total.device).zero_()
        second = self._second.get(size, torch.uint8, total.device)
        self._select(own, left, second, ratio)
        # Sums are of what all ranks sent: what this rank does not pass on stays in its residual.
        residual[mine].add_(left, alpha=1.0 / self.scaling.outer)
        if state.keep_sent:
            values, places = self._entries(second, own.numel(), ratio)
            # One rank gives back for all of them what has arrived.
            state.sent = SentEntries(values / self.scaling.outer, places + mine.start)
        self.outer.all_gather(received, second)
        for raw, span in zip(received.view(peers, size), spans, strict=True):
            self._add_up(raw.unsqueeze(0), 1.0, ratio, total[span])

    def _starts(self, n: int) -> list[int]:
        """Where the parts of `n` entries begin, and the end of the last."""
        length = padded(-(-n // self.outer.size), self._unit())
        return [min(n, part * length) for part in range(self.outer.size + 1)]

    def sent_bytes(self, numel: int, itemsize: int, state: ShardState | None = None) -> int:
        """See `Wire`; after the warm-up."""
        del itemsize, state
        ratio, peers = self.options.ratio, self.outer.size
        if self.by_parts:
            return 2 * (peers - 1) * self._size(self._starts(numel)[1], ratio)
        return (peers - 1) * self._size(numel, ratio)


def _forget(state: ShardState, places: torch.Tensor) -> None:
    """The momentum of what was sent."""
    if state.velocity is not None:
        state.velocity.index_fill_(0, places, 0.0)


@register
class TopKWire(SparseWire):
    """The k entries of largest magnitude of the whole shard: a float32 or FP16 value, an int32."""

    name = "topk"
    title = "top-k"
    what = "only the largest gradients between nodes, with error feedback"
    place = 51
    late = "sparse"
    first_update = 0.2

    @classmethod
    def paper(cls, ratio: float) -> Paper:
        """See `Wire`: FP32 value and 32-bit index, and a pass for the exact threshold."""
        return Paper(cls.name, 2 * ratio, False, 7.0, 4 * ratio, halves_from=_MANY)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float16 if self.options.topk_fp16 else torch.float32

    def _unit(self) -> int:
        return ALIGN

    def _size(self, n: int, ratio: float) -> int:
        return padded(topk.entries(n, ratio) * (4 + self._dtype.itemsize), 16)

    def _views(self, raw: torch.Tensor, n: int, ratio: float) -> tuple[torch.Tensor, torch.Tensor]:
        """[k] int32 indices, then [k] values, so that both are aligned."""
        k, dtype = topk.entries(n, ratio), self._dtype
        return raw[: 4 * k].view(torch.int32), raw[4 * k : (4 + dtype.itemsize) * k].view(dtype)

    def _select(
        self, gradient: torch.Tensor, residual: torch.Tensor, raw: torch.Tensor, ratio: float
    ) -> None:
        if residual.numel():
            indices, values = self._views(raw, residual.numel(), ratio)
            topk.select(gradient, residual, values, indices)

    def _add_up(
        self, received: torch.Tensor, factor: float, ratio: float, out: torch.Tensor
    ) -> None:
        out.zero_()
        for raw in received:
            indices, values = self._views(raw, out.numel(), ratio)
            topk.add_entries(out, values, indices, factor)

    def _entries(
        self, raw: torch.Tensor, n: int, ratio: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        indices, values = self._views(raw, n, ratio)
        return values.float(), indices.long()


@register
class ChunkTopKWire(SparseWire):
    """The same number of entries of every 4,096: an FP16 value, 16 bits of place each."""

    name = "topk-chunk"
    title = "top-k in chunks"
    what = "the largest of every 4,096 gradients between nodes, with error feedback"
    place = 50
    late = "sparse"
    first_update = 0.2

    @classmethod
    def paper(cls, ratio: float) -> Paper:
        """See `Wire`: FP16 value and 16-bit index.

        The residual is read and written, the result cleared.
        """
        return Paper(cls.name, ratio, False, 6.0, 2 * ratio, halves_from=_MANY)

    def _unit(self) -> int:
        return chunks.CHUNK

    def _size(self, n: int, ratio: float) -> int:
        return padded(Payload.size(n, chunks.entries(ratio)), 16)

    def _select(
        self, gradient: torch.Tensor, residual: torch.Tensor, raw: torch.Tensor, ratio: float
    ) -> None:
        sent = Payload.of(raw, residual.numel(), chunks.entries(ratio))
        chunks.select(gradient, residual, sent)

    def _add_up(
        self, received: torch.Tensor, factor: float, ratio: float, out: torch.Tensor
    ) -> None:
        chunks.add_in_order(received, chunks.entries(ratio), factor, out)

    def _entries(
        self, raw: torch.Tensor, n: int, ratio: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Places that hold nothing point at the chunk's first entry, with value 0: they may be
        # forgotten (momentum), but not twice what is there; what adds adds 0.
        sent = Payload.of(raw, n, chunks.entries(ratio))
        local = sent.indices.view(torch.int16).long()
        starts = torch.arange(len(local), device=local.device).unsqueeze(1) * chunks.CHUNK
        real = local >= 0
        places = torch.where(real, local, sent.indices[:, :1].view(torch.int16).long())
        values = sent.values.float() * sent.scales.unsqueeze(1)
        return torch.where(real, values, 0.0).view(-1), (places + starts).view(-1)
