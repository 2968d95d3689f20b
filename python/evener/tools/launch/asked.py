"""What a command line of `evener launch` asks for, and which options contradict each other."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from evener.base import settings
from evener.errors import UsageError
from evener.tools.launch.discovery import Cooldown, Script
from evener.tools.launch.elastic import Discovery, Fixed, Limits
from evener.tools.launch.hosts import Host, parse_hostfile, parse_hosts


@dataclass(frozen=True)
class Asked:
    """The options by the names of their parameters; what they mean is in their helps."""

    command: tuple[str, ...]
    ranks: int | None
    hosts: str | None
    hostfile: Path | None
    map_file: Path | None
    launcher: str | None
    interface: str
    start_timeout: float
    output_dir: Path | None
    env: tuple[str, ...]
    master_port: int | None
    ssh_port: int | None
    ssh_identity_file: str | None
    rsh: str | None
    horovod: bool
    ddp: bool
    fsdp: bool
    floor: str | None
    every: int | str | None
    overlap: int | None
    min_nodes: int | None
    join: str | None
    token_file: Path | None
    host_discovery_script: Path | None
    least: int | None
    most: int | None
    slots_per_host: int
    reset_limit: int | None
    cooldown: tuple[float, float] | None
    elastic_timeout: float | None
    watch: bool
    mpi_args: str | None
    binding_args: str | None
    timestamps: bool
    tag: bool
    check: bool
    dry_run: bool
    verbose: bool
    # Whether --start-timeout was given: only then are hosts that are slow to answer waited for.
    patient: bool

    @property
    def is_elastic(self) -> bool:
        """Whether ranks may come and go."""
        return any(one is not None for one in (self.host_discovery_script, self.least, self.most))

    def refuse_contradictions(self) -> None:
        """Raises UsageError for options that cannot be given together."""
        if self.hosts and self.hostfile:
            raise UsageError("-H and --hostfile were both given", "give one of them")
        if self.map_file and (self.hosts or self.hostfile or self.interface):
            other = "-H" if self.hosts else "--hostfile" if self.hostfile else "--network-interface"
            raise UsageError(
                f"--map and {other} were both given",
                "the map names hosts and cards: give one of them",
            )
        if self.rsh and (self.ssh_port or self.ssh_identity_file):
            raise UsageError(
                "--rsh and --ssh-port or --ssh-identity-file were both given", "give one"
            )
        if self.is_elastic and self.map_file:
            raise UsageError(
                "--map and an elastic job: hosts that come and go have no place on a map",
                "leave --map out, or --min-np, --max-np and --host-discovery-script",
            )
        if self.is_elastic and self.ddp:
            raise UsageError(
                "--ddp and an elastic job: torch's process groups do not change while ranks live",
                "leave --min-np, --max-np and --host-discovery-script out, and save checkpoints; "
                "or give --every and --min-nodes, and whole nodes may come and go",
            )
        self._refuse_for_nodes()
        if self.is_elastic:
            for option, given in (
                ("--mpi-args", self.mpi_args),
                ("--binding-args", self.binding_args),
                ("--master-port", self.master_port),
            ):
                if given is not None:
                    raise UsageError(
                        f"{option} {given} and an elastic job: Evener starts its ranks, and they "
                        "meet anew whenever one comes or goes",
                        f"leave {option} out",
                    )
        if self.slots_per_host != 1 and not self.host_discovery_script:
            raise UsageError(
                f"--slots-per-host {self.slots_per_host} is for hosts that a script names",
                "give --host-discovery-script too, or write HOST:SLOTS",
            )
        bounds = self.reset_limit is not None or self.elastic_timeout is not None
        if not self.is_elastic and (bounds or self.cooldown):
            raise UsageError(
                "--reset-limit, --blacklist-cooldown-range and --elastic-timeout are for elastic "
                "jobs",
                "give --min-np or --host-discovery-script too, or leave them out",
            )

    def _refuse_for_nodes(self) -> None:
        option = "--join" if self.join else "--min-nodes"
        if self.join and self.min_nodes:
            raise UsageError(
                "--join and --min-nodes were both given", "the hub that is joined knows how many"
            )
        if self.token_file and not (self.join or self.min_nodes):
            raise UsageError("--token-file is for --join and --min-nodes", "give one of them")
        if not (self.join or self.min_nodes):
            return
        if not (self.ddp and self.every):
            raise UsageError(f"{option} is for nodes that take local steps", "give --ddp --every N")
        if self.every == "auto":
            raise UsageError(
                f"--every auto and {option}: nodes do not time exchanges", "give --every N"
            )
        if self.launcher == "mpirun" or self.map_file or self.master_port:
            raise UsageError(
                f"{option} with --mpi, --map or --master-port: each node is a job of its own",
                "leave them out",
            )
        if self.join and not self.token_file:
            raise UsageError("--join needs the hub's token", "give --token-file FILE")

    def named_hosts(self) -> list[Host] | None:
        """The hosts of -H or --hostfile. Raises UsageError for what is no host."""
        if self.hosts:
            return parse_hosts(self.hosts)
        return parse_hostfile(self.hostfile) if self.hostfile else None

    def variables(self) -> tuple[dict[str, str], tuple[str, ...]]:
        """What -x sets, and the names whose values here it passes on. Raises UsageError."""
        values: dict[str, str] = {}
        forward: list[str] = []
        for text in self.env:
            name, equals, value = text.partition("=")
            if not name or not name.replace("_", "a").isalnum():
                raise UsageError(f"-x {text!r} is not a variable", "write -x NAME or -x NAME=VALUE")
            if equals:
                values[name] = value
            elif name in os.environ:
                forward.append(name)
            else:
                raise UsageError(f"-x {name}: {name} is not set here", f"write -x {name}=VALUE")
        return values, tuple(forward)

    def shell(self) -> tuple[str, ...]:
        """What reaches a host."""
        if self.rsh:
            return tuple(shlex.split(self.rsh))
        timeout = max(1, round(self.start_timeout))
        # BatchMode: a question for a password on several hosts at once can never be answered.
        words = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={timeout}"]
        words += ["-p", str(self.ssh_port)] if self.ssh_port else []
        words += ["-i", self.ssh_identity_file] if self.ssh_identity_file else []
        return tuple(words)

    def discovery(self, hosts: list[Host] | None) -> Discovery:
        """Where an elastic job finds hosts. Raises UsageError where there is nothing."""
        if hosts and self.host_discovery_script:
            raise UsageError("hosts and --host-discovery-script were both given", "give one")
        if self.host_discovery_script:
            return Script(self.host_discovery_script, self.slots_per_host)
        if not hosts or len(hosts) < 2:
            raise UsageError(
                "an elastic job needs two hosts or more, because a failure takes out its host; "
                f"{len(hosts or [])} were given",
                "name more hosts by -H, or give --host-discovery-script",
            )
        return Fixed({host.name: host.slots for host in hosts})

    def limits(self) -> Limits:
        """How many ranks an elastic job has. Raises UsageError for contradicting numbers."""
        first = self.ranks or self.least or 1
        least = self.least or first
        if not least <= first <= (self.most or first):
            most = "" if self.most is None else f" --max-np {self.most}"
            raise UsageError(
                f"-np {first} --min-np {least}{most} contradict each other",
                "min-np may not be above np, nor np above max-np",
            )
        timeout = self.elastic_timeout
        if timeout is None:
            timeout = settings.HOROVOD_ELASTIC_TIMEOUT.get()
        return Limits(first, least, self.most, timeout, self.reset_limit)

    def rest(self) -> Cooldown | None:
        """How long a host that failed is left out of an elastic job; None: for good."""
        return Cooldown(*self.cooldown) if self.cooldown else None
