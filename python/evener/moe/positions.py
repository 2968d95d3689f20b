"""Where the entries of a batch of tokens are once they are ordered by destination."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Positions:
    """Where each entry is.

    rows: int32 [tokens, slots], the entry's row, -1 where it has none. source: int32 [room], the
    entry (token * slots + slot) of each row, -1 past the last. ends: int32 [destinations], one past
    the last row of each.
    """

    rows: torch.Tensor
    source: torch.Tensor
    ends: torch.Tensor

    @property
    def slots(self) -> int:
        """Entries of a token."""
        return self.rows.shape[1]

    def first(self, total: int) -> Positions:
        """The same, with `source` cut to the rows that are used, once the host knows them."""
        return Positions(self.rows, self.source[:total], self.ends)
