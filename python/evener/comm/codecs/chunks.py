"""Top-k in chunks of 4,096 entries, with error feedback: a payload of one size, 4 bytes an entry.

What one rank sends of `n` entries, with `c = ceil(n / 4096)` chunks of `k` entries each, is one
`Payload`: a float32 scale (a power of two) a chunk, `k` float16 values relative to it, and `k`
uint16 places in the chunk, ascending; 0xFFFF where a chunk at the end has fewer than `k` entries.
No rank has to tell another how much will come.

Three implementations of one definition: `select_reference` and `add_reference` in plain torch,
crates/kernels/src/chunks.rs for CPU tensors, `triton_chunks` beside it for GPU tensors. All
select the same entries and send the same bits: the largest magnitudes of residual + gradient in
every chunk, the lowest index first among equals; what is not finite is sent and never kept.
"""

from __future__ import annotations

import torch

from evener.base import kernels as _kernels
from evener.comm.codecs.payload import Payload

CHUNK = _kernels.CHUNK
NO_INDEX = _kernels.NO_INDEX
_INFINITY = 0x7F800000
_SMALLEST, _LARGEST = 27 << 23, 253 << 23  # bits of 2^-100 and 2^126


def entries(ratio: float) -> int:
    """How many of a chunk's entries are sent: 41 of 4096 for 1%."""
    return min(CHUNK, max(1, round(CHUNK * ratio)))


def select_reference(gradient: torch.Tensor, residual: torch.Tensor, payload: Payload) -> None:
    """See `select`. By a stable sort of every chunk."""
    n, k = residual.numel(), payload.values.shape[1]
    residual += gradient
    rows = torch.nn.functional.pad(residual, (0, -n % CHUNK)).view(-1, CHUNK)
    bits = rows.view(torch.int32) & 0x7FFFFFFF
    inside = (torch.arange(rows.numel(), device=rows.device) < n).view(-1, CHUNK)
    most = bits.amax(1)
    scales = (most & _INFINITY).clamp(_SMALLEST, _LARGEST).view(torch.float32)
    payload.scales.copy_(torch.where(most >= _INFINITY, 1.0, scales))
    order = torch.sort(torch.where(inside, bits, -1), dim=1, descending=True, stable=True).indices
    taken = torch.sort(order[:, :k], dim=1).values
    # At the end of a short chunk the sort has put places behind its end, which come last here too.
    real = inside.gather(1, taken)
    found = rows.gather(1, taken)
    inverse = (1.0 / payload.scales).unsqueeze(1)
    payload.values.copy_(torch.where(real, found * inverse, 0.0))
    payload.indices.copy_(torch.where(real, taken, NO_INDEX).to(torch.uint16))
    left = found - payload.values.float() * payload.scales.unsqueeze(1)
    rows.scatter_(1, taken, torch.where(real, left, 0.0))
    rows.masked_fill_(~rows.isfinite(), 0)
    residual.copy_(rows.view(-1)[:n])


def add_reference(payload: Payload, factor: float, out: torch.Tensor) -> None:
    """`out` += `factor` times what one rank sent."""
    chunks = len(payload.scales)
    places = payload.indices.to(torch.int64)
    real = places != NO_INDEX
    places = places + torch.arange(chunks, device=out.device).unsqueeze(1) * CHUNK
    values = payload.values.float() * payload.scales.unsqueeze(1) * factor
    out.index_add_(0, places[real], values[real])


def select(gradient: torch.Tensor, residual: torch.Tensor, payload: Payload) -> None:
    """Add `gradient` to `residual` and move the k largest magnitudes of every chunk to `payload`.

    `gradient` [n], any floating dtype; `residual` [n] float32; both contiguous on one device. One
    pass over memory; on a GPU this only enqueues.
    """
    if not residual.numel():
        return
    if gradient.device.type == "cpu":
        _kernels.chunks_select(
            gradient.float(), residual, payload.scales, payload.values, payload.indices
        )
        return
    from evener.comm.codecs import triton_chunks

    triton_chunks.select(gradient, residual, payload.scales, payload.values, payload.indices)


def add_in_order(received: torch.Tensor, k: int, factor: float, out: torch.Tensor) -> None:
    """`out` = `factor` times the sum of all payloads, rank by rank: the same bits everywhere.

    `received`: uint8 [ranks, bytes], one payload a row. `out`: float32 [n].
    """
    if not out.numel():
        return
    if out.device.type == "cpu":
        out.zero_()
        for raw in received:
            sent = Payload.of(raw, out.numel(), k)
            _kernels.chunks_add(sent.scales, sent.values, sent.indices, factor, out)
        return
    from evener.comm.codecs import triton_chunks

    triton_chunks.add_in_order(received, k, factor, out)
