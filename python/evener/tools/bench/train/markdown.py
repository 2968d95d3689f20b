"""The table for a README: `python -m evener.tools.bench.train.markdown results.json`."""

from __future__ import annotations

import sys

import click

from evener.base.click import run
from evener.tools.bench.train import files
from evener.tools.bench.train.results import Results
from evener.tools.bench.train.table import Entry, grid


def render(results: Results) -> str:
    """The table in Markdown, with what made it below. Ends with a newline."""
    made = grid(results)
    heads = [made.unit, *made.heads]
    lines = [
        f"**{_plain(made.title)}**",
        "",
        _row(heads),
        _row(["---", *["---:"] * len(made.heads)]),
    ]
    for line in made.lines:
        lines.append(_row([line.label, *(_entry(entry) for entry in line.entries)]))
    for label, values in made.extras:
        lines.append(_row([label, *values]))
    lines.append("")
    lines += [f"{_plain(note)}  " for note in made.notes]
    machine = results.machine
    parts = [machine.get("cpu", ""), f"{machine.get('cores', '?')} cores"]
    if gpus := machine.get("gpus"):
        parts.append(f"{len(gpus)} x {gpus[0]}")
    parts += [
        f"{name} {results.versions[name]}" for name in ("torch", "nccl") if name in results.versions
    ]
    lines += [f"Made by `{results.command}` on {', '.join(filter(None, parts))}."]
    return "\n".join(lines) + "\n"


def _entry(entry: Entry) -> str:
    if entry.failed or not entry.rate:
        return entry.rate
    rate = f"**{entry.rate}**" if entry.best else entry.rate
    efficiency = f" ({entry.efficiency})" if entry.efficiency else ""
    ranges = ", ".join(filter(None, (entry.spread, entry.efficiency_spread)))
    spread = f"<br><sub>{ranges}</sub>" if ranges else ""
    return f"{rate}{efficiency}{spread}"


def _row(values: list[str]) -> str:
    return f"| {' | '.join(_plain(value) for value in values)} |"


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


@click.command()
@click.argument("path", metavar="RESULTS.json", type=click.Path(exists=True, dir_okay=False))
def main(path: str) -> None:
    """Print the README's table from a JSON that `evener bench train --json` wrote."""
    click.echo(render(files.read(path)), nl=False)


if __name__ == "__main__":
    sys.exit(run(main))
