"""The click command of `evener hub`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from pathlib import Path

import click

from evener.comm.hub.client import address
from evener.comm.hub.membership import Membership
from evener.comm.hub.token import of_server


@click.command()
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default="0.0.0.0:29610",
    show_default=True,
    help="Where nodes find it; port 0: a free one.",
)
@click.option(
    "--token-file",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="What nodes need to come in. Made where there is none, with FILE.key beside it.",
)
@click.option(
    "--nodes", type=click.IntRange(1), default=2, show_default=True, help="Shares of the data."
)
@click.option(
    "--min-nodes",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Wait until this many are there.",
)
@click.option(
    "--silence",
    type=click.FloatRange(1),
    default=20.0,
    show_default=True,
    help="Seconds without a word after which a node is left out.",
)
@click.option(
    "--late",
    type=click.FloatRange(1),
    default=300.0,
    show_default=True,
    help="Seconds that the others wait for the change of a node that lives.",
)
def hub(
    listen: str, token_file: Path, nodes: int, min_nodes: int, silence: float, late: float
) -> None:
    """Average the weights of nodes that come and go; ends when all have come to their end.

    \b
        evener hub --listen 0.0.0.0:29610 --token-file token --nodes 4 --min-nodes 2

    Copy the token file to each node, and start it there with `evener launch --ddp --every N --join
    HOST:PORT --token-file token` (docs/guide/slow-networks.md).
    """
    host, port = address(listen, "--listen")
    token, tls = of_server(token_file)
    membership = Membership(min_nodes, nodes, silence, late)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(host, port, token, tls, membership))


async def _serve(host, port, token, tls, membership) -> None:  # type: ignore[no-untyped-def]
    # torch is imported by it, and `evener --help` does without.
    from evener.comm.hub.server import Hub

    hub = Hub(token, tls, membership, lambda text: click.echo(f"evener hub: {text}", err=True))
    serving = asyncio.ensure_future(hub.serve(host, port))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, serving.cancel)
    ends = asyncio.ensure_future(hub.finished.wait())
    while not hub.port and not serving.done():
        await asyncio.sleep(0.01)
    if hub.port:
        click.echo(f"evener hub: listening on {host}:{hub.port}", err=True)
    await asyncio.wait([serving, ends], return_when=asyncio.FIRST_COMPLETED)
    if serving.done() and not serving.cancelled():
        serving.result()
    for task in (serving, ends):
        task.cancel()
    await asyncio.gather(serving, ends, return_exceptions=True)
    if hub.finished.is_set():
        click.echo("evener hub: all nodes have come to their end", err=True)
