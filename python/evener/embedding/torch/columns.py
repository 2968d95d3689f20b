"""Where features lie in a collection's result, one tensor [batch, ...]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Columns:
    """Features of one dim that lie side by side in `out` [batch, ...]: where each begins."""

    out: torch.Tensor
    columns: tuple[int, ...]
    at: torch.Tensor  # `columns`, on the device

    @classmethod
    def of(cls, columns: Sequence[int], out: torch.Tensor) -> Columns:
        return cls(out, tuple(columns), torch.tensor(columns, dtype=torch.int64).to(out.device))

    def like(self, out: torch.Tensor) -> Columns:
        """The same columns of another tensor."""
        return Columns(out, self.columns, self.at)
