"""`evener net`: turn the NCCL plug-in on and off for plain jobs, and see what it does."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from evener.base import settings
from evener.errors import UsageError
from evener.net import install, setup, show, stats
from evener.net.plugin import environment, plugin_path
from evener.net.prometheus import text as prometheus_text
from evener.net.trace.command import trace

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


net.add_command(trace)


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


@net.command("setup")
@click.option(
    "--interface",
    "-i",
    "names",
    multiple=True,
    help="This one; again for more (default: all that are up and lead to other hosts).",
)
@click.option("--mtu", type=click.IntRange(576, 65535), help="Set it: all hosts need the same.")
@click.option("--huge-pages", type=click.IntRange(1), help="Keep this many, of 2 MiB.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option("--undo", is_flag=True, help="Put back what `setup` has changed.")
@click.option("--json", "as_json", is_flag=True, help="For machines: the changes as a list.")
@click.option(
    "--state",
    type=click.Path(path_type=Path, dir_okay=False),
    default=setup.STATE,
    show_default=True,
    help="Where old values are written down, for --undo.",
)
def prepare(
    names: tuple[str, ...],
    mtu: int | None,
    huge_pages: int | None,
    dry_run: bool,
    undo: bool,
    as_json: bool,
    state: Path,
) -> None:
    """Prepare this host's network: socket buffers, queues of cards, bonds, processors for packets.

    Nothing survives a restart of the host. MTU and huge pages are changed only when asked for.
    """
    if undo:
        if names or mtu is not None or huge_pages is not None:
            raise UsageError(
                "--undo puts back everything", "leave out --interface, --mtu, --huge-pages"
            )
        lines: list[str] = []
        count = setup.undo(state, lines.append, dry_run)
        if as_json:
            click.echo(json.dumps(lines, indent=2))
            return
        for line in lines:
            click.echo(line)
        click.echo(f"{count} value(s) {'would be' if dry_run else 'were'} put back")
        return
    changes = setup.plan(list(names) or setup.interfaces(), mtu, huge_pages)
    if as_json:
        click.echo(json.dumps([asdict(change) for change in changes], indent=2))
    elif dry_run:
        for change in changes:
            click.echo(change.line())
    if not dry_run:
        setup.apply(changes, state, (lambda _: None) if as_json else click.echo)
    if not as_json:
        word = "to be changed" if dry_run else "changed"
        click.echo(f"{len(changes)} value(s) {word}" if changes else "nothing is to be changed")
        if changes and not dry_run:
            click.echo("evener net setup --undo puts them back")


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
