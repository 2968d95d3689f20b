"""`evener why`: what a running job does, or why it does nothing."""

from __future__ import annotations

import json
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from evener.tools.why.bundle import Verdict


@click.command()
@click.argument("what", nargs=-1, metavar="[JOB|PID|HOST]...")
@click.option("--pid", "pids", multiple=True, type=click.IntRange(1), help="A process. Repeatable.")
@click.option("--seconds", type=click.FloatRange(0.2), default=2.0, show_default=True,
              help="Look twice, with this time between: does the job move?")  # fmt: skip
@click.option("--rsh", default="ssh -o BatchMode=yes", show_default=True, help="Reaches a HOST.")
@click.option("--bundle", "keep_in", type=click.Path(path_type=Path, file_okay=False),
              help="Also keep what was gathered here, for `evener analyze`.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def why(
    what: tuple[str, ...],
    pids: tuple[int, ...],
    seconds: float,
    rsh: str,
    keep_in: Path | None,
    as_json: bool,
) -> None:
    """Say why a running job is stuck or slow. Nothing is stopped, and nothing restarts.

    Without arguments: every job on this host that `evener launch` started. JOB is its name there, a
    PID any process of it, a HOST another one that runs its ranks. Where Evener does not run under
    the job, --pid (or a PID) does what py-spy, /proc and NCCL's RAS allow; give the launcher's
    process, and its ranks are found.

    \b
    Exit status: 0 nothing found, 1 something found, 2 nothing to look at.

    \b
    Examples:
      evener why
      evener why gpu1 gpu2
      evener why --pid 41213
      evener why --json --bundle /tmp
    """
    from evener.tools.why import look
    from evener.tools.why.bundle import Verdict, keep
    from evener.tools.why.watch import about

    jobs = look.gather(what, pids, seconds, tuple(shlex.split(rsh)))
    documents: list[dict[str, Any]] = []
    found = False
    for number, (name, job) in enumerate(sorted(jobs.items())):
        ranks = look.table(job.files)
        files = job.files | about("evener why", look.world(ranks), job.moving)
        kept = keep(keep_in, files) if keep_in is not None else None
        verdict = Verdict(kept) if kept is not None else look.judged(files)
        found = found or verdict.first is not None
        head = {"job": name, "moving": job.moving, "ranks": ranks}
        documents.append({**head, **verdict.document()})
        if not as_json:
            if len(jobs) > 1:
                click.echo(f"{chr(10) if number else ''}job {name or '(not watched)'}")
            click.echo(_said(ranks, job.moving, verdict))
            if kept:
                click.echo(f"kept: {kept}")
    if as_json:
        click.echo(json.dumps({"jobs": documents}, indent=2))
    sys.exit(1 if found else 0)


def _said(ranks: list[dict[str, Any]], moving: bool, verdict: Verdict) -> str:
    lines = [f"{'rank':>4}  {'host':12} {'pid':>8} {'state':5} {'step':>8}  {'in':12} at"]
    for one in ranks:
        step = str(one["step"]) if one["step"] >= 0 else "?"
        lines.append(
            f"{one['rank'] if one['rank'] >= 0 else '?':>4}  {one['host'][:12]:12} {one['pid']:>8} "
            f"{one['state']:5} {step:>8}  {(one['place'] or 'program')[:12]:12} {one['line']}"
        )
    lines.append("")
    if verdict.first is None and moving:
        lines.append(f"The job moves, at {time.strftime('%H:%M:%S')}; nothing is wrong with it.")
    else:
        lines.append(verdict.text())
    return "\n".join(lines)
