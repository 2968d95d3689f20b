"""`evener doctor`."""

from __future__ import annotations

import json
import sys

import click


@click.command()
@click.option("--peer", "peers", multiple=True, help="Also check the way to this host; repeatable.")
@click.option(
    "--port", type=click.IntRange(1, 65535), help="The peer's `--serve` listens here already."
)
@click.option(
    "--serve",
    type=click.FloatRange(1, 3600),
    is_flag=False,
    flag_value=60.0,
    help="Be the other end for a peer, until this number of seconds passes without one (60).",
)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def doctor(peers: tuple[str, ...], port: int | None, serve: float | None, as_json: bool) -> None:
    """Check this machine and its network; a fix for what is not checked off, and its gain.

    [x] is good, [ ] makes jobs slower, [!] makes them fail, [-] is good to know. With --peer also
    ssh, the rate of one flow and of several, and the number of paths to another host.

    \b
    Exit status: 0 nothing to fix, 1 jobs run slower than they could, 2 jobs fail.

    \b
    Examples:
      evener doctor
      evener doctor --peer node-b
    """
    from evener.tools.doctor.line import examine, exit_status
    from evener.tools.doctor.peer import Server, examine_peer

    if serve is not None:
        server = Server()
        click.echo(f"port {server.port}")
        sys.stdout.flush()
        server.serve(serve)
        server.close()
        return
    lines = examine()
    for peer in peers:
        lines += examine_peer(peer, port or 0)
    bad = [line for line in lines if line.state == "bad"]
    if as_json:
        document = {
            "version": 1,
            "good": not bad,
            "status": exit_status(lines),
            "lines": [line.document() for line in lines],
        }
        click.echo(json.dumps(document, indent=2))
    else:
        subject = ""
        for line in lines:
            if line.subject != subject:
                subject = line.subject
                click.secho(f"\n{subject}", bold=True)
            click.echo(line.text())
        checked = sum(line.state == "good" for line in lines)
        broken = sum(line.severity == "broken" for line in bad)
        slow = len(bad) - broken
        click.echo(f"\n{checked} checked off, {broken} that make jobs fail, {slow} that slow them")
    sys.exit(exit_status(lines))
