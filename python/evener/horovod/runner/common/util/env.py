"""Which variables go along to other hosts, and what the launcher told this process."""

from __future__ import annotations

import os

from evener.horovod.runner.launch import STAYS

LOG_LEVEL_STR = "HOROVOD_LOG_LEVEL"
KUBEFLOW_MPI_EXEC = "/etc/mpi/kubexec.sh"

_FAMILIES = (
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


def is_exportable(v: str) -> bool:
    """Whether variable `v` is passed on to the ranks."""
    return not STAYS.fullmatch(v)


def get_env_rank_and_size() -> tuple[int, int]:
    """Rank and size from the environment, (0, 1) where there is nothing.

    Raises RuntimeError where a rank stands without its size, or a size without its rank.
    """
    for rank_name, size_name in _FAMILIES:
        rank, size = os.environ.get(rank_name), os.environ.get(size_name)
        if rank is not None and size is not None:
            return int(rank), int(size)
        if rank is not None or size is not None:
            raise RuntimeError(f"only one of {rank_name} and {size_name} is set")
    return 0, 1


def is_kubeflow_mpi() -> bool:
    """Whether Kubeflow's MPI operator started this process."""
    agent = os.environ.get("OMPI_MCA_plm_rsh_agent")  # noqa: SIM112 - Open MPI's name
    return agent == KUBEFLOW_MPI_EXEC
