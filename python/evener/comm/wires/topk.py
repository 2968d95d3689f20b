"""Sparse forms: only the largest entries cross, the rest waits in the residual.

Deep Gradient Compression, Lin et al., arXiv 1712.01887: error feedback; momentum correction (where
`Options.momentum` is set, momentum is accumulated before the selection, and forgotten for what was
sent); warm-up of the ratio. Norms and biases stay dense (`Bucket.dense`).

Every rank receives every peer's entries and adds them peer by peer in rank order, so that all ranks
end with the same bits.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from evener.comm import chunks, topk
from evener.comm.buckets import padded
from evener.comm.groups import Route
from evener.comm.options import Options
from evener.comm.scratch import Scratch
from evener.comm.state import Sent, ShardState
from evener.comm.wires.base import Limits, Paper, Wire, register

# DGC begins with a quarter of the entries and divides by four four times.
_WARM, _STAGES = 0.25, 5


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

    def exchange(self, shard: torch.Tensor, state: ShardState) -> None:
        """See `Wire`."""
        ratio = ratio_at(state.steps, self.options.ratio, self.options.warmup_steps)
        gradient = shard
        if state.velocity is not None:
            gradient = state.with_momentum(shard, self.options.momentum)
        total = shard
        if shard.dtype != torch.float32:
            total = self._sum.get(shard.numel(), torch.float32, shard.device)
        self._exchange(gradient, total, state, ratio)
        if total is not shard:
            shard.copy_(total)

    @abstractmethod
    def _exchange(
        self, gradient: torch.Tensor, total: torch.Tensor, state: ShardState, ratio: float
    ) -> None:
        """Select from `gradient` plus the residual, gather, add up into `total`, float32 [n]."""

    def _gather(self, payload: torch.Tensor) -> torch.Tensor:
        """All ranks' payloads, uint8 [ranks, bytes]."""
        peers = self.outer.size
        received = self._received.get(payload.numel() * peers, torch.uint8, payload.device)
        self.outer.all_gather(received, payload)
        return received.view(peers, -1)

    def _sent(self, state: ShardState, values: torch.Tensor, places: torch.Tensor) -> None:
        """Forget the momentum of what was sent, and keep it while the step may be skipped."""
        if state.velocity is not None:
            state.velocity.index_fill_(0, places, 0.0)
        if state.keep_sent:
            state.sent = Sent(values.to(torch.float32, copy=True), places.clone())


@register
class TopKWire(SparseWire):
    """The k entries of largest magnitude of the whole shard: a float32 or FP16 value, an int32."""

    name = "topk"
    title = "top-k"
    what = "only the largest gradients between nodes, with error feedback"
    place = 51
    first_update = 1.0

    @classmethod
    def paper(cls, ratio: float) -> Paper:
        """See `Wire`: FP32 value and 32-bit index, and a pass for the exact threshold."""
        return Paper(cls.name, 2 * ratio, False, 7.0, 4 * ratio)

    def _exchange(
        self, gradient: torch.Tensor, total: torch.Tensor, state: ShardState, ratio: float
    ) -> None:
        k = topk.entries(total.numel(), ratio)
        dtype = self._dtype
        # Padded, so that every peer's part of what is received is aligned too.
        size = padded(k * (4 + dtype.itemsize), 16)
        payload = self._payload.get(size, torch.uint8, total.device)
        sent = _Entries.of(payload, k, dtype)
        topk.select(gradient, state.residual_for(total), sent.values, sent.indices)
        received = self._gather(payload)
        if state.velocity is not None or state.keep_sent:
            self._sent(state, sent.values, sent.indices.long())
        total.zero_()
        for part in received:
            got = _Entries.of(part, k, dtype)
            topk.add_entries(total, got.values, got.indices, self.scaling.outer)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float16 if self.options.topk_fp16 else torch.float32

    def sent_bytes(self, numel: int, itemsize: int) -> int:
        """See `Wire`; after the warm-up."""
        del itemsize
        entry = 4 + self._dtype.itemsize
        return topk.entries(numel, self.options.ratio) * entry * (self.outer.size - 1)


@dataclass(frozen=True)
class _Entries:
    """A payload's two views: [k] int32 indices, then [k] values, so that both are aligned."""

    indices: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, payload: torch.Tensor, k: int, dtype: torch.dtype) -> _Entries:
        end = (4 + dtype.itemsize) * k
        return cls(payload[: 4 * k].view(torch.int32), payload[4 * k : end].view(dtype))


@register
class ChunkTopKWire(SparseWire):
    """The same number of entries of every 4,096: an FP16 value, 16 bits of place each."""

    name = "topk-chunk"
    title = "top-k in chunks"
    what = "the largest of every 4,096 gradients between nodes, with error feedback"
    place = 50
    first_update = 1.0

    @classmethod
    def paper(cls, ratio: float) -> Paper:
        """See `Wire`: FP16 value and 16-bit index.

        The residual is read and written, the result cleared.
        """
        return Paper(cls.name, ratio, False, 6.0, 2 * ratio)

    def _exchange(
        self, gradient: torch.Tensor, total: torch.Tensor, state: ShardState, ratio: float
    ) -> None:
        n, k = total.numel(), chunks.entries(ratio)
        raw = self._payload.get(padded(chunks.Payload.size(n, k), 16), torch.uint8, total.device)
        sent = chunks.Payload.of(raw, n, k)
        chunks.select(gradient, state.residual_for(total), sent)
        received = self._gather(raw)
        if state.velocity is not None or state.keep_sent:
            # Places that hold nothing point at the chunk's first entry, with value 0: they may be
            # forgotten (momentum), but not twice what is there; `Sent` adds, so 0 is right.
            local = sent.indices.view(torch.int16).long()
            starts = torch.arange(len(local), device=local.device).unsqueeze(1) * chunks.CHUNK
            real = local >= 0
            places = torch.where(real, local, sent.indices[:, :1].view(torch.int16).long())
            values = sent.values.float() * sent.scales.unsqueeze(1)
            places, values = (places + starts).view(-1), torch.where(real, values, 0.0).view(-1)
            self._sent(state, values, places)
        chunks.add_in_order(received, k, self.scaling.outer, total)

    def sent_bytes(self, numel: int, itemsize: int) -> int:
        """See `Wire`; after the warm-up."""
        del itemsize
        size = chunks.Payload.size(numel, chunks.entries(self.options.ratio))
        return size * (self.outer.size - 1)
