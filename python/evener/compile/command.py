"""`evener compile report`: what the records of shapes say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from evener.compile import store


@click.group("compile")
def compile_group() -> None:
    """Compilation by shape buckets: what was seen, compiled, spent and saved."""


@compile_group.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def report(folder: Path | None, as_json: bool) -> None:
    """Say which sizes were called, what was compiled, what it cost and saved.

    FOLDER: of the records; default: EVENER_COMPILE_DIR.
    """
    records = store.read(folder or store.folder())
    if as_json:
        click.echo(json.dumps([_document(record) for record in records], indent=1))
        return
    for record in records:
        click.echo(f"{record['name']} ({record['maker']})")
        for signature, said in record["signatures"].items():
            for line in lines(signature, said):
                click.echo(f"  {line}")


def lines(signature: str, said: dict[str, Any]) -> list[str]:
    """The report of one function's inputs."""
    sizes = sorted(map(int, said["sizes"]))
    found = [signature]
    if sizes:
        span = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
        found.append(f"  {said['calls']} calls with {len(sizes)} sizes, {span}")
    if said["off"]:
        return [*found, f"  runs as it is: {said['off']}"]
    for row in said["buckets"]:
        text = f"  up to {row['edge']}: {row['status']}"
        if row["reason"]:
            text += f", {row['reason']}"
        if row["calls"]:
            padded = row["edge"] * row["calls"] / row["rows"] - 1
            text += f", {row['calls']} calls, {padded:.0%} padding"
        if row["compile_seconds"]:
            text += f", compiled in {row['compile_seconds']:.2g} s"
        if row["gain"] is not None:
            text += f", saved {saved(row):.3g} s"
        found.append(text)
    return found


def saved(row: dict[str, Any]) -> float:
    """Seconds: the gain per call times the calls, less the compilation."""
    return float(row["gain"] or 0.0) * int(row["calls"]) - float(row["compile_seconds"])


def _document(record: dict[str, Any]) -> dict[str, Any]:
    for said in record["signatures"].values():
        for row in said["buckets"]:
            row["saved"] = None if row["gain"] is None else saved(row)
    return record
