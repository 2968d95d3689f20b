"""The numbers of the code that `differences` defines; crates/kernels has the same."""

from __future__ import annotations

import torch

from evener.base import kernels as _kernels

LANES, STEPS = 32, 256
TILE = _kernels.DIFFERENCE_TILE
# Weights of a lane that share a bit where it is a grouped tile's.
GROUP = 4
ESCAPE = 12
# K is looked for around the mean of what each changed weight would want.
LOWEST, HIGHEST = -3, 1
# Where a weight's exponent lies in its 16 bits: bits below it, and a mask.
EXPONENT = {torch.bfloat16: (7, 255), torch.float16: (10, 31)}


def tiles(n: int) -> int:
    """Headers of a message of `n` weights."""
    return -(-n // TILE)
