"""Memory that is used again by every bucket."""

from __future__ import annotations

import torch


class Scratch:
    """One growing buffer for each stream that asks, used again and again.

    Whoever enqueues on one stream may write to a buffer again without waiting: the stream keeps the
    order. Two streams at work at once get a buffer each, so one object serves all outer lanes.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, int], torch.Tensor] = {}

    def get(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[numel] of `dtype`, uninitialised, valid on the current stream until the next call."""
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        size = numel * dtype.itemsize
        buffer = self._buffers.get((device, stream))
        if buffer is None or buffer.numel() < size:
            # The old one goes first, so that both never exist at once.
            self._buffers.pop((device, stream), None)
            del buffer
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
            self._buffers[device, stream] = buffer
        return buffer[:size].view(dtype)

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers.clear()
