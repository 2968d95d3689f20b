"""The numbers of operations and element types, as the negotiator and the timeline know them."""

from __future__ import annotations

import torch

# Operations, by the negotiator's numbers; and their names in handles, errors and timelines.
KINDS = (
    "allreduce",
    "allgather",
    "broadcast",
    "adasum",
    "alltoall",
    "reducescatter",
    "barrier",
    "join",
    "add_process_set",
    "remove_process_set",
)
(
    ALLREDUCE,
    ALLGATHER,
    BROADCAST,
    ADASUM,
    ALLTOALL,
    REDUCESCATTER,
    BARRIER,
    JOIN,
    ADD_SET,
    REMOVE_SET,
) = range(10)

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
