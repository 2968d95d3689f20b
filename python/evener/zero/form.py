"""The forms in which gradients cross between nodes' copies of the states: comm's, as a plan counts
them. Here is arithmetic only; `between` sends them.

Forms that send all of a gradient at once can be chosen: exact, fp16, bf16 and those that quantise
in blocks (int8, int4). For these, what rounding takes away is kept, and added to the next
step's gradient. It is kept where the chunk's gradient is, in the gradient's dtype where that is
bfloat16 or float32 (of float16 a small rest is nothing: float32), in units of the loss without
its scale.

Parameters of one dimension (norms, biases) cross exactly, as comm has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evener.comm import forms, wires
from evener.comm.wires.base import Wire, around
from evener.comm.wires.blocks import BlockWire
from evener.errors import UsageError

PIECE = 32 << 20
"""Elements that are encoded at a time: bounds what a form needs beside the gradient. As INT8 they
take about 10 ms of a network of 25 Gb/s, which has nothing to do between two pieces."""

ROOMS = 2
"""Pieces of a residual on their way: one comes or leaves while one is in use."""


def names() -> tuple[str, ...]:
    """Names of the forms that can be chosen, from the mildest to the harshest."""
    return tuple(name for name in wires.names() if not wires.get(name).late)


def mostly(vectors: int, numel: int) -> bool:
    """Whether vectors are so large a part of a chunk that blocks would save nothing."""
    return 2 * vectors >= numel


@dataclass(frozen=True)
class Form:
    """A form by its name. Raises UsageError for one that is not in `names`."""

    name: str = "exact"

    def __post_init__(self) -> None:
        if self.name not in names():
            fix = forms.suggestion(str(self.name), names())
            raise UsageError(f"gradients cannot cross as {self.name!r}", fix)

    @property
    def wire(self) -> type[Wire]:
        """Comm's class."""
        return wires.get(self.name)

    @property
    def blocks(self) -> type[BlockWire] | None:
        """Comm's class, where it quantises in blocks."""
        return self.wire if issubclass(self.wire, BlockWire) else None

    @property
    def cast(self) -> torch.dtype | None:
        """What all elements are cast to, where that is all."""
        return self.wire.cast

    def owed(self, gradient: torch.dtype) -> torch.dtype | None:
        """In what rounding's rest is kept, of gradients of this dtype; None: nothing is kept."""
        if self.blocks is None:
            return None
        return torch.bfloat16 if gradient == torch.bfloat16 else torch.float32

    def sent(self, numel: int, vectors: int, width: int, copies: int) -> int:
        """Bytes that a rank hands to the network for `numel` elements of `width` bytes, of which
        `vectors` are of parameters of one dimension; with `copies` of the states."""
        if copies == 1:
            return 0
        wire = self.blocks
        if wire is None or mostly(vectors, numel):
            width = width if self.cast is None else self.cast.itemsize
            return around(copies, numel * width)
        parts = 1 if copies == 2 else copies
        pieces = [PIECE] * (numel // PIECE) + [numel % PIECE] * bool(numel % PIECE)
        coded = sum(around(copies, wire.size(wire.room(n, parts) // parts) * parts) for n in pieces)
        return coded + around(copies, 4 * vectors)

    def scratch(self, largest: int, gradient: torch.dtype, copies: int) -> int:
        """Bytes on the accelerator beside the gradients, the largest of `largest` elements."""
        if copies == 1:
            return 0
        part = -(-largest // copies)  # what a rank sums up (`Ranks.cross`)
        if self.name == "exact":
            return part * gradient.itemsize
        size = min(PIECE, largest)
        check = gradient.itemsize * size  # the guard's second sum
        if self.cast is not None:  # divided, then cast; or cast, and this rank's part
            width = self.cast.itemsize
            check = max(largest * (gradient.itemsize + width), (largest + part) * width)
        owed = self.owed(gradient)
        if (wire := self.blocks) is None or owed is None:
            return check
        codes = wire.size(wire.room(size, copies))
        # Codes of both, or of one's own and all parts; the residual, as it is kept and in float32.
        return check + (2 if copies == 2 else 3) * codes + size * (ROOMS * owed.itemsize + 4)
