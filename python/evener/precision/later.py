"""A number on a GPU that is read later, without a wait for what was queued after it.

`float(x)` waits until the GPU has done all that was queued before the call. After a backward pass
was queued that is the whole step, and the GPU then has nothing to do until the processor has queued
more. A copy that is queued as soon as the number exists, and an event behind it, are there as soon
as the number is.
"""

from __future__ import annotations

import torch


class Later:
    """One number. value: a tensor of one element; what it holds now is what is read."""

    def __init__(self, value: torch.Tensor) -> None:
        value = value.detach()
        self._event: torch.cuda.Event | None = None
        if value.device.type == "cuda" and type(value) is torch.Tensor:
            # Pinned memory, or the copy would wait.
            self._copy = value.to("cpu", non_blocking=True)
            self._event = torch.cuda.current_stream(value.device).record_event()
        else:
            self._copy = value

    def read(self) -> float:
        """Waits until the number exists."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._copy)
