"""What is put into buffers and what must come out.

Every buffer repeats a vector of PERIOD elements, so filling and checking are one strided copy and
one comparison at any size, and nothing of the buffer's size is kept beside it. The values are whole
numbers so small that every order of reduction gives the same bits in the type at hand; only the
mean over a number of ranks that is no power of two may round, and is compared within its error.
Vectors differ by rank and by repetition, so a block in the wrong place or a stale result is seen.
"""

from __future__ import annotations

import torch
from torch import Tensor

PERIOD = 251  # a prime: no power-of-two shift of a buffer looks like itself
MULTIPLIER = 2.0
"""What `mulsum` multiplies each rank's values with."""

DTYPES: dict[str, torch.dtype] = {
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int32": torch.int32,
    "uint32": torch.uint32,
    "int64": torch.int64,
    "uint64": torch.uint64,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
    "bfloat16": torch.bfloat16,
    "f8e4m3": torch.float8_e4m3fn,
    "f8e5m2": torch.float8_e5m2,
}
# Largest whole number up to which all are exact.
_EXACT = {
    "int8": 127,
    "uint8": 255,
    "half": 2048,
    "bfloat16": 256,
    "f8e4m3": 16,
    "f8e5m2": 8,
}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def contribution(
    kind: str, op: str, rank: int, ranks: int, repetition: int, block: int = 0
) -> Tensor:
    """What a rank puts in, one period, double. `block`: its block for another rank (alltoall)."""
    j = torch.arange(PERIOD, dtype=torch.float64)
    limit = _EXACT.get(kind, 4096)
    if op in ("sum", "avg", "mulsum"):
        limit //= 2 if op == "mulsum" else 1
        levels = min(limit // ranks + 1, 7)
        if levels < 2:
            # With this number of ranks only one of them may count at each place.
            return ((j + repetition) % ranks == rank).double()
        return (3 * j + 5 * rank + repetition) % levels
    if op == "prod":
        return 1 + ((j + repetition) % ranks == rank).double()
    if op in ("max", "min"):
        return (3 * j + 5 * rank + repetition) % min(limit, 7)
    # Factors that are no multiple of any of the moduli: 9, 17, 128, 251.
    return (3 * j + 11 * rank + 7 * block + repetition) % min(limit + 1, 251)


def reduced(kind: str, op: str, ranks: int, repetition: int) -> Tensor:
    """What comes out of a reduction over all ranks, one period, double."""
    parts = torch.stack([contribution(kind, op, r, ranks, repetition) for r in range(ranks)])
    if op == "prod":
        return parts.prod(0)
    if op == "max":
        return parts.amax(0)
    if op == "min":
        return parts.amin(0)
    total = parts.sum(0)
    if op == "avg":
        mean = total / ranks
        return mean if DTYPES[kind].is_floating_point else mean.floor()
    return total * MULTIPLIER if op == "mulsum" else total


def fill(buffer: Tensor, period: Tensor) -> None:
    """Repeat `period` over a flat buffer."""
    vector = as_bits(period.to(buffer.device).to(buffer.dtype))
    bits = as_bits(buffer)
    whole = bits.numel() // PERIOD * PERIOD
    bits[:whole].view(-1, PERIOD).copy_(vector.expand(whole // PERIOD, PERIOD))
    bits[whole:].copy_(vector[: bits.numel() - whole])


def wrong(buffer: Tensor, period: Tensor, tolerance: float = 0.0) -> int:
    """Elements of a flat buffer that are not what `period` repeated says."""
    total = 0
    rows = max(1, (1 << 24) // PERIOD)  # 16 million elements at a time bound the memory
    expected = period.to(buffer.device)
    bits = as_bits(expected.to(buffer.dtype))
    for piece in buffer.split(rows * PERIOD):
        whole = piece.numel() // PERIOD * PERIOD
        for part, want, exact in (
            (piece[:whole].view(-1, PERIOD), expected, bits),
            (piece[whole:], expected[: piece.numel() - whole], bits[: piece.numel() - whole]),
        ):
            if not part.numel():
                continue
            if tolerance:
                off = (part.double() - want).abs() > tolerance * want.abs() + tolerance
                total += int(off.sum().item())
            else:
                total += int((as_bits(part) != exact).sum().item())
    return total


def tolerance(kind: str, op: str, ranks: int) -> float:
    """Relative error that a correct result may have; 0 where it must be exact."""
    if op != "avg" or not DTYPES[kind].is_floating_point or not ranks & (ranks - 1):
        return 0.0
    return float(torch.finfo(DTYPES[kind]).eps) * (ranks + 2)


def as_bits(tensor: Tensor) -> Tensor:
    """The same memory as whole numbers: comparable in every type, and no NaN equals nothing."""
    return tensor.view(_BITS[tensor.element_size()])
