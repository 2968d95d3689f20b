"""The numbers of operations, as the negotiator and the timeline know them."""

from __future__ import annotations

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
