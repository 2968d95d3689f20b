"""The numbers of element types, as the negotiator knows them. Imports torch."""

from __future__ import annotations

import torch

# Element types, by the negotiator's numbers.
DTYPES = (
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bool,
    torch.bfloat16,
)
DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
