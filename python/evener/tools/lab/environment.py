"""What a process inside a node finds in its environment, and what it must not find.

A lab is built on a machine that may itself be a rank of something: what names that machine's ranks,
interfaces and peers is taken out, what a node needs is put in, and all the rest is passed on.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from evener.tools.lab.spec import Spec
from evener.tools.launch import horovod_env

# Ranks and rendezvous of every launcher, and the interfaces and addresses of the host.
_LEAKS = re.compile(
    r"(LOCAL_|GROUP_|NODE_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|(OMPI|PMIX|PMI|PRTE|MPI|MV2_COMM|PALS|SLURM|FLUX|TORCHELASTIC)_.*"
    r"|HOROVOD_(RANK|SIZE|LOCAL_RANK|LOCAL_SIZE|CROSS_RANK|CROSS_SIZE|HOSTNAME|GLOO_.*)"
    r"|NCCL_(SOCKET_IFNAME|HOSTID|COMM_ID|IB_HCA|OOB_NET_IFNAME)|(GLOO|TP)_SOCKET_IFNAME"
    r"|EVENER_HOSTID"
    r"|UCX_NET_DEVICES|HOSTNAME|XDG_RUNTIME_DIR|SSH_(CONNECTION|CLIENT|TTY|AUTH_SOCK)"
)

# How OpenMPI 4 and 5 are told what to use instead of ssh.
AGENT_VARIABLES = ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent")


def gpus() -> list[str]:
    """The GPUs that programs may use: CUDA_VISIBLE_DEVICES where set, else all of the machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        return [name for name in names if name and not name.startswith("-")]
    devices = [path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdecimal()]
    return [str(index) for index in range(len(devices))]


def mps() -> Path | None:
    """Where the control daemon of NVIDIA's MPS listens; None where it does not run."""
    directory = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps")
    return directory if os.access(directory / "control", os.W_OK) else None


def share(available: Sequence[str], first: int, slots: int) -> list[str] | None:
    """The GPUs of a node of `slots`, the first of which is number `first` of all: in turn.

    With fewer GPUs than slots nodes share them, and slots of one node only where it has more than
    there are: NCCL takes no GPU twice on a host. None without a GPU.
    """
    count = len(available)
    return [available[(first + slot) % count] for slot in range(min(slots, count))] or None


def inherited() -> dict[str, str]:
    """This process's environment without what belongs to the host or to another launcher."""
    kept = {name: value for name, value in os.environ.items() if not _LEAKS.fullmatch(name)}
    for name in ("TMPDIR", "TMP", "TEMP"):
        if kept.get(name, "").startswith("/tmp/"):  # a node's /tmp is empty
            del kept[name]
    return kept


def of_node(
    name: str, devices: Sequence[str], visible: Sequence[str] | None, *, isolated: bool
) -> dict[str, str]:
    """What holds for every process of a node: its name, its NICs, its GPUs, its way to the others.

    `devices`: names of its NICs. `visible`: its GPUs, None to leave the choice as it is.
    `isolated`: False on plain loopback, where there are no other hosts.
    """
    variables = {
        "HOSTNAME": name,
        "NCCL_HOSTID": name,
        "NCCL_SOCKET_IFNAME": ",".join(devices),
        "GLOO_SOCKET_IFNAME": devices[0],
        "TP_SOCKET_IFNAME": devices[0],
    }
    if isolated:
        variables.update(_mpi())
    if visible is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(visible)
    return variables


def _mpi() -> dict[str, str]:
    """So that a plain `mpirun -H node0:2,node1:2` works: defaults that its command line overrides.

    OpenMPI 4 reads OMPI_MCA_*, OpenMPI 5 PRTE_MCA_*.
    """
    agent = f"{sys.executable} -I -S {Path(__file__).with_name('agent.py')}"
    variables = {
        **dict.fromkeys(AGENT_VARIABLES, agent),
        # Every node believes that all cores are its own: bound, all nodes would take the first.
        "OMPI_MCA_hwloc_base_binding_policy": "none",
        "PRTE_MCA_hwloc_default_binding_policy": "none",
    }
    if os.getuid() == 0:
        for family in ("OMPI", "PRTE"):
            variables[f"{family}_ALLOW_RUN_AS_ROOT"] = "1"
            variables[f"{family}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return variables


def of_slot(rank: int, spec: Spec, address: str, port: int) -> dict[str, str]:
    """What a launcher tells a rank."""
    node, slot = spec.place(rank)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_RANK": str(slot),
        "LOCAL_WORLD_SIZE": str(spec.sizes[node]),
        "GROUP_RANK": str(node),
        "NODE_RANK": str(node),
        "GROUP_WORLD_SIZE": str(spec.nodes),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        # Output goes through a pipe: lines should come when they are written.
        "PYTHONUNBUFFERED": "1",
    }


def of_threads(ranks: int) -> dict[str, str]:
    """An equal part of this machine's cores for each rank, where the user has said nothing.

    Every node believes that all cores are its own. Threads of OpenMP wait for each other by
    spinning: with more of them than cores a step took ten times as long, on a busy machine more.
    """
    if "OMP_NUM_THREADS" in os.environ or ranks == 1:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks))}


def of_horovod_slot(rank: int, spec: Spec, name: str) -> dict[str, str]:
    """What Horovod's launcher tells a rank on host `name`."""
    node, slot = spec.place(rank)
    cross = spec.cross(node, slot)
    return horovod_env.variables(rank, spec.world_size, slot, spec.sizes[node], cross, name)


def merged(*layers: Mapping[str, str | None] | None) -> dict[str, str]:
    """Later layers win; None takes a variable out."""
    result: dict[str, str] = {}
    for layer in layers:
        for name, value in (layer or {}).items():
            if value is None:
                result.pop(name, None)
            else:
                result[name] = value
    return result
