"""The questions about the job: who am I, how many are we, what is there to use.

`mpi_ops` gives them to scripts, `common.basics.HorovodBasics` to libraries that ask by methods.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

from evener.base import settings
from evener.horovod.state import STATE


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Find the other ranks and start. Collective; does nothing where it is done already.

    comm: None, the list of all ranks, or an mpi4py communicator, whose processes are then the job;
    NotBuiltError for a part of the ranks. process_sets: those that exist
    from the start, a list of ProcessSet, the same on all ranks; or "dynamic". Raises
    RendezvousError where the ranks do not find each other, SettingError for a bad variable,
    ValueError for a set that cannot be.
    """
    STATE.init(comm, process_sets)


def shutdown() -> None:
    """End what `init` began. `init` may follow again."""
    STATE.shutdown()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not after it."""
    return STATE.initialized


def rank() -> int:
    """The place of this process among all, 0 .. size()-1."""
    return STATE.ranks.rank


def size() -> int:
    """The number of processes."""
    return STATE.ranks.size


def local_rank() -> int:
    """The place of this process among those of its node."""
    return cast(int, STATE.ranks.local_rank)


def local_size() -> int:
    """The number of processes on this node."""
    return cast(int, STATE.ranks.local_size)


def cross_rank() -> int:
    """The place of this process among those of all nodes that have the same local rank."""
    return cast(int, STATE.ranks.cross_rank)


def cross_size() -> int:
    """The number of processes that have the same local rank."""
    return cast(int, STATE.ranks.cross_size)


def is_homogeneous() -> bool:
    """Whether all nodes have the same number of processes."""
    return STATE.engine.homogeneous


def mpi_threads_supported() -> bool:
    """True: nothing here uses MPI, so programs may use it (mpi4py) beside this from any thread.

    False where HOROVOD_MPI_THREADS_DISABLE=1 says that they do not.
    """
    _ = STATE.ranks
    return not settings.HOROVOD_MPI_THREADS_DISABLE.get()


def mpi_enabled() -> bool:
    """False: collectives are NCCL's and Gloo's, also under mpirun."""
    return False


def mpi_built() -> bool:
    """False: collectives are NCCL's and Gloo's, also under mpirun."""
    return False


def gloo_enabled() -> bool:
    """True."""
    return True


def gloo_built() -> bool:
    """True: it comes with torch."""
    return True


def nccl_built() -> int:
    """NCCL's version as a number (2.28.9: 22809), 0 where torch has none."""
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]
    return int(major) * 10000 + int(minor) * 100 + int(patch)


def ddl_built() -> int:
    """0: not used."""
    return 0


def ccl_built() -> int:
    """0: not used."""
    return 0


def cuda_built() -> bool:
    """Whether torch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch was built with ROCm."""
    return torch.version.hip is not None


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Rank 0 writes a timeline into `file_path` from now on (`evener.horovod.timeline`)."""
    STATE.engine.start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Complete the timeline's file."""
    STATE.engine.stop_timeline()
