"""`evener stats`: all that a job records of itself, at a look."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evener.base import records, settings
from evener.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_EVERY = 1.0


@click.command()
@click.argument("directory", required=False, type=click.Path(path_type=Path))
@click.option("--watch", is_flag=True, help="Again every second, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="The records, for machines.")
@click.option("--prometheus", is_flag=True, help="Prometheus' text format.")
def stats(directory: Path | None, watch: bool, as_json: bool, prometheus: bool) -> None:
    """What a job's gradients, memory and network do: steps, forms, bytes, paths.

    DIRECTORY: where the job writes its statistics (default: EVENER_STATS_DIR).
    """
    where = directory or (Path(text) if (text := settings.EVENER_STATS_DIR.get()) else None)
    if where is None:
        raise UsageError(
            "no directory of statistics", "give it, or set EVENER_STATS_DIR here and for the job"
        )
    if watch + as_json + prometheus > 1:
        raise UsageError("--watch, --json and --prometheus exclude each other", "give one of them")
    if watch:
        _watch(where)
        return
    found = records.read(where)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    elif prometheus:
        from evener.tools.stats import metrics

        click.echo(metrics.text(found), nl=False)
    else:
        _console().print(_page(where))


def _watch(where: Path) -> None:
    """Tables again and again; a job that has not begun to write is waited for."""
    from rich.live import Live

    console = _console()
    try:
        if not console.is_terminal:
            while True:
                console.print(_page(where, wait=True))
                sys.stdout.flush()
                time.sleep(_EVERY)
        with Live(_page(where, wait=True), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(_EVERY)
                live.update(_page(where, wait=True), refresh=True)
    except KeyboardInterrupt:
        return


def _page(where: Path, wait: bool = False) -> RenderableType:
    from rich.console import Group

    from evener.tools.stats import show

    try:
        return Group(*show.parts(records.read(where)))
    except UsageError as error:
        if not wait:
            raise
        return f"waiting for a job that writes to {where}: {error.problem}"


def _console() -> Console:
    from rich.console import Console

    # Without markup: an IPv6 address in brackets is none.
    console = Console(markup=False, highlight=False)
    return console if console.is_terminal else Console(width=140, markup=False, highlight=False)
