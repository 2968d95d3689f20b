"""Counts, in-place offsets and bandwidths of each collective, as nccl-tests defines them.

`count` is what -b asks for in elements. Collectives that split their data take a share a rank,
rounded down to 16 bytes; the printed size is the larger of what a rank sends and receives, the
printed count what the call is given. Bandwidths are GB/s (10^9).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """One size of one collective, in elements. Offsets are rank 1's; rank r's are r times that."""

    send: int
    receive: int
    count: int
    send_offset: int
    receive_offset: int


@dataclass(frozen=True, slots=True)
class Collective:
    """What distinguishes one collective from another."""

    name: str
    reduces: bool = False
    rooted: bool = False
    split: str = ""
    """Which side is a share: `send`, `receive`, `both`; empty where none is."""
    checked_in_place: bool = True

    def shape(self, count: int, item: int, ranks: int) -> Shape:
        """The shape for `count` elements of `item` bytes."""
        if not self.split:
            return Shape(count, count, count, 0, 0)
        share = count // ranks // (16 // item) * (16 // item)
        whole = share * ranks
        if self.split == "send":
            return Shape(share, whole, share, share, 0)
        if self.split == "receive":
            return Shape(whole, share, share, 0, share)
        return Shape(whole, whole, share, 0, 0)

    def bandwidth(self, count: int, item: int, ranks: int, seconds: float) -> tuple[float, float]:
        """(algorithm, bus) bandwidth in GB/s for the call's `count`."""
        if seconds <= 0:
            return 0.0, 0.0
        parts = 1 if not self.split else ranks - 1 if self.name == "hypercube" else ranks
        algorithm = count * item * parts / seconds / 1e9
        return algorithm, algorithm * self.factor(ranks)

    def factor(self, ranks: int) -> float:
        """Bus bandwidth over algorithm bandwidth."""
        if self.name == "all_reduce":
            return 2 * (ranks - 1) / ranks
        if self.split and self.name != "hypercube":
            return (ranks - 1) / ranks
        return 1.0


ALL = {
    one.name: one
    for one in (
        Collective("all_reduce", reduces=True),
        Collective("all_gather", split="send"),
        Collective("reduce_scatter", reduces=True, split="receive"),
        Collective("broadcast", rooted=True),
        Collective("reduce", reduces=True, rooted=True),
        # Sent and received in one buffer these overwrite what is still to be sent.
        Collective("alltoall", split="both", checked_in_place=False),
        Collective("gather", rooted=True, split="send"),
        Collective("scatter", rooted=True, split="receive"),
        Collective("sendrecv", checked_in_place=False),
        Collective("hypercube", split="send"),
    )
}
