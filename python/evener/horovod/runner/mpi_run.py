"""Ranks by mpirun, as upstream's launcher has it. For jobs of your own: `evener launch --mpi`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from evener.horovod.runner.common.util import env as env_util
from evener.horovod.runner.common.util import hosts, safe_shell_exec, tiny_shell_exec

_OMPI_IMPL, _SMPI_IMPL, _MPICH_IMPL, _IMPI_IMPL = "OpenMPI", "SpectrumMPI", "MPICH", "IntelMPI"
_UNKNOWN_IMPL, _MISSING_IMPL = "Unknown", "Missing"
_LARGE_CLUSTER_THRESHOLD = 64
# Flags, and arguments for binding, by implementation. Open MPI: TCP for what MPI itself says.
_UNBOUND = ("-bind-to none", "-map-by slot")
_FLAGS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    _OMPI_IMPL: (("-mca pml ob1", "-mca btl ^openib"), _UNBOUND),
    _SMPI_IMPL: ((), ("-bind-to socket", "-map-by socket", "-rank-by core")),
    _MPICH_IMPL: ((), _UNBOUND),
    _IMPI_IMPL: ((), ()),
}

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


def _get_mpi_implementation_flags(
    tcp_flag: bool | None, env: Mapping[str, str] | None = None
) -> tuple[list[str] | None, list[str] | None, str | None]:
    """(flags, binding arguments, name) of the MPI that is there; None three times without one."""
    name = _get_mpi_implementation(env)
    if name not in _FLAGS:
        return None, None, None
    flags, binding = _FLAGS[name]
    if name == _SMPI_IMPL and tcp_flag:
        flags = [*flags, "-tcp"]
    return list(flags), list(binding), name


def mpi_run(
    settings: Any,
    nics: Collection[str] | None,
    env: dict[str, str],
    command: Sequence[str],
    stdout: Any = None,
    stderr: Any = None,
) -> None:
    """Start settings.num_proc ranks of `command` by mpirun, and wait for them.

    env: mpirun's variables; the ranks get those that are no host's own. stdout, stderr: where
    mpirun writes, with settings.run_func_mode; without it mpirun takes this process's place.

    Raises RuntimeError where mpirun fails, or there is none.
    """
    if not isinstance(env, dict):
        raise TypeError(f"env argument must be a dict, not {type(env)}: {env}")
    flags, binding, name = _get_mpi_implementation_flags(settings.tcp_flag, env=env)
    if flags is None or binding is None:
        raise RuntimeError("no mpirun of a known MPI is on the PATH; install Open MPI")
    make = _hydra_line if name in (_IMPI_IMPL, _MPICH_IMPL) else _open_line
    words = make(settings, list(nics or ()), sorted(env), flags, binding)
    line = " ".join([*words, *map(shlex.quote, command)])
    env = {**{n: os.environ[n] for n in ("PATH", "PYTHONPATH") if n in os.environ}, **env}
    if not settings.run_func_mode:
        os.execve("/bin/sh", ["/bin/sh", "-c", line], env)
    status = safe_shell_exec.execute(line, env=env, stdout=stdout, stderr=stderr)
    if status != 0:
        raise RuntimeError(f"mpirun failed with exit code {status}")


def _ssh(settings: Any) -> str:
    words = [f"-p {settings.ssh_port}"] if settings.ssh_port else []
    words += [f"-i {settings.ssh_identity_file}"] if settings.ssh_identity_file else []
    return " ".join(words)


def _open_line(
    settings: Any, nics: list[str], names: list[str], flags: list[str], binding: list[str]
) -> list[str]:
    """Open MPI's, and what comes from it. A word may be empty."""
    count = len(hosts.parse_hosts(settings.hosts))
    if count >= _LARGE_CLUSTER_THRESHOLD:  # a tree of ssh over this many hosts breaks
        flags += ["-mca plm_rsh_no_tree_spawn true", f"-mca plm_rsh_num_concurrent {count}"]
    if settings.prefix_output_with_timestamp:
        flags.append("--timestamp-output")
    ssh, output = _ssh(settings), settings.output_filename
    return [
        f"mpirun --allow-run-as-root --tag-output -np {settings.num_proc} -H {settings.hosts}",
        settings.binding_args or " ".join(binding),
        " ".join(flags),
        f'-mca plm_rsh_args "{ssh}"' if ssh else "",
        f"-mca btl_tcp_if_include {','.join(nics)}" if nics else "",
        f"-x NCCL_SOCKET_IFNAME={','.join(nics)}" if nics else "",
        f"--output-filename {output}" if output else "",
        " ".join(f"-x {name}" for name in names if env_util.is_exportable(name)),
        settings.extra_mpi_args or "",
    ]


def _hydra_line(
    settings: Any, nics: list[str], names: list[str], flags: list[str], binding: list[str]
) -> list[str]:
    """MPICH's and Intel's, which pass on all of the environment. A word may be empty."""
    del names
    listed, slots = hosts.parse_hosts_and_slots(settings.hosts)
    if len(set(slots.values())) > 1 or len(nics) > 1:
        raise RuntimeError("this MPI wants as many slots on each host, and one interface")
    ssh, output = _ssh(settings), settings.output_filename
    return [
        f"mpirun -l -np {settings.num_proc} -ppn {slots[listed[0]]} -hosts {','.join(listed)}",
        " ".join(binding),
        " ".join(flags),
        f'-bootstrap=ssh -bootstrap-exec-args "{ssh}"' if ssh else "",
        f"-iface {nics[0]}" if nics else "",
        f"-genv NCCL_SOCKET_IFNAME={nics[0]}" if nics else "",
        f"-outfile-pattern {output}" if output else "",
        settings.extra_mpi_args or "",
    ]


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
