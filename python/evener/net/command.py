"""`evener net`: turn the NCCL plug-in on and off for plain jobs, and see what it does."""

from __future__ import annotations

import json
from pathlib import Path

import click

from evener import settings
from evener.errors import UsageError
from evener.net import install, show, stats
from evener.net.plugin import environment, plugin_path
from evener.net.prometheus import text as prometheus_text

_PREFIX = click.option(
    "--prefix",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("/usr/local"),
    show_default=True,
    help="libnccl-net.so goes to its lib directory.",
)


@click.group()
def net() -> None:
    """The NCCL plug-in that fills every path of an ordinary network."""


@net.command()
@_PREFIX
def enable(prefix: Path) -> None:
    """Install libnccl-net.so: plain mpirun and torchrun jobs use Evener, with no variable set."""
    path = install.enable(prefix)
    click.echo(f"{path}: NCCL 2.13 and later load it unless NCCL_NET_PLUGIN says otherwise")
    if not install.found_by_loader(path):
        click.echo(f"the loader does not look there yet: export LD_LIBRARY_PATH={path.parent}")
    click.echo("NCCL 2.28.3 to 2.29.7 need NCCL_NET_PLUGIN_REF_COUNT=1 where a job makes and")
    click.echo("destroys communicators more than once (`evener launch` sets it)")


@net.command()
@_PREFIX
def disable(prefix: Path) -> None:
    """Remove what `enable` has installed."""
    path = install.disable(prefix)
    click.echo(f"{path}: removed" if path else f"{install.target(prefix)}: was not there")


@net.command()
def env() -> None:
    """Print the variables that make one job use it: `eval "$(evener net env)"`."""
    for name, value in environment({"EVENER_NET": "on"}).items():  # whoever asks wants it
        click.echo(f"export {name}={value}")


@net.command()
def path() -> None:
    """Print where the plug-in is."""
    click.echo(str(plugin_path()))


@net.command("stats")
@click.argument("directory", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.option("--prometheus", is_flag=True, help="Prometheus' text format.")
@click.option("--ended", is_flag=True, help="Paths that have ended as well, and why.")
def show_stats(directory: Path | None, as_json: bool, prometheus: bool, ended: bool) -> None:
    """What every path of a job carries, or of one that is over carried.

    DIRECTORY: where the job writes its statistics (default: EVENER_STATS_DIR).
    """
    where = directory or (Path(text) if (text := settings.EVENER_STATS_DIR.get()) else None)
    if where is None:
        raise UsageError(
            "no directory of statistics", "give it, or set EVENER_STATS_DIR here and for the job"
        )
    records = stats.read(where)
    rows, gone = stats.rows(records), stats.ended(records)
    if as_json:
        click.echo(json.dumps(rows + gone, indent=2))
        return
    if prometheus:
        click.echo(prometheus_text(records), nl=False)
        return
    from rich.console import Console

    # Without markup: an IPv6 address in brackets is none.
    console = Console(markup=False)
    if not console.is_terminal:
        console = Console(width=140, markup=False)
    for part in show.parts(records, ended):
        console.print(part)
