"""The summary table as data, and drawn for a terminal; markdown.py and page.py draw it too."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from evener.tools.bench.train import models
from evener.tools.bench.train.columns import PLAIN
from evener.tools.bench.train.plan import Row
from evener.tools.bench.train.results import Cell, Results


@dataclass(frozen=True)
class Entry:
    """One cell, in words. `rate` is empty where there is nothing to show."""

    rate: str = ""
    efficiency: str = ""
    spread: str = ""
    efficiency_spread: str = ""
    failed: bool = False
    best: bool = False


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    label: str
    entries: tuple[Entry, ...]


@dataclass
class Grid:
    """The whole table. `extras`: further rows of plain text below the figures."""

    title: str
    unit: str
    heads: tuple[str, ...]
    lines: list[Line] = field(default_factory=list)
    extras: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def grid(results: Results) -> Grid:
    """The table of `results`."""
    made = Grid(
        title=title(results),
        unit=f"{results.sample}s/s per {results.device_word}",
        heads=tuple(column.title for column in results.columns),
    )
    for row in results.rows:
        label = row.title if row.ranks > 1 else f"{row.title}, plain PyTorch"
        made.lines.append(Line(label, tuple(_entries(results, row))))
    last = results.rows[-1]
    if last.ranks > 1:
        _extras(made, results, last)
    _notes(made, results)
    return made


def title(results: Results) -> str:
    """Model, batch, precision, cluster."""
    settings = results.settings
    precision = "bf16" if settings.get("amp") == "bf16" else "FP32"
    if settings.get("amp") != "bf16" and results.device_word == "GPU" and settings.get("tf32"):
        precision = "TF32"
    gradient = settings.get("gradient_bytes")
    size = f" ({megabytes(gradient)} MB of gradients)" if gradient else ""
    return (
        f"{settings['model']}{size}, batch {settings['batch_size']} per {results.device_word}, "
        f"{precision}, {cluster(results)}"
    )


def cluster(results: Results) -> str:
    """The cluster in a few words."""
    found = results.cluster
    shape = f"{found['nodes']} x {found['slots']}"
    if found["kind"] == "lab":
        return f"simulated cluster {found['spec']}"
    if found["kind"] == "loopback":
        return f"{shape} processes on one machine's loopback"
    return f"{shape} ranks of a launcher"


def megabytes(count: float) -> str:
    """Bytes as MB (10^6), three digits."""
    value = count / 1e6
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def number(value: float) -> str:
    """A rate: no more digits than it deserves."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def share(value: float) -> str:
    """An efficiency in per cent."""
    return f"{100 * value:.0f}%"


def _entries(results: Results, row: Row) -> list[Entry]:
    if row.ranks == 1:
        alone = results.cell(row, PLAIN.name)
        first = _entry(alone, None) if alone else Entry()
        return [first, *[Entry()] * (len(results.columns) - 1)]
    cells = [results.cell(row, column.name) for column in results.columns]
    rates = [cell.rate.median for cell in cells if cell and cell.rate and not cell.reason]
    best = max(rates, default=None)
    return [_entry(cell, best) if cell else Entry() for cell in cells]


def _entry(cell: Cell, best: float | None) -> Entry:
    if cell.reason or cell.rate is None:
        return Entry(rate="failed", failed=True)
    rate, scaling = cell.rate, cell.efficiency if cell.row.ranks > 1 else None
    several = rate.count > 1
    return Entry(
        rate=number(rate.median),
        efficiency=share(scaling.median) if scaling else "",
        spread=f"{number(rate.low)}–{number(rate.high)}" if several else "",
        efficiency_spread=(
            f"{100 * scaling.low:.0f}–{share(scaling.high)}" if several and scaling else ""
        ),
        best=best is not None and rate.median == best,
    )


