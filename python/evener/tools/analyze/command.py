"""`evener analyze`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--map", "map_file", type=click.Path(path_type=Path), help="Hosts, cards, switches and links."
)
@click.option(
    "--topo",
    "topo_files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="NCCL_TOPO_DUMP_FILE's XML of a host; may be repeated.",
)
@click.option("--html", "html_file", type=click.Path(path_type=Path), help="Write the report here.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write JSON here; - prints it."
)
@click.option(
    "--compare", is_flag=True, help="FILES are a good and a bad run: say what changed between them."
)
@click.option("-q", "--quiet", is_flag=True, help="Print the verdict only.")
def analyze(
    files: tuple[Path, ...],
    map_file: Path | None,
    topo_files: tuple[Path, ...],
    html_file: Path | None,
    json_file: Path | None,
    compare: bool,
    quiet: bool,
) -> None:
    """Read what a job left, and say why it hung, failed or was slow, and what to do.

    FILES are logs, folders, patterns, archives or - for stdin: NCCL_DEBUG=INFO logs (NCCL 2.4 to
    2.30 and RCCL), PyTorch's watchdogs and flight recorders, tracebacks, torchrun, srun and mpirun,
    dmesg, ncclras, NCCL Inspector, nvidia-smi, sacct, kubectl describe; output of nccl-tests or
    `evener bench`, NCCL's XML. In any mixture, packed, in JSON of a log's collector or behind any
    prefix; each is known by its content.

    \b
    Exit status: 0 nothing found, 1 something found or the run failed, 2 a file could not be read.

    \b
    Examples:
      evener analyze run.log
      evener analyze node*.log bench.txt --map map.yaml --html report.html
      evener analyze logs/ dmesg.txt nccl_trace_rank_*
      evener analyze --compare good.log bad.log
    """
    from evener.errors import UsageError
    from evener.tools.analyze import collect, document, page, picture, run_checks, terminal
    from evener.tools.analyze.report.changes import changes, two_runs
    from evener.tools.analyze.report.verdict import verdict
    from evener.tools.fabric import read_map

    fabric = read_map(map_file) if map_file else None
    if compare and len(files) != 2:
        raise UsageError(
            f"--compare takes two runs, and {len(files)} are given",
            "give the good run first, then the bad one; each may be a file or a folder",
        )
    if (compare or len(files) == 2) and (both := two_runs(files[0], files[1], compare)):
        text, differ = changes(*both)
        click.echo(text.split("\n", 1)[0] if quiet else text, nl=quiet)
        sys.exit(1 if differ else 0)
    run = collect([*files, *topo_files])
    if not (
        run.nccl_lines
        or run.ended
        or run.tables
        or run.topologies
        or run.graphs
        or run.matrices
        or run.evidence
    ):
        raise UsageError(
            f"{', '.join(map(str, files))}: {run.lines} lines, and none that this knows",
            "give logs of the job (NCCL_DEBUG=INFO, torchrun, dmesg), flight recorders' dumps, or "
            "the output of nccl-tests",
        )
    result = picture(run, fabric)
    findings = run_checks(result)
    if html_file:
        _write(html_file, page(result, findings))
    if json_file:
        text = json.dumps(document(result, findings), indent=2, allow_nan=False) + "\n"
        if str(json_file) == "-":
            click.echo(text, nl=False)
        else:
            _write(json_file, text)
    if str(json_file) != "-":
        if quiet:
            click.echo(verdict(result, findings))
        else:
            click.echo(terminal(result, findings), nl=False)
        if html_file:
            click.echo(f"report: {html_file}")
    sys.exit(1 if any(finding.severity != "note" for finding in findings) else 0)


def _write(path: Path, text: str) -> None:
    from evener.errors import UsageError

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", "name a file that can be written") from None
