"""The commands, for `evener.tools.bench.command`: `LazyGroup(lazy={**COLLECTIVES, ...})`."""

from __future__ import annotations

_MODULE = "evener.tools.bench.collectives.command"
NAMES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "alltoall",
    "gather",
    "scatter",
    "sendrecv",
    "hypercube",
)
COLLECTIVES: dict[str, tuple[str, str]] = {
    name: (f"{_MODULE}:{name}", f"{name}: time, algorithm and bus bandwidth by size.")
    for name in NAMES
}


def plain(name: str) -> str:
    """nccl-tests' name of a program as the command's: `all_reduce_perf` is `all_reduce`."""
    return name.removesuffix("_perf") if name.removesuffix("_perf") in NAMES else name