def _extras(made: Grid, results: Results, row: Row) -> None:
    cells = [results.cell(row, column.name) for column in results.columns]
    reference = results.reference
    found = results.cell(row, reference.name) if reference else None
    if reference and found and found.rate and not found.reason:
        base = found.rate.median
        ratios = tuple(
            f"{cell.rate.median / base:.2f}" if cell and cell.rate and not cell.reason else ""
            for cell in cells
        )
        made.extras.append((f"times {reference.title}", ratios))
    made.extras.append((f"{results.sample}s/s in total", _total(cells, row.ranks)))
    if symbols := models.symbols(results.settings["model"]):
        made.extras.append(("tokens/s in total", _total(cells, row.ranks * symbols)))
    sent = tuple(
        megabytes(cell.sent_bytes_per_step) if cell and cell.sent_bytes_per_step else ""
        for cell in cells
    )
    if any(sent):
        made.extras.append(("MB that a node sends per step", sent))


def _total(cells: list[Cell | None], factor: int) -> tuple[str, ...]:
    return tuple(
        number(cell.rate.median * factor) if cell and cell.rate and not cell.reason else ""
        for cell in cells
    )


def _notes(made: Grid, results: Results) -> None:
    counts = {cell.rate.count for cell in results.cells() if cell.rate}
    if counts and max(counts) > 1:
        made.notes.append(
            f"Each figure: median of {max(counts)} runs, with their least and greatest; "
            f"per cent: of one {results.device_word} alone. Below the line: "
            f"{results.rows[-1].title}."
        )
    if results.settings.get("background"):
        made.notes.append(
            "Processes share this machine's cores, so in every row all of them train, in groups of "
            "the row's size: the rows differ in communication only."
        )
    if results.cluster.get("why"):
        made.notes.append(f"No simulated cluster: {results.cluster['why']}. No link was limited.")
    coded = [
        f"{cell.column} {100 * cell.coding_share:.1f}%"
        for cell in results.cells()
        if cell.coding_share is not None and cell.row == results.rows[-1]
    ]
    if coded:
        made.notes.append(
            f"Encoding and decoding, time of the GPU over the step: {', '.join(coded)}."
        )
    chosen = {}
    for cell in results.cells():
        if cell.nccl and cell.row == results.rows[-1]:
            chosen[cell.column] = cell.nccl
    made.notes += [f"NCCL under {name}: {words}" for name, words in chosen.items()]
    load, cores = results.machine.get("load"), results.machine.get("cores")
    if load and cores and load > 0.5 * cores and results.device_word == "process":
        made.notes.append(
            f"The machine was busy when this began ({load:g} of {cores} processors): figures are "
            "lower and spread more. Run it again when the machine is idle."
        )
    made.notes += results.notes
    seen: dict[str, None] = {}
    for run in results.failures:
        seen[f"{run.column}, row {run.row}: {run.reason}"] = None
    made.notes += [f"failed: {text}" for text in seen]
    missing = results.planned - len(results.runs)
    if missing:
        made.notes.append(f"not finished: {missing} of {results.planned} runs were not made.")


def draw(made: Grid) -> RenderableType:
    """For a terminal, by rich."""
    drawn = Table()
    drawn.add_column(made.unit, vertical="middle")
    for head in made.heads:
        drawn.add_column(head, justify="right")
    for line in made.lines:
        drawn.add_row(line.label, *(_text(entry) for entry in line.entries), end_section=False)
    if made.extras:
        drawn.add_section()
    for label, values in made.extras:
        drawn.add_row(Text(label, style="dim"), *(Text(value, style="dim") for value in values))
    notes = [Text(note, style="red" if note.startswith("failed") else "dim") for note in made.notes]
    return Group(Text(made.title, style="bold"), drawn, *notes)


def _text(entry: Entry) -> Text:
    if entry.failed:
        return Text("failed", style="bold red")
    text = Text(entry.rate, style="bold green" if entry.best else "bold")
    if entry.efficiency:
        text.append(f"  {entry.efficiency}", style="")
    if entry.spread:
        text.append(f"\n{entry.spread}  {entry.efficiency_spread}".rstrip(), style="dim")
    return text


def show(results: Results, console: Console) -> None:
    """Print the table."""
    console.print(draw(grid(results)))
