"""The group `evener embedding`."""

from __future__ import annotations

import json
import secrets
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import click

from evener.base import settings
from evener.errors import UsageError


@click.group()
def embedding() -> None:
    """Embedding tables: answer lookups from snapshots and deltas, see what tables hold."""


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"address {text!r} cannot be", "write it as 127.0.0.1:8400")
    return host.strip("[]") or "127.0.0.1", int(port)


def _token(token: str | None, file: Path | None) -> str:
    if token and file:
        raise UsageError("--token and --token-file exclude each other", "give one of them")
    if file is None:
        return token or ""
    try:
        found = file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}", "give a file with a token") from None
    if not found:
        raise UsageError(f"{file} is empty", "write a token into it")
    return found


_TOKEN = (
    click.option(
        "--token",
        envvar=settings.EVENER_EMBEDDING_TOKEN.name,
        help="What clients send as `Authorization: Bearer TOKEN`. Others see it in the list of "
        "processes: the variable EVENER_EMBEDDING_TOKEN or --token-file are better.",
    ),
    click.option(
        "--token-file",
        type=click.Path(path_type=Path),
        help="A file with the token.",
    ),
)


def _with_token(command: Any) -> Any:
    for option in reversed(_TOKEN):
        command = option(command)
    return command


@embedding.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--address", default="127.0.0.1:8400", show_default=True, help="Host and port.")
@_with_token
@click.option(
    "--queue",
    default=64,
    show_default=True,
    type=click.IntRange(1),
    help="Requests in work at once; one more is answered 503.",
)
@click.option(
    "--every",
    default=0.5,
    show_default=True,
    type=click.FloatRange(0.01),
    help="Seconds between two looks into the folder.",
)
@click.option("--name", default="served", show_default=True, help="Of the table, in statistics.")
def serve(
    folder: Path,
    address: str,
    token: str | None,
    token_file: Path | None,
    queue: int,
    every: float,
    name: str,
) -> None:
    """Answer lookups over HTTP from FOLDER, and take its new deltas in as they come.

    FOLDER is what a trainer writes with store.snapshot(folder) and store.delta(folder). Rows in an
    answer are whole: the one before a delta, or the one after it. Keys without a row give their
    initial values (or zeros: the table's option `missing`), and nothing is inserted.

    An address that other machines reach needs a token.
    """
    from evener.embedding.serve import Follower, Served, Server, opened

    host, port = _address(address)
    secret = _token(token, token_file)
    if not secret and host not in ("127.0.0.1", "::1", "localhost"):
        raise UsageError(
            f"{host} can be reached from other machines, and there is no token",
            f"set EVENER_EMBEDDING_TOKEN, for example to {secrets.token_urlsafe(16)}",
        )
    store = opened(folder, name)
    store.frozen = True
    served = Served()
    follower = Follower(store, folder, served, every)
    try:
        follower.once()
    except (RuntimeError, ValueError, KeyError) as error:
        raise UsageError(
            f"{folder}: {error}", "take away what is not whole, or another folder"
        ) from error
    server = Server(store, served, (host, port), queue, secret)
    follower.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    shown = f"[{host}]" if ":" in host else host
    click.echo(
        f"serving {len(store):,} rows of dim {store.dim} (step {store.step}) on "
        f"http://{shown}:{server.server_address[1]}"
    )
    sys.stdout.flush()
    try:
        server.serve_forever(poll_interval=0.1)
    finally:
        follower.stop()
        server.server_close()


@embedding.command("stats")
@click.argument("source", required=False)
@_with_token
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.option("--prometheus", is_flag=True, help="Prometheus' text format.")
def show_stats(
    source: str | None, token: str | None, token_file: Path | None, as_json: bool, prometheus: bool
) -> None:
    """Size, hit rate, evictions and memory of tables.

    SOURCE: http://HOST:PORT of `evener embedding serve`, a folder of snapshots, or the folder where
    a training job writes its statistics (default: EVENER_STATS_DIR).
    """
    from evener.embedding import report

    if as_json and prometheus:
        raise UsageError("--json and --prometheus exclude each other", "give one of them")
    where = source or settings.EVENER_STATS_DIR.get()
    if not where:
        raise UsageError(
            "no server and no folder", "give one, or set EVENER_STATS_DIR here and for the job"
        )
    tables = report.collect(where, _token(token, token_file))
    if as_json:
        click.echo(json.dumps(tables, indent=2))
    elif prometheus:
        click.echo(report.prometheus(tables), nl=False)
    else:
        from rich.console import Console
        from rich.table import Table

        shown = Table(box=None)
        titles = ("embedding", "rank", "dim", "rows", "memory", "hit rate", "evicted", "step", "")
        for title in titles:
            shown.add_column(title, justify="left" if title in ("embedding", "") else "right")
        for row in report.rows(tables):
            shown.add_row(*row)
        Console().print(shown)
