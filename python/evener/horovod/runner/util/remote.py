"""Command lines that run elsewhere."""

from __future__ import annotations

import shlex

from evener.horovod.runner.common.util.env import KUBEFLOW_MPI_EXEC, is_kubeflow_mpi

SSH_COMMAND_PREFIX = "ssh -o PasswordAuthentication=no -o StrictHostKeyChecking=no"


def get_ssh_command(
    local_command: str,
    host: str,
    port: int | None = None,
    identity_file: str | None = None,
    timeout_s: int | None = None,
) -> str:
    """`local_command` by ssh on `host`."""
    words = [f"-p {port}"] if port is not None else []
    words += [f"-i {shlex.quote(identity_file)}"] if identity_file is not None else []
    words += [f"-o ConnectTimeout={timeout_s}"] if timeout_s is not None else []
    return " ".join([SSH_COMMAND_PREFIX, host, *words, shlex.quote(local_command)])


def get_remote_command(
    local_command: str,
    host: str,
    port: int | None = None,
    identity_file: str | None = None,
    timeout_s: int | None = None,
) -> str:
    """As `get_ssh_command`, by Kubeflow's agent where that started this process."""
    if is_kubeflow_mpi():
        return f"{KUBEFLOW_MPI_EXEC} {host} {shlex.quote(local_command)}"
    return get_ssh_command(local_command, host, port, identity_file, timeout_s)
