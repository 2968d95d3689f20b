"""Which MPI is installed. What upstream's launcher does with it is `evener launch --mpi`'s."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.horovod.common.exceptions import NotServedError
from evener.horovod.runner.common.util import env as env_util
from evener.horovod.runner.common.util import safe_shell_exec, tiny_shell_exec

_OMPI_IMPL, _SMPI_IMPL, _MPICH_IMPL, _IMPI_IMPL = "OpenMPI", "SpectrumMPI", "MPICH", "IntelMPI"
_UNKNOWN_IMPL, _MISSING_IMPL = "Unknown", "Missing"
_LARGE_CLUSTER_THRESHOLD = 64

# What `mpirun --version` says, the more special ones first.
_SAYS = (
    ("Open MPI", _OMPI_IMPL),
    ("OpenRTE", _OMPI_IMPL),
    ("IBM Spectrum MPI", _SMPI_IMPL),
    ("Intel(R) MPI", _IMPI_IMPL),
    ("MPICH", _MPICH_IMPL),
    ("HYDRA", _MPICH_IMPL),
)


def _get_mpi_implementation(env: Mapping[str, str] | None = None) -> str:
    """The name of the MPI whose mpirun is on the PATH."""
    found = tiny_shell_exec.execute("mpirun --version", env)
    if found is None or found[1] != 0:
        return _MISSING_IMPL
    return next((name for text, name in _SAYS if text in found[0]), _UNKNOWN_IMPL)


def mpi_available(env: Mapping[str, str] | None = None) -> bool:
    """Whether there is an MPI that is known."""
    return _get_mpi_implementation(env) not in (_UNKNOWN_IMPL, _MISSING_IMPL)


def is_open_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Whether it is Open MPI."""
    return _get_mpi_implementation(env) == _OMPI_IMPL


def is_spectrum_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Whether it is IBM's Spectrum MPI."""
    return _get_mpi_implementation(env) == _SMPI_IMPL


def is_mpich(env: Mapping[str, str] | None = None) -> bool:
    """Whether it is MPICH."""
    return _get_mpi_implementation(env) == _MPICH_IMPL


def is_intel_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Whether it is Intel's."""
    return _get_mpi_implementation(env) == _IMPI_IMPL


def _get_mpi_implementation_flags(*_: Any, **__: Any) -> Any:
    """Raises NotServedError: upstream's own command lines are not made here."""
    raise NotServedError(
        "upstream's flags for an MPI are not made here", "use evener launch --mpi --dry-run"
    )


def mpi_run(*_: Any, **__: Any) -> int:
    """Raises NotServedError: `evener launch --mpi` starts a job by mpirun."""
    raise NotServedError(
        "horovod.runner.mpi_run.mpi_run is not served", "use evener launch --mpi, or horovod.run"
    )


__all__ = [
    "env_util",
    "is_intel_mpi",
    "is_mpich",
    "is_open_mpi",
    "is_spectrum_mpi",
    "mpi_available",
    "mpi_run",
    "safe_shell_exec",
]
