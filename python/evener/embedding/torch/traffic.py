"""What a table sent to other ranks, counted."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Traffic:
    """Bytes that this rank handed to the network, since the table was made or `clear`.

    `keys`, `values` and `gradients`: what was asked for and learned. `counts`: how many of them,
    sent ahead. Only what crosses between hosts counts; what ranks of one host exchange is in
    `inside`.
    """

    keys: int = 0
    values: int = 0
    gradients: int = 0
    counts: int = 0
    inside: int = 0

    def count(self, what: str, n: int) -> None:
        """`n` bytes more of a field."""
        setattr(self, what, getattr(self, what) + n)

    @property
    def total(self) -> int:
        """All that crossed between hosts."""
        return self.keys + self.values + self.gradients + self.counts

    def clear(self) -> None:
        """Count from 0."""
        self.keys = self.values = self.gradients = self.counts = self.inside = 0

    def to_json(self) -> dict[str, int]:
        """Plain values."""
        return {**asdict(self), "total": self.total}
