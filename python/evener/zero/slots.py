"""What the streaming lane's slots hold (`lanes`), and what they take of the accelerator."""

from __future__ import annotations

from collections.abc import Sequence

from evener.zero.owners import Matrix
from evener.zero.states import SLICE
from evener.zero.store import Formats

SLOTS = 3
"""Slices on their way through the accelerator: one comes, one is updated, one leaves."""


def at_once(matrices: Sequence[Matrix], share: int, ranks: int) -> int:
    """Elements that pass through a slot at a time where these are updated; 0: no matrices are."""
    if not matrices:
        return 0
    return max(m.numel for m in matrices) if ranks == 1 else min(SLICE, share)


def slot_bytes(streams: Sequence[tuple[int, int]], formats: Formats) -> int:
    """Bytes of the streaming lane's slots. streams: of each chunk that may pass through them, what
    `at_once` says (0: it goes by slices) and how many moments it has."""
    if not streams:
        return 0
    most = max(carried or SLICE for carried, _ in streams)
    return int(SLOTS * most * formats.host_bytes(max(moments for _, moments in streams)))
