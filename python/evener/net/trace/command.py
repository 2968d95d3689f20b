"""`evener net trace`: what the UDP engine did, packet by packet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from evener.base import settings
from evener.errors import UsageError
from evener.net.trace import files, page, read, summed_up
from evener.net.trace.summary import LONG, Connection, Summary, as_json, percentile

if TYPE_CHECKING:
    from rich.table import Table


@click.group()
def trace() -> None:
    """What the UDP engine did, packet by packet, from files that EVENER_NET_TRACE_DIR asked for."""


@trace.command()
@click.argument("places", nargs=-1, metavar="[FILE|DIR]...", type=click.Path(path_type=Path))
@click.option("--json", "as_json_", is_flag=True, help="For machines.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a page with a picture of each connection there.",
)
def show(places: tuple[Path, ...], as_json_: bool, html: Path | None) -> None:
    """Bytes, losses, round trips and stalls of each connection and path.

    Without FILE or DIR: those in EVENER_NET_TRACE_DIR. Wireshark and tshark read the files too.
    """
    text = settings.EVENER_NET_TRACE_DIR.get()
    chosen = list(places) or ([Path(text)] if text else [])
    if not chosen:
        raise UsageError(
            "no trace to show", "give its file or directory, or set EVENER_NET_TRACE_DIR"
        )
    summary = summed_up([read(path) for path in files(chosen)])
    if html is not None:
        html.write_text(page(summary), encoding="utf-8")
    if as_json_:
        click.echo(json.dumps(as_json(summary), indent=2))
        return
    from rich.console import Console

    console = Console(markup=False)
    if not console.is_terminal:
        console = Console(width=140, markup=False)
    for one in summary.connections:
        for part in _parts(one):
            console.print(part)
    for line in _remarks(summary):
        console.print(line)
    if html is not None:
        console.print(f"{html}: written")


def _remarks(summary: Summary) -> list[str]:
    said = []
    if not summary.connections:
        said.append("No connection: the process sent nothing over UDP.")
    if summary.left_out:
        said.append(
            f"{summary.left_out:,} records were left out: they came faster than they could be "
            "written. Counts are too small by them."
        )
    said += [f"{path} is not closed: its process runs, or was killed" for path in summary.cut]
    return said


def _milliseconds(values: list[int], share: float) -> str:
    return f"{percentile(values, share) / 1e3:.2f}"


def _parts(one: Connection) -> list[Table | str]:
    from rich.table import Table

    sent = sum(route.sent for route in one.routes.values())
    shown: list[Table | str] = [
        f"{one.process} to {one.peer or 'a peer that is not named'}, connection {one.number}: "
        f"{one.seconds:.2f} s, {sent / 1e6:.1f} MB sent, {one.received / 1e6:.1f} MB received"
    ]
    if one.trips:
        shown.append(
            f"  round trip ms: p50 {_milliseconds(one.trips, 0.5)}, p99 "
            f"{_milliseconds(one.trips, 0.99)}; longest stall {one.longest:.1f} ms, "
            f"{len(one.stalls)} of {LONG:g} ms or more"
        )
    for name, counts in (("decisions", one.decisions), ("dropped", one.dropped)):
        if counts:
            told = ", ".join(f"{count} x {what}" for what, count in counts.most_common())
            shown.append(f"  {name}: {told}")
    if one.replaced:
        told = ", ".join(f"{old} by {new}" for old, new in one.replaced[:12])
        shown.append(f"  paths replaced: {len(one.replaced)} ({told})")
    if one.over:
        shown.append(f"  over: {one.over}")
    table = Table("path", "port")
    numbers = "packets MB acknowledged lost silent late p50ms p99ms maxms silences"
    for name in numbers.split():
        table.add_column(name, justify="right")
    for path, route in sorted(one.routes.items()):
        table.add_row(
            str(path),
            str(route.port or ""),
            str(route.packets),
            f"{route.sent / 1e6:.2f}",
            str(route.acknowledged),
            str(route.lost),
            str(route.timed_out),
            str(route.late),
            *(_milliseconds(route.took, share) for share in (0.5, 0.99, 1.0)),
            str(route.silences),
        )
    if one.routes:
        shown.append(table)
    return shown
