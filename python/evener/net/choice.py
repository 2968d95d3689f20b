"""Whether NCCL gets the plug-in where nobody has said so: EVENER_NET=auto.

The plug-in is quicker than NCCL's sockets where its worker threads have processors of their own,
and takes about twice the processor time for it (docs/benchmarks/network.md). So it is not for
machines with few of them, not where NCCL has RDMA, and not where no byte crosses a network.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROCESSORS = 16
"""Per rank, at least: as measured. With 8 it was behind sockets over 10 Gb/s."""

_LOCAL = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_WORLD = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@dataclass(frozen=True)
class Machine:
    """What counts of a machine: GPUs, processors that this process may use, RDMA devices."""

    gpus: int
    processors: int
    rdma: tuple[str, ...] = ()

    @classmethod
    def here(cls) -> Machine:
        """This one. Starts nothing: it is asked when evener is imported."""
        gpus = sum(path.name[6:].isdecimal() for path in Path("/dev").glob("nvidia*"))
        rdma = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
        return cls(gpus, len(os.sched_getaffinity(0)), tuple(rdma))


def why_not(env: Mapping[str, str], machine: Machine) -> str:
    """Why a job with this environment, on this machine, should keep NCCL's network; or nothing."""
    if not machine.gpus:
        return "this machine has no NVIDIA GPU"
    if machine.rdma and env.get("NCCL_IB_DISABLE", "0") != "1":
        return f"NCCL uses RDMA where it can, and this machine has {', '.join(machine.rdma)}"
    ranks, world = _number(env, _LOCAL), _number(env, _WORLD)
    if ranks is not None and ranks == world:
        return "all ranks are on one node"
    each = machine.processors // (ranks or machine.gpus)
    if each < PROCESSORS:
        return f"a rank has {each} processors, and the plug-in wants {PROCESSORS}"
    return ""


def _number(env: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    found = next((env[name] for name in names if env.get(name, "").isdecimal()), None)
    return int(found) if found and int(found) > 0 else None
