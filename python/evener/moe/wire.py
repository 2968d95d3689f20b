"""What a token looks like between nodes: as it is, or 8 bits per value where that is asked for.

8 bits: a float32 scale per 128 values (as DeepSeek-V3 does, arXiv 2412.19437), then INT8 or FP8
(e4m3), rounded to nearest. Tokens and the gradients of sums travel so; sums and the gradients of
tokens, which are added up on their way, travel as they are.

The guard: each rank looks at every batch's tokens. Where a row of 128 would lose more than `limit`
of its length on some rank, all ranks send that batch as it is; that is counted and said once.
"""

from __future__ import annotations

import logging
from typing import Literal

import torch
from torch.nn import functional

from evener.errors import UsageError

logger = logging.getLogger("evener.moe")

Form = Literal["exact", "int8", "fp8"]
GROUP = 128
_LARGEST = {"int8": 127.0, "fp8": 448.0}


class Wire:
    """A form, with its guard. limit: the relative error (of lengths) that a batch may have."""

    def __init__(self, form: Form = "exact", limit: float = 0.05) -> None:
        if form not in ("exact", *_LARGEST):
            raise UsageError(f"dispatch={form!r} is not known", "choose exact, int8 or fp8")
        self.form, self.limit = form, limit
        self.on = form != "exact"
        self.fell_back = 0

    def bytes(self, width: int) -> int:
        """Bytes of a row of 8 bits."""
        groups = -(-width // GROUP)
        return groups * GROUP + 4 * groups

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, width] > uint8 [rows, bytes]: codes, then scales."""
        groups = -(-x.shape[1] // GROUP)
        padded = functional.pad(x.float(), (0, groups * GROUP - x.shape[1]))
        parts = padded.view(len(x), groups, GROUP)
        scale = (parts.abs().amax(2, keepdim=True) / _LARGEST[self.form]).clamp(min=1e-30)
        scaled = parts / scale
        if self.form == "int8":
            codes = scaled.round_().clamp_(-127, 127).to(torch.int8)
        else:
            codes = scaled.clamp_(-448, 448).to(torch.float8_e4m3fn)
        return torch.cat((codes.view(torch.uint8).view(len(x), -1),
                          scale.view(len(x), groups).view(torch.uint8)), 1)  # fmt: skip

    def decode(self, rows: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
        """What `encode` gave > [rows, width]."""
        groups = -(-width // GROUP)
        kind = torch.int8 if self.form == "int8" else torch.float8_e4m3fn
        codes = rows[:, : groups * GROUP].contiguous().view(kind).float()
        scale = rows[:, groups * GROUP :].contiguous().view(torch.float32)
        parts = codes.view(len(rows), groups, GROUP) * scale.unsqueeze(2)
        return parts.view(len(rows), -1)[:, :width].to(dtype)

    def bad(self, x: torch.Tensor) -> torch.Tensor:
        """Whether this batch would lose too much: a bool on the device."""
        if not self.on or not x.numel():
            return torch.zeros((), dtype=torch.bool, device=x.device)
        back = self.decode(self.encode(x), x.shape[1], torch.float32)
        error = (back - x.float()).norm() / x.float().norm().clamp(min=1e-30)
        lost: torch.Tensor = error <= self.limit
        return ~lost

    def note(self, step_was_exact: bool) -> None:
        """Count, and say once, that a batch went as it is."""
        if self.on and step_was_exact:
            if not self.fell_back:
                logger.warning("dispatch=%s would lose over %.0f%% of a batch: it goes as it is",
                               self.form, self.limit * 100)  # fmt: skip
            self.fell_back += 1
