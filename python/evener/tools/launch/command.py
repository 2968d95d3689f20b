"""The click command of `evener launch`."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import click

from evener.base import interfaces, programs, settings
from evener.door.enter import variables
from evener.errors import UsageError
from evener.net.plugin import adopt, has_gpus
from evener.tools.launch import batch, horovod_path, placed, probe
from evener.tools.launch.discovery import Cooldown, Pool, Script
from evener.tools.launch.elastic import Discovery, ElasticJob, Fixed, Limits
from evener.tools.launch.hosts import Host, is_local, parse_hostfile, parse_hosts, place
from evener.tools.launch.job import Job, scratch_name
from evener.tools.launch.output import Output
from evener.tools.launch.plan import (
    MissingProgramError,
    Plan,
    Wishes,
    interface_env,
    mpirun,
    open_mpi_major,
    shell_line,
    torchrun,
)


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-np", "--num-proc", "ranks", type=click.IntRange(1), help="Ranks in all.")
@click.option("-H", "--hosts", metavar="HOST:SLOTS,...", help="Hosts and their slots (GPUs).")
@click.option(
    "--hostfile",
    type=click.Path(path_type=Path, dir_okay=False),
    help="One line per host: `gpu1 slots=2`.",
)
@click.option(
    "--map",
    "map_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Take hosts, order of ranks and cards from a map of the fabric (docs/reference/map.md).",
)
@click.option("--mpi", "engine", flag_value="mpirun", help="Use mpirun (Open MPI 4 or 5).")
@click.option("--torchrun", "engine", flag_value="torchrun", help="Use torchrun, over ssh.")
@click.option(
    "--network-interface",
    "--network-interfaces",
    "interface",
    metavar="NIC[,NIC]",
    default="",
    help="Interfaces for NCCL, Gloo (the first) and Open MPI.",
)
@click.option(
    "--start-timeout",
    type=click.FloatRange(1),
    default=60.0,
    show_default=True,
    help="Seconds within which all hosts must answer and all agents must meet.",
)
@click.option(
    "--output-dir",
    "--output-filename",
    type=click.Path(path_type=Path, file_okay=False),
    help="Also write rank.N/stdout and rank.N/stderr there.",
)
@click.option(
    "-x",
    "--env",
    "env",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Set a variable for all ranks, or pass on its value here. Repeatable.",
)
@click.option("--master-port", type=click.IntRange(1, 65535), help="Default: a free one.")
@click.option("-p", "--ssh-port", type=click.IntRange(1, 65535), help="The hosts' sshd port.")
@click.option("-i", "--ssh-identity-file", type=click.Path(), help="The key for ssh.")
@click.option("--rsh", metavar="COMMAND", help="Reaches a host instead of ssh.")
@click.option(
    "--horovod", is_flag=True, help="`import horovod` gives Evener's, even if none is installed."
)
@click.option(
    "--ddp", is_flag=True, help="Evener under every DistributedDataParallel, without a line."
)
@click.option("--floor", metavar="FORM", help="With --ddp: may send less, down to this form.")
@click.option(
    "--host-discovery-script",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Elastic: prints the hosts that there are now, a line HOST or HOST:SLOTS each.",
)
@click.option(
    "--min-np", "least", type=click.IntRange(1), help="Elastic: go on with this number of ranks."
)
@click.option("--max-np", "most", type=click.IntRange(1), help="Elastic: take in no more ranks.")
@click.option(
    "--slots-per-host",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Elastic: of a host for which the script says none.",
)
@click.option(
    "--reset-limit", type=click.IntRange(0), help="Elastic: how often ranks may come and go."
)
@click.option(
    "--blacklist-cooldown-range",
    "cooldown",
    type=float,
    nargs=2,
    metavar="MIN MAX",
    help="Elastic: seconds for which a host that failed is left out. Default: for good.",
)
@click.option(
    "--elastic-timeout",
    type=click.FloatRange(0, min_open=True),
    help="Elastic: seconds to wait for slots. Default: HOROVOD_ELASTIC_TIMEOUT, 600.",
)
@click.option("--mpi-args", metavar="ARGUMENTS", help="More arguments for mpirun.")
@click.option("--binding-args", metavar="ARGUMENTS", help="For mpirun, instead of --bind-to none.")
@click.option("--timestamps", is_flag=True, help="The time before each line.")
@click.option("--tag/--no-tag", default=True, help="[rank@host] before each line.")
@click.option("--dry-run", is_flag=True, help="Print the commands and start nothing.")
@click.option("-v", "--verbose", is_flag=True, help="Show the engine's commands and messages.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, required=True)
def launch(
    ranks: int | None,
    hosts: str | None,
    hostfile: Path | None,
    map_file: Path | None,
    engine: str | None,
    interface: str,
    start_timeout: float,
    output_dir: Path | None,
    env: tuple[str, ...],
    master_port: int | None,
    ssh_port: int | None,
    ssh_identity_file: str | None,
    rsh: str | None,
    horovod: bool,
    ddp: bool,
    floor: str | None,
    host_discovery_script: Path | None,
    least: int | None,
    most: int | None,
    slots_per_host: int,
    reset_limit: int | None,
    cooldown: tuple[float, float] | None,
    elastic_timeout: float | None,
    mpi_args: str | None,
    binding_args: str | None,
    timestamps: bool,
    tag: bool,
    dry_run: bool,
    verbose: bool,
    command: tuple[str, ...],
) -> None:
    """Start COMMAND as a job of several ranks, on this host or many.

    \b
        evener launch -np 4 python train.py
        evener launch -np 4 -H gpu1:2,gpu2:2 python train.py
        evener launch --ddp -np 4 -H gpu1:2,gpu2:2 python train.py
        evener launch --map map.yaml python train.py
        evener launch --mpi -np 4 -H gpu1:2,gpu2:2 -x LIGHT_2D_ALLREDUCE=1 python train.py

    One host: torchrun. Several: torchrun over ssh, or mpirun with --mpi or inside a Slurm, PBS or
    LSF job. If a rank fails, it is named with its host and its last lines, and all others are
    ended; with --min-np, --max-np or --host-discovery-script the others go on
    (docs/guide/elastic.md).
    Variables that begin with EVENER_, LIGHT_, HOROVOD_, NCCL_, GLOO_, TORCH_, CUDA_, OMP_
    and a few more reach all hosts by themselves.
    """
    if hosts and hostfile:
        raise UsageError("-H and --hostfile were both given", "give one of them")
    if map_file and (hosts or hostfile or interface):
        other = "-H" if hosts else "--hostfile" if hostfile else "--network-interface"
        raise UsageError(
            f"--map and {other} were both given", "the map names hosts and cards: give one of them"
        )
    if rsh and (ssh_port or ssh_identity_file):
        raise UsageError("--rsh and --ssh-port or --ssh-identity-file were both given", "give one")
    given = parse_hosts(hosts) if hosts else parse_hostfile(hostfile) if hostfile else None
    placement = placed.by_map(map_file, ranks) if map_file else None
    if placement:
        given = placed.hosts(placement)
    system = batch.system(os.environ)
    elastic = host_discovery_script is not None or least is not None or most is not None
    use_batch = given is None and bool(system) and engine != "torchrun" and not elastic
    use_batch = use_batch and (engine == "mpirun" or bool(shutil.which("mpirun")))
    theirs = batch.hosts(os.environ) if given is None and not use_batch else []
    if len(theirs) > 1:  # one host's job may have more ranks than tasks
        given = theirs
    if given is None and ranks is None and not elastic:
        raise UsageError("neither -np nor hosts were given", "say how many ranks: -np 4")
    set_env, forward = _variables(env)
    for name, meant in settings.misspelt(set_env):
        click.echo(f"warning: -x {name}: it is not a setting; {meant} is one", err=True)
    wishes = Wishes(
        command=command,
        interface=interface,
        start_timeout=start_timeout,
        env=set_env,
        forward=forward,
        rsh=tuple(shlex.split(rsh)) if rsh else _ssh(ssh_port, ssh_identity_file, start_timeout),
        scratch=scratch_name(),
        mpi_args=tuple(shlex.split(mpi_args or "")),
        binding=None if binding_args is None else tuple(shlex.split(binding_args)),
    )
    environment = dict(os.environ)
    if said := programs.prefer_own(command, environment):
        click.echo(f"evener launch: {said}", err=True)
    notes: list[str] = []
    if map_file and placement:
        host_env, kept = placed.environments(placement, {**os.environ, **set_env})
        wishes = replace(wishes, host_env=host_env)
        notes = [*placed.describe(map_file, placement), *kept]
    network = adopt(environment)
    if verbose or has_gpus():
        click.echo(f"evener launch: {network}", err=True)
    if horovod:
        path, note = horovod_path.put_in_place(environment.get("PYTHONPATH", ""))
        click.echo(f"evener launch: {note}", err=True)
        environment["PYTHONPATH"] = path
        wishes = replace(wishes, forward=(*wishes.forward, "PYTHONPATH"), horovod=True)
    elif (note := horovod_path.describe()) and verbose:
        click.echo(f"evener launch: {note}", err=True)
    if floor and not ddp:
        raise UsageError(f"--floor {floor} says how far --ddp may go", "give --ddp too")
    if ddp:
        opened = variables({**environment, **set_env}, floor or "")
        said = " ".join(f"{name}={opened[name]}" for name in opened if name != "PYTHONPATH")
        click.echo(f"evener launch: --ddp: {said} under every DistributedDataParallel", err=True)
        environment["PYTHONPATH"] = opened["PYTHONPATH"]
        if "PYTHONPATH" not in set_env:  # given by -x, it would hide the environment's
            del opened["PYTHONPATH"]
        wishes = replace(
            wishes, env={**wishes.env, **opened}, forward=(*wishes.forward, "PYTHONPATH")
        )
    if elastic and map_file:
        raise UsageError(
            "--map and an elastic job: hosts that come and go have no place on a map",
            "leave --map out, or --min-np, --max-np and --host-discovery-script",
        )
    if elastic:
        _elastic(
            ElasticWishes(
                given, host_discovery_script, slots_per_host, ranks, least, most, elastic_timeout
            ),
            reset_limit,
            Cooldown(*cooldown) if cooldown else None,
            replace(wishes, env={**interface_env(wishes), **wishes.env}),
            environment,
            Output(tag, output_dir, most or ranks or 1, timestamps),
            verbose,
            dry_run,
            engine,
        )
        return
    if reset_limit is not None or cooldown or elastic_timeout is not None:
        raise UsageError(
            "--reset-limit, --blacklist-cooldown-range and --elastic-timeout are for elastic jobs",
            "give --min-np or --host-discovery-script too, or leave them out",
        )
    filled = place(given or [Host("localhost", ranks or 1)], ranks)
    local = {host.name for host in filled if is_local(host.name)}
    remote = [host for host in filled if host.name not in local]
    if engine is None:
        engine, why = _choose(use_batch, system, remote, wishes)
        if given is not None and given is theirs:
            why += f"; the hosts are {system}'s"
    else:
        why = "asked for"
    if local and shutil.which(command[0], path=environment.get("PATH")) is None:
        raise UsageError(
            f"there is no command {command[0]!r}",
            f"write `python {command[0]}`" if command[0].endswith(".py") else "check its name",
        )
    if remote and shutil.which(wishes.rsh[0]) is None:
        raise MissingProgramError(
            f"{wishes.rsh[0]} is not installed, and {remote[0].name} is not this host",
            "install openssh-client, or name another command with --rsh",
        )
    if interface and local:
        _check_interfaces(interface, "this host", {name for name, _ in interfaces.addresses()})
    free = probe.free_port()
    if remote and not dry_run:
        facts = probe.ask(remote, wishes.rsh, Path.cwd(), start_timeout)
        for host, fact in facts.items():
            _check_interfaces(interface, host, set(fact.interfaces))
        if filled[0].name in facts:
            free = facts[filled[0].name].free_port
    wishes = replace(wishes, master_port=master_port or free)
    if engine == "mpirun":
        plan = mpirun(
            None if use_batch else filled,
            ranks or sum(host.slots for host in filled),
            wishes,
            environment,
            local,
            _probe_mpirun(),
            os.geteuid() == 0,
            why,
        )
    else:
        if wishes.mpi_args or wishes.binding is not None:
            raise UsageError(
                f"--mpi-args and --binding-args are for mpirun; this is torchrun ({why})",
                "add --mpi, or leave them out",
            )
        plan = torchrun(filled, wishes, environment, local, why)
    if dry_run or verbose:
        for note in notes:
            click.echo(f"# {note}", err=not dry_run)
        _show(plan, wishes, err=not dry_run)
    if not dry_run:
        Job(
            plan,
            wishes,
            Path.cwd(),
            environment,
            output_dir=output_dir,
            verbose=verbose,
            tag=tag,
            timestamps=timestamps,
        ).run()


@dataclass(frozen=True)
class ElasticWishes:
    """Where an elastic job finds hosts, and how many ranks it wants."""

    given: list[Host] | None
    script: Path | None
    slots: int
    ranks: int | None
    least: int | None
    most: int | None
    timeout: float | None

    def discovery(self) -> Discovery:
        """Raises UsageError where there is none."""
        if self.given and self.script:
            raise UsageError("hosts and --host-discovery-script were both given", "give one")
        if self.script:
            return Script(self.script, self.slots)
        if not self.given or len(self.given) < 2:
            raise UsageError(
                "an elastic job needs two hosts or more, because a failure takes out its host; "
                f"{len(self.given or [])} were given",
                "name more hosts by -H, or give --host-discovery-script",
            )
        return Fixed({host.name: host.slots for host in self.given})

    def limits(self, resets: int | None) -> Limits:
        """Raises UsageError for numbers that contradict each other."""
        first = self.ranks or self.least or 1
        least = self.least or first
        if not least <= first <= (self.most or first):
            most = "" if self.most is None else f" --max-np {self.most}"
            raise UsageError(
                f"-np {first} --min-np {least}{most} contradict each other",
                "min-np may not be above np, nor np above max-np",
            )
        timeout = settings.HOROVOD_ELASTIC_TIMEOUT.get() if self.timeout is None else self.timeout
        return Limits(first, least, self.most, timeout, resets)


def _elastic(
    wanted: ElasticWishes,
    resets: int | None,
    cooldown: Cooldown | None,
    wishes: Wishes,
    environment: dict[str, str],
    output: Output,
    verbose: bool,
    dry_run: bool,
    engine: str | None,
) -> None:
    discovery, limits = wanted.discovery(), wanted.limits(resets)
    if engine is not None:
        raise UsageError(
            f"--{'mpi' if engine == 'mpirun' else engine} and an elastic job: {engine} ends all "
            "ranks when one fails",
            "leave it out: Evener starts the ranks of an elastic job itself",
        )
    if dry_run:
        hosts = ",".join(f"{host}:{slots}" for host, slots in discovery.find().items())
        most = "any number" if limits.most is None else limits.most
        click.echo(f"# elastic: {limits.least} to {most} ranks, first {limits.first}, on {hosts}")
        click.echo(shlex.join(wishes.command))
        return
    ElasticJob(discovery, limits, Pool(cooldown), wishes, environment, output, verbose).run()


def _choose(use_batch: bool, system: str, remote: list[Host], wishes: Wishes) -> tuple[str, str]:
    if use_batch:
        return "mpirun", f"inside a {system} job, whose hosts mpirun knows"
    if not remote:
        return "torchrun", "all ranks on this host"
    return "torchrun", f"over {wishes.rsh[0]}"


def _variables(given: tuple[str, ...]) -> tuple[dict[str, str], tuple[str, ...]]:
    values: dict[str, str] = {}
    forward: list[str] = []
    for text in given:
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


def _ssh(port: int | None, identity: str | None, timeout: float) -> tuple[str, ...]:
    # BatchMode: a question for a password on several hosts at once can never be answered.
    words = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, round(timeout))}"]
    words += ["-p", str(port)] if port else []
    words += ["-i", identity] if identity else []
    return tuple(words)


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


def _show(plan: Plan, wishes: Wishes, err: bool) -> None:
    click.echo(f"# {plan.engine}: {plan.why}", err=err)
    for command in plan.commands:
        click.echo(shell_line(command, wishes, str(Path.cwd())), err=err)
