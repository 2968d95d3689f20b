"""From hosts and wishes to the commands of a launcher: pure, so that --dry-run shows what runs.

Two launchers. torchrun: one agent a host, the remote ones started over ssh. mpirun: Open MPI 4 or
5, which brings its own daemons over ssh or through the batch system. Nothing is probed here but by
the caller; a `Launch` is a value.
"""

from __future__ import annotations

import re
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from evener.errors import EvenerError, UsageError
from evener.tools.launch.hosts import Host
from evener.tools.launch.secret import is_secret, shown

# What travels to other hosts without being named by -x: what decides which programs and libraries
# are found, and what steers the software under a training script.
FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV")
FORWARDED_PREFIXES = (
    *("EVENER_", "LIGHT_", "HOROVOD_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_"),
    *("OMP_", "MKL_", "HF_", "UCX_"),
)
# These belong to the process that reads them.
_NEVER = re.compile(
    r"HOROVOD_(LOCAL_|CROSS_)?(RANK|SIZE)$|HOROVOD_HOSTNAME$|HOROVOD_GLOO_|EVENER_LAUNCH_|_EVENER_COMPLETE"
)

RANK_MARK = "<<evener-rank "


@dataclass(frozen=True)
class Wishes:
    """What the command line asks for."""

    command: tuple[str, ...]
    interface: str = ""
    start_timeout: float = 60.0
    env: Mapping[str, str] = field(default_factory=dict)  # set for all ranks
    # Set for the ranks of one host, by its name (--map).
    host_env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    forward: tuple[str, ...] = ()  # names whose values here go to all ranks
    master_port: int = 29500
    master: str = ""  # where rank 0 is met, by an address that all hosts reach; "": its name
    rsh: tuple[str, ...] = ("ssh",)
    # A folder on each host for torchrun's copies of the output, removed at the end.
    scratch: str = "/tmp/evener-launch"
    mpi_args: tuple[str, ...] = ()  # more arguments for mpirun
    binding: tuple[str, ...] | None = None  # mpirun's; None: nothing is bound
    horovod: bool = False  # tell each rank its place in Horovod's variables, too


@dataclass(frozen=True)
class HostCommand:
    """One process that the launcher starts: on `host`, for the ranks first .. first+count-1."""

    host: str
    argv: tuple[str, ...]
    first_rank: int
    ranks: int
    remote: bool
    env: Mapping[str, str]


@dataclass(frozen=True)
class Launch:
    """Commands, who runs which rank, and why this launcher."""

    launcher: str
    why: str
    commands: tuple[HostCommand, ...]
    rank_hosts: tuple[str, ...]

    def host_of(self, rank: int) -> str:
        return self.rank_hosts[rank]


