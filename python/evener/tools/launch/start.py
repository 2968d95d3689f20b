"""From what was asked for to a job that runs, or to the commands of one (`--dry-run`)."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import click

from evener.base import interfaces
from evener.base.ports import free_port
from evener.errors import UsageError
from evener.tools.launch import nodes, preflight, where
from evener.tools.launch.asked import Asked
from evener.tools.launch.discovery import Pool
from evener.tools.launch.elastic import ElasticJob
from evener.tools.launch.environment import Environment
from evener.tools.launch.hosts import Host, is_local, place
from evener.tools.launch.job import Job
from evener.tools.launch.output import Output
from evener.tools.launch.plan import (
    Launch,
    MissingProgramError,
    Wishes,
    interface_env,
    master_address,
    mpirun,
    open_mpi_major,
    shell_line,
    torchrun,
)
from evener.tools.launch.where import Where


def start(asked: Asked) -> None:
    """Run the job to its end. Raises UsageError before anything starts, and JobError."""
    asked.refuse_contradictions()
    found = where.find(asked)
    if asked.min_nodes:
        nodes.start(asked, found.hosts or [Host("localhost", asked.ranks or 1)])
        return
    environment = Environment(asked)
    if asked.map_file:
        environment.put_map(asked.map_file, found)
    environment.put_network(asked.verbose)
    environment.put_horovod(asked.horovod, asked.verbose)
    environment.put_doors(asked)
    if asked.join:
        if found.hosts and len(place(found.hosts, asked.ranks)) > 1:
            raise UsageError(
                "--join and several hosts: each node joins by itself",
                "give one host, or --min-nodes to start all of them from here",
            )
        environment.put_hub(asked)
    environment.put_log(asked.verbose)
    if asked.is_elastic:
        _elastic(asked, found, environment)
        return
    watched = environment.put_watch() if asked.watch else ""
    fixed = _Fixed.of(asked, found, environment.wishes)
    fixed.check_programs(environment)
    wishes = replace(environment.wishes, master_port=asked.master_port or free_port())
    if asked.check and not asked.dry_run and not found.by_mpirun:
        wishes = fixed.look(asked, environment, wishes)
    plan = fixed.plan(asked, environment, wishes)
    if asked.dry_run or asked.verbose:
        for note in environment.notes:
            click.echo(f"# {note}", err=not asked.dry_run)
        _show(plan, wishes, err=not asked.dry_run)
    if not asked.dry_run:
        Job(
            plan,
            wishes,
            Path.cwd(),
            environment.here,
            output_dir=asked.output_dir,
            verbose=asked.verbose,
            tag=asked.tag,
            timestamps=asked.timestamps,
            watch=watched,
        ).run()


@dataclass(frozen=True)
class _Fixed:
    """A job whose hosts are known: which they are, which of them is this one, and who starts it."""

    hosts: list[Host]
    local: set[str]
    remote: list[Host]
    launcher: str
    why: str
    by_mpirun: bool

    @classmethod
    def of(cls, asked: Asked, found: Where, wishes: Wishes) -> _Fixed:
        hosts = place(found.hosts or [Host("localhost", asked.ranks or 1)], asked.ranks)
        local = {host.name for host in hosts if is_local(host.name)}
        remote = [host for host in hosts if host.name not in local]
        launcher, why = asked.launcher, "asked for"
        if launcher is None:
            launcher = "torchrun"
            if found.by_mpirun:
                launcher, why = "mpirun", f"inside a {found.system} job, whose hosts mpirun knows"
            elif remote:
                why = f"over {wishes.rsh[0]}"
            else:
                why = "all ranks on this host"
            if found.from_system:
                why += f"; the hosts are {found.system}'s"
        return cls(hosts, local, remote, launcher, why, found.by_mpirun)

    def check_programs(self, environment: Environment) -> None:
        """Raises UsageError for a program, or an interface, that is not here."""
        command, wishes = environment.wishes.command[0], environment.wishes
        if self.local and shutil.which(command, path=environment.here.get("PATH")) is None:
            raise UsageError(
                f"there is no command {command!r}",
                f"write `python {command}`" if command.endswith(".py") else "check its name",
            )
        if self.remote and shutil.which(wishes.rsh[0]) is None:
            raise MissingProgramError(
                f"{wishes.rsh[0]} is not installed, and {self.remote[0].name} is not this host",
                "install openssh-client, or name another command with --rsh",
            )
        if wishes.interface and self.local:
            here = {name for name, _ in interfaces.addresses()}
            _check_interfaces(wishes.interface, "this host", here)

    def look(self, asked: Asked, environment: Environment, wishes: Wishes) -> Wishes:
        """Look at all hosts; the same wishes with the place where ranks meet. Raises UsageError."""
        seen = preflight.look(
            self.hosts, self.local, wishes.rsh, asked.command, Path.cwd(), environment.of_ranks,
            master_address(self.hosts, self.local), asked.master_port, self.launcher == "torchrun",
            asked.start_timeout if asked.patient else None,
        )  # fmt: skip
        for host, there in seen.interfaces.items():
            _check_interfaces(asked.interface, host, there)
        for line in seen.warnings:
            click.echo(f"warning: {line}", err=True)
        return replace(wishes, master_port=seen.port, master=seen.address)

    def plan(self, asked: Asked, environment: Environment, wishes: Wishes) -> Launch:
        """The commands. Raises UsageError for options of the other launcher."""
        if self.launcher == "mpirun":
            return mpirun(
                None if self.by_mpirun else self.hosts,
                asked.ranks or sum(host.slots for host in self.hosts),
                wishes,
                environment.here,
                self.local,
                _probe_mpirun(),
                os.geteuid() == 0,
                self.why,
            )
        if wishes.mpi_args or wishes.binding is not None:
            raise UsageError(
                f"--mpi-args and --binding-args are for mpirun; this is torchrun ({self.why})",
                "add --mpi, or leave them out",
            )
        return torchrun(self.hosts, wishes, environment.here, self.local, self.why)


def _elastic(asked: Asked, found: Where, environment: Environment) -> None:
    """Run a job whose ranks come and go."""
    discovery, limits = asked.discovery(found.hosts), asked.limits()
    wishes = environment.wishes
    wishes = replace(wishes, env={**interface_env(wishes), **wishes.env})
    if asked.launcher is not None:
        option = "mpi" if asked.launcher == "mpirun" else asked.launcher
        raise UsageError(
            f"--{option} and an elastic job: {asked.launcher} ends all ranks when one fails",
            "leave it out: Evener starts the ranks of an elastic job itself",
        )
    if asked.dry_run:
        hosts = ",".join(f"{host}:{slots}" for host, slots in discovery.find().items())
        most = "any number" if limits.most is None else limits.most
        click.echo(f"# elastic: {limits.least} to {most} ranks, first {limits.first}, on {hosts}")
        click.echo(shlex.join(wishes.command))
        return
    output = Output(asked.tag, asked.output_dir, asked.most or asked.ranks or 1, asked.timestamps)
    pool = Pool(asked.rest())
    ElasticJob(discovery, limits, pool, wishes, environment.here, output, asked.verbose).run()


def _probe_mpirun() -> int:
    if shutil.which("mpirun") is None:
        raise MissingProgramError(
            "mpirun is not installed", "install openmpi-bin, or leave --mpi out to use torchrun"
        )
    done = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=60)
    return open_mpi_major(done.stdout + done.stderr)


def _check_interfaces(wanted: str, host: str, there: set[str]) -> None:
    for name in filter(None, wanted.split(",")):
        # NCCL's syntax allows prefixes and exclusions; those are its own to judge.
        if not name.startswith(("^", "=")) and not any(own.startswith(name) for own in there):
            raise UsageError(
                f"--network-interface {name}: {host} has {', '.join(sorted(there))}",
                "name an interface that every host has",
            )


def _show(plan: Launch, wishes: Wishes, err: bool) -> None:
    click.echo(f"# {plan.launcher}: {plan.why}", err=err)
    for command in plan.commands:
        click.echo(shell_line(command, wishes, str(Path.cwd())), err=err)
