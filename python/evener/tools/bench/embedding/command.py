"""`evener bench embedding`: the command, its clock and its table."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from evener.tools.bench.embedding.peers import PEERS, Made, Peer

if TYPE_CHECKING:
    import numpy as np


def draw(rows: int, size: int, zipf: float, count: int) -> list[np.ndarray]:
    """`count` batches of ids int64 [size]: uniform where `zipf` is 0."""
    import numpy as np  # not for the help

    generator = np.random.default_rng(1)
    if not zipf:
        return [generator.integers(0, rows, size) for _ in range(count)]
    reach = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -zipf)
    places = generator.permutation(rows)
    picked = (np.searchsorted(reach / reach[-1], generator.random(size)) for _ in range(count))
    return [places[np.minimum(ranks, rows - 1)].astype(np.int64) for ranks in picked]


def rate(call: Callable[[int], Any], batches: int, keys: int, seconds: float) -> float:
    """Million keys per second: the median batch, over `seconds` and at least 3 batches."""
    call(0)
    took: list[float] = []
    began = time.perf_counter()
    while len(took) < 3 or time.perf_counter() - began < seconds:
        at = time.perf_counter()
        call(len(took) % batches)
        took.append(time.perf_counter() - at)
    return keys / statistics.median(took) / 1e6


def measure(made: Made, batches: list[np.ndarray], dim: int, seconds: float) -> dict[str, Any]:
    """Lookups and steps of one peer."""
    import numpy as np  # not for the help

    size = len(batches[0])
    found: dict[str, Any] = {
        "lookup": rate(lambda i: made.lookup(batches[i]), len(batches), size, seconds),
        "step": None,
    }
    if (step := made.step) is not None:
        gradients = np.random.default_rng(2).normal(size=(size, dim)).astype(np.float32) * 1e-3
        found["step"] = rate(lambda i: step(batches[i], gradients), len(batches), size, seconds)
    return found


def wanted(names: tuple[str, ...]) -> list[Peer]:
    """The peers of these names (all where there is none), Evener first."""
    return [p for p in PEERS if not names or p.name == "evener" or p.name.split()[0] in names]


@click.command()
@click.option("--rows", default=1_000_000, show_default=True, type=click.IntRange(1), help="Rows.")
@click.option(
    "--dim", default=16, show_default=True, type=click.IntRange(1), help="Values per row."
)
@click.option(
    "--batch", default=65_536, show_default=True, type=click.IntRange(1), help="Ids per batch."
)
@click.option(
    "--zipf",
    default=1.05,
    show_default=True,
    type=click.FloatRange(0),
    help="Exponent of Zipf's law; 0: uniform ids.",
)
@click.option(
    "--seconds",
    default=2.0,
    show_default=True,
    type=click.FloatRange(0),
    help="For each figure.",
)
@click.option("--only", multiple=True, help="First words of peers' names, again and again.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.option("--output", type=click.Path(path_type=Path), help="Write the JSON to this file too.")
def embedding(
    rows: int,
    dim: int,
    batch: int,
    zipf: float,
    seconds: float,
    only: tuple[str, ...],
    as_json: bool,
    output: Path | None,
) -> None:
    """Embedding lookups and steps beside the peers that are installed.

    A step is a lookup, its gradients, and Adagrad on the rows that were seen. fbgemm's is row-wise.
    """
    batches = draw(rows, batch, zipf, 8)
    results: list[dict[str, Any]] = []
    for peer in wanted(only):
        found: dict[str, Any] = {"peer": peer.name, "skipped": peer.missing()}
        if not found["skipped"]:
            try:
                found |= measure(peer.make(rows, dim), batches, dim, seconds)
            except Exception as error:  # noqa: BLE001 - another project's failure is its result
                found["skipped"] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
        results.append(found)
    record = {
        "rows": rows,
        "dim": dim,
        "batch": batch,
        "zipf": zipf,
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "unit": "million keys per second",
        "results": results,
    }
    if output is not None:
        output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if as_json:
        click.echo(json.dumps(record, indent=2))
        return
    _show(results)


def _show(results: list[dict[str, Any]]) -> None:
    own = results[0]
    table = Table(box=None)
    table.add_column("million keys/s")
    for title in ("lookup", "evener is", "step", "evener is"):
        table.add_column(title, justify="right")
    for found in results:
        cells = []
        for what in ("lookup", "step"):
            value = found.get(what)
            ratio = own.get(what) and value and own[what] / value
            cells += [f"{value:.1f}" if value else "", f"{ratio:.2f} x" if ratio else ""]
        table.add_row(found["peer"], *cells)
    console = Console()
    console.print(table)
    for found in results:
        if found["skipped"]:
            console.print(f"left out: {found['peer']}: {found['skipped']}", highlight=False)