def torchrun(
    hosts: list[Host], wishes: Wishes, here: Mapping[str, str], local: set[str], why: str
) -> Launch:
    """One torchrun agent a host. here: our environment; local: the hosts that are this one."""
    commands, first = [], 0
    shared = {**interface_env(wishes), **wishes.env}
    shared |= {name: here[name] for name in wishes.forward if name in here}
    # A pipe would hold a rank's lines back.
    shared.setdefault("PYTHONUNBUFFERED", here.get("PYTHONUNBUFFERED") or "1")
    if "OMP_NUM_THREADS" not in here:
        # torchrun's own choice for several workers; said here, it does not warn about it.
        shared.setdefault("OMP_NUM_THREADS", "1")
    # torchrun puts this before each line, and the launcher takes it off again: it is how a line's
    # rank is known.
    shared["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = RANK_MARK + "${rank}>>"
    for index, host in enumerate(hosts):
        remote = host.name not in local
        own = {**wishes.host_env.get(host.name, {}), **shared}
        env = {**remote_env(here), **own} if remote else own
        # In another encoding its reader of the ranks' output ends at the first other letter.
        argv = [sys.executable, "-X", "utf8", "-m", "torch.distributed.run"]
        argv += [f"--nnodes={len(hosts)}", f"--node-rank={index}"]
        argv += [f"--nproc-per-node={host.slots}"]
        argv += [f"--master-addr={wishes.master or master_address(hosts, local)}"]
        argv += [f"--master-port={wishes.master_port}"]
        argv += [f"--rdzv-conf=timeout={max(1, round(wishes.start_timeout))}"]
        program, *arguments = started(wishes, hosts)
        argv += [f"--log-dir={wishes.scratch}", "--tee=3", "--no-python", program]
        # torchrun fills in ${local_rank}, and makes one $ of two.
        argv += [argument.replace("$", "$$") for argument in arguments]
        commands.append(HostCommand(host.name, tuple(argv), first, host.slots, remote, env))
        first += host.slots
    return Launch("torchrun", why, tuple(commands), _rank_hosts(hosts))


def mpirun(
    hosts: list[Host] | None,
    ranks: int,
    wishes: Wishes,
    here: Mapping[str, str],
    local: set[str],
    major: int,
    root: bool,
    why: str,
) -> Launch:
    """One mpirun of Open MPI `major`. hosts None: the batch system's. root: we are root."""
    daemon = "--mca" if major < 5 else "--prtemca"
    agent = "plm_rsh_agent" if major < 5 else "plm_ssh_agent"
    argv = ["mpirun", *(["--allow-run-as-root"] if root else []), "-np", str(ranks)]
    if hosts is not None:
        argv += ["-H", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
    bind_none = ("--bind-to", "none", "--map-by", "slot")
    argv += [*(bind_none if wishes.binding is None else wishes.binding), *wishes.mpi_args]
    argv += ["--tag-output"] if major < 5 else ["--output", "tag"]
    if hosts is not None and any(host.name not in local for host in hosts):
        argv += [daemon, agent, shlex.join(wishes.rsh)]
        if major < 5:
            argv += ["--mca", "orte_startup_timeout", str(max(1, round(wishes.start_timeout)))]
    if wishes.interface:
        argv += ["--mca", "btl_tcp_if_include", wishes.interface]
        argv += [daemon, "oob_tcp_if_include", wishes.interface]
    shared = {**_same_everywhere(wishes), **interface_env(wishes), **wishes.env}
    shared.setdefault("PYTHONUNBUFFERED", here.get("PYTHONUNBUFFERED") or "1")
    if hosts is not None:
        # Not needed by evener.comm, which asks PMIx; for scripts that read it themselves.
        shared.setdefault("MASTER_ADDR", wishes.master or master_address(hosts, local))
        shared.setdefault("MASTER_PORT", str(wishes.master_port))
    names = [n for n in {**remote_env(here), **dict.fromkeys(wishes.forward)} if n not in shared]
    for name in names:
        argv += ["-x", name]
    # mpirun takes a secret out of its own environment, and not from where `ps` shows it.
    hidden = {name: value for name, value in shared.items() if is_secret(name)}
    for name, value in shared.items():
        argv += ["-x", name if name in hidden else f"{name}={value}"]
    argv += started(wishes, hosts)
    command = HostCommand(socket.gethostname(), tuple(argv), 0, ranks, False, hidden)
    rank_hosts = _rank_hosts(hosts) if hosts is not None else ("",) * ranks
    return Launch(f"mpirun (Open MPI {major})", why, (command,), rank_hosts)


def started(wishes: Wishes, hosts: list[Host] | None) -> tuple[str, ...]:
    """What a launcher starts for each rank."""
    if not wishes.horovod:
        return wishes.command
    names = ",".join(f"{host.name}:{host.slots}" for host in hosts or ())
    script = str(Path(__file__).with_name("horovod_env.py"))
    return (sys.executable, "-I", "-S", script, names, *wishes.command)


def open_mpi_major(version_text: str) -> int:
    """4 or 5 (or newer) from the output of `mpirun --version`.

    Raises UsageError for another MPI, or an Open MPI older than 4.
    """
    first = version_text.strip().partition("\n")[0] or "nothing"
    match = re.search(r"Open MPI\) (\d+)\.", version_text)
    if match is None:
        raise UsageError(
            f"the mpirun on the PATH is not Open MPI: it says {first!r}",
            "put Open MPI 4 or 5 on the PATH (package openmpi-bin), use --torchrun, or call that "
            "mpirun yourself: ranks are detected under it too",
        )
    if int(match[1]) < 4:
        raise UsageError(f"{first} is too old", "install Open MPI 4 or newer (openmpi-bin)")
    return int(match[1])


def shell_line(command: HostCommand, wishes: Wishes, cwd: str) -> str:
    """The command as one would type it; secrets are hidden."""
    assigned = [f"{name}={shlex.quote(shown(name, value))}" for name, value in command.env.items()]
    text = " ".join([*assigned, shlex.join(command.argv)])
    if not command.remote:
        return text
    inner = f"cd {shlex.quote(cwd)} && {'env ' if assigned else ''}{text}"
    return shlex.join([*wishes.rsh, command.host, inner])


def master_address(hosts: list[Host], local: set[str]) -> str:
    """Where rank 0 is, as all hosts may call it."""
    name = hosts[0].name.strip("[]")
    if len(hosts) == 1 and hosts[0].name in local:
        return "127.0.0.1"
    if name in ("localhost", "127.0.0.1", "::1"):  # true here only
        return socket.gethostname()
    return name.rpartition("@")[2]


class MissingProgramError(EvenerError):
    """A program that the launcher needs is not installed."""


def _same_everywhere(wishes: Wishes) -> Mapping[str, str]:
    """mpirun's -x is for all hosts alike. Raises UsageError where hosts need different values."""
    given = list(wishes.host_env.values())
    for one in given[1:]:
        if one != given[0]:
            names = ", ".join(sorted({name for each in given for name in each}))
            raise UsageError(
                f"--map gives hosts different values of {names}, and mpirun all the same",
                "use --torchrun, or name cards and order GPUs alike on all hosts of the map",
            )
    return given[0] if given else {}


def interface_env(wishes: Wishes) -> dict[str, str]:
    """What --network-interface means to NCCL and Gloo."""
    if not wishes.interface:
        return {}
    first = wishes.interface.partition(",")[0]
    return {"NCCL_SOCKET_IFNAME": wishes.interface, "GLOO_SOCKET_IFNAME": first}


def remote_env(here: Mapping[str, str]) -> dict[str, str]:
    """What of our environment `here` a process on another host gets."""
    return {
        name: value
        for name, value in here.items()
        if (name in FORWARDED or name.startswith(FORWARDED_PREFIXES)) and not _NEVER.match(name)
    }


def _rank_hosts(hosts: list[Host]) -> tuple[str, ...]:
    return tuple(host.name for host in hosts for _ in range(host.slots))
