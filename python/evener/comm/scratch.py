"""Memory that is used again by every bucket."""

from __future__ import annotations

import torch


def stream_of(device: torch.device) -> int:
    """The current stream of a GPU, as the driver knows it; 0 elsewhere.

    `torch.cuda.current_stream` makes an object each time.
    """
    if device.type != "cuda":
        return 0
    index = torch.cuda.current_device() if device.index is None else device.index
    raw: int = torch._C._cuda_getCurrentRawStream(index)
    return raw


class Scratch:
    """One growing buffer for each stream that asks, used again and again.

    Whoever enqueues on one stream may write to a buffer again without waiting: the stream keeps the
    order. Two streams at work at once get a buffer each, so one object serves all outer lanes.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, int], torch.Tensor] = {}
        # Views of these that were asked for: making one takes longer than all the rest of `get`.
        self._views: dict[tuple[torch.device, int, int, torch.dtype], torch.Tensor] = {}

    def get(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[numel] of `dtype`, uninitialised, valid on the current stream until the next call."""
        stream = stream_of(device)
        view = self._views.get((device, stream, numel, dtype))
        if view is not None:
            return view
        size = numel * dtype.itemsize
        buffer = self._buffers.get((device, stream))
        if buffer is None or buffer.numel() < size:
            # The old one goes first, so that both never exist at once.
            self._views = {k: v for k, v in self._views.items() if k[:2] != (device, stream)}
            self._buffers.pop((device, stream), None)
            del buffer
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
            self._buffers[device, stream] = buffer
        view = self._views[device, stream, numel, dtype] = buffer[:size].view(dtype)
        return view

    def clear(self) -> None:
        """Give the memory back."""
        self._views.clear()
        self._buffers.clear()
