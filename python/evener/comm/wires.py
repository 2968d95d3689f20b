"""The form in which a shard crosses between nodes. One small class a form.

A wire's `exchange(bucket, shard)` turns this rank's shard into the reduction over the outer group,
in place, and leaves the same bits on every rank of it. It runs on the outer lane: on a CPU it may
block, on a GPU it only enqueues on the current stream, so scratch memory may be used again by the
next bucket without waiting.

A further form (INT8, FP8, PowerSGD) is one more class here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.distributed as dist

from evener.comm import topk
from evener.comm.buckets import Bucket, padded
from evener.comm.groups import Route
from evener.comm.options import Options


class Wire(ABC):
    """See the module. `name` appears in logs and records."""

    name: str

    @abstractmethod
    def exchange(self, bucket: Bucket, shard: torch.Tensor) -> None:
        """Reduce `shard` [n], of the bucket's dtype, over the outer group, in place."""

    def sent_bytes(self, shard: torch.Tensor) -> int:
        """What one rank hands to the network for this shard; for records and plans."""
        return shard.numel() * shard.element_size()


class ExactWire(Wire):
    """The gradients' own dtype, summed by the collective library."""

    name = "exact"

    def __init__(self, route: Route) -> None:
        self.outer, self.scaling = route.outer, route.scaling

    def exchange(self, bucket: Bucket, shard: torch.Tensor) -> None:
        del bucket
        dist.all_reduce(shard, self.scaling.op, group=self.outer.handle)


class CastWire(Wire):
    """FP16 or BF16: divided first, so that large gradients do not overflow, then cast."""

    def __init__(self, route: Route, dtype: torch.dtype) -> None:
        self.name = str(dtype).removeprefix("torch.")
        self.dtype = dtype
        self.outer, self.scaling = route.outer, route.scaling
        self._scratch = Scratch()

    def exchange(self, bucket: Bucket, shard: torch.Tensor) -> None:
        del bucket
        small = self._scratch.get(shard.numel(), self.dtype, shard.device)
        if self.scaling.outer == 1.0:
            small.copy_(shard)
        else:
            torch.mul(shard, self.scaling.outer, out=small)
        dist.all_reduce(small, dist.ReduceOp.SUM, group=self.outer.handle)
        shard.copy_(small)

    def sent_bytes(self, shard: torch.Tensor) -> int:
        return shard.numel() * self.dtype.itemsize


class TopKWire(Wire):
    """The k entries of largest magnitude; the rest is added to the next step (error feedback).

    Every rank receives every peer's entries and adds them peer by peer in rank order, so that all
    ranks end with the same bits. Deep Gradient Compression, arXiv 1712.01887, without its momentum
    correction. `residuals` holds one float32 tensor a bucket, of the shard's length.
    """

    name = "topk"

    def __init__(self, route: Route, ratio: float, half: bool) -> None:
        self.outer, self.scaling = route.outer, route.scaling
        self.ratio = ratio
        self.dtype = torch.float16 if half else torch.float32
        self.residuals: dict[int, torch.Tensor] = {}
        self._payload, self._received = Scratch(), Scratch()
        self._values, self._sum = Scratch(), Scratch()

    def residual(self, bucket: Bucket, shard: torch.Tensor) -> torch.Tensor:
        """The residual of this rank's shard of `bucket`, zero at first."""
        found = self.residuals.get(bucket.index)
        if found is None:
            found = torch.zeros(shard.numel(), dtype=torch.float32, device=shard.device)
            self.residuals[bucket.index] = found
        return found

    def exchange(self, bucket: Bucket, shard: torch.Tensor) -> None:
        k = topk.entries(shard.numel(), self.ratio)
        # Padded, so that every peer's part of what is received is aligned too.
        payload = self._payload.get(padded(k * self._entry_bytes, 16), torch.uint8, shard.device)
        sent = _Entries.of(payload, k, self.dtype)
        values = sent.values
        if self.dtype != torch.float32:
            values = self._values.get(k, torch.float32, shard.device)
        topk.select(shard, self.residual(bucket, shard), values, sent.indices)
        if values is not sent.values:
            self._send_rounded(bucket, shard, values, sent)
        received = self._received.get(payload.numel() * self.outer.size, torch.uint8, shard.device)
        dist.all_gather_into_tensor(received, payload, group=self.outer.handle)
        total = shard
        if shard.dtype != torch.float32:
            total = self._sum.get(shard.numel(), torch.float32, shard.device)
        total.zero_()
        for part in received.view(self.outer.size, -1):
            got = _Entries.of(part, k, self.dtype)
            topk.add_entries(total, got.values, got.indices, self.scaling.outer)
        if total is not shard:
            shard.copy_(total)

    def _send_rounded(
        self, bucket: Bucket, shard: torch.Tensor, values: torch.Tensor, sent: _Entries
    ) -> None:
        """Values as FP16; what rounding takes away stays in the residual too."""
        sent.values.copy_(values)
        values -= sent.values
        values.masked_fill_(~values.isfinite(), 0)  # an overflow is sent, never kept
        topk.add_entries(self.residual(bucket, shard), values, sent.indices, 1.0)

    def sent_bytes(self, shard: torch.Tensor) -> int:
        return topk.entries(shard.numel(), self.ratio) * self._entry_bytes

    @property
    def _entry_bytes(self) -> int:
        return 4 + self.dtype.itemsize


@dataclass(frozen=True)
class _Entries:
    """A payload's two views: [k] int32 indices, then [k] values, so that both are aligned."""

    indices: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, payload: torch.Tensor, k: int, dtype: torch.dtype) -> _Entries:
        end = (4 + dtype.itemsize) * k
        return cls(payload[: 4 * k].view(torch.int32), payload[4 * k : end].view(dtype))


class Scratch:
    """One growing buffer, used again and again."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def get(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[numel] of `dtype`, uninitialised, valid until the next call."""
        size = numel * dtype.itemsize
        if self._buffer.numel() < size or self._buffer.device != device:
            self._buffer = torch.empty(size, dtype=torch.uint8, device=device)
        return self._buffer[:size].view(dtype)


def choose(options: Options, route: Route, bucket: Bucket) -> str:
    """Which form a bucket's shard is sent in: the rule behind LIGHT_TOPK_THRESHOLD.

    The same on every rank, because it looks at nothing but sizes.
    """
    numel = bucket.buffer.numel() // route.shards
    if route.levels.nodes == 1 or route.outer.size == 1:
        return "exact"  # nothing crosses a network
    if options.wire != "topk":
        return options.wire
    shard_bytes = numel * bucket.buffer.element_size()
    return "topk" if options.topk_min_bytes <= shard_bytes and numel < 2**31 else "exact"
