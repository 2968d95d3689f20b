"""The click command of `evener launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from evener.base.click import door_options
from evener.tools.launch import config
from evener.tools.launch.asked import Asked
from evener.tools.launch.start import start


@click.command(cls=config.Configured, context_settings={"allow_interspersed_args": False})
@config.option
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
@click.option("--mpi", "launcher", flag_value="mpirun", help="Use mpirun (Open MPI 4 or 5).")
@click.option("--torchrun", "launcher", flag_value="torchrun", help="Use torchrun, over ssh.")
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
@door_options
@click.option(
    "--min-nodes",
    type=click.IntRange(1),
    help="With --every: hosts are nodes that come and go; wait until this many are there.",
)
@click.option("--join", metavar="HOST:PORT", help="With --every: be a node of the hub there.")
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="What the hub of --join wrote. With --min-nodes: write it there, for nodes that join.",
)
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
@click.option(
    "--watch/--no-watch",
    default=True,
    show_default=True,
    help="Say why the job stands still, is slow or failed (docs/guide/stuck.md).",
)
@click.option("--mpi-args", metavar="ARGUMENTS", help="More arguments for mpirun.")
@click.option("--binding-args", metavar="ARGUMENTS", help="For mpirun, instead of --bind-to none.")
@click.option("--timestamps", is_flag=True, help="The time before each line.")
@click.option("--tag/--no-tag", default=True, help="[rank@host] before each line.")
@click.option(
    "--check/--no-check",
    default=True,
    help="Look at all hosts first: names, ports, versions, script, disk.",
)
@click.option("--dry-run", is_flag=True, help="Print the commands and start nothing.")
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Show the launcher's messages, and Evener's plans in detail (EVENER_LOG=debug).",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def launch(**given: Any) -> None:
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
    Options that you give each time can stand in `evener.toml` (docs/guide/launch.md).
    Variables that begin with EVENER_, LIGHT_, HOROVOD_, NCCL_, GLOO_, TORCH_, CUDA_, OMP_
    and a few more reach all hosts by themselves.
    """
    source = click.get_current_context().get_parameter_source("start_timeout")
    start(Asked(**given, patient=source == ParameterSource.COMMANDLINE))
