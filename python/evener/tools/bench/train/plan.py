"""From options to runs: rows x columns x repeats, and how long they will take. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from evener.errors import UsageError
from evener.tools.bench.train import columns as columns_module
from evener.tools.bench.train.columns import PLAIN, Column

ROWS = ("one", "node", "all")


@dataclass(frozen=True)
class Options:
    """What is trained and how it is measured; the same for every run, and kept in the results."""

    model: str = "vgg16"
    batch_size: int = 32
    image_size: int = 0
    device: str = "auto"
    amp: str = "none"
    tf32: bool = True
    channels_last: bool = False
    topk_ratio: float = 0.01
    lr: float = 0.01
    seconds: float = 10.0
    steps: int = 0
    warmup: int = 5
    repeats: int = 3
    timeout: float = 300.0
    threads: int = 0
    background: bool = False
    seed: int = 1
    trace: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(raw: dict[str, Any]) -> Options:
        """The inverse of `to_json`; names that this version does not know are ignored."""
        known = {field.name for field in dataclasses.fields(Options)}
        return Options(**{name: value for name, value in raw.items() if name in known})


@dataclass(frozen=True)
class Row:
    """How many ranks train together."""

    name: str
    title: str
    nodes: int
    ranks: int


@dataclass(frozen=True)
class Run:
    """One row with one column, once, in fresh processes."""

    index: int
    row: str
    column: str
    repeat: int


@dataclass(frozen=True)
class Plan:
    """Everything that will run, in order."""

    options: Options
    nodes: int
    slots: int
    rows: tuple[Row, ...]
    columns: tuple[Column, ...]
    runs: tuple[Run, ...] = field(default=())
    sizes: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """Slots of the whole cluster."""
        return sum(self.sizes) or self.nodes * self.slots

    def row(self, name: str) -> Row:
        """The row of that name."""
        return next(row for row in self.rows if row.name == name)

    def column(self, name: str) -> Column:
        """The column of that name; "plain" is the single process without a wrapper."""
        return PLAIN if name == PLAIN.name else columns_module.column(name)


def make(
    options: Options,
    *,
    nodes: int,
    slots: int,
    rows: Sequence[str],
    columns: Sequence[Column],
    device_word: str = "GPU",
    sizes: Sequence[int] = (),
) -> Plan:
    """`slots`: of the first node; `sizes`: of each, where they differ.

    Rows that would repeat another one (a node of one slot, a cluster of one node) are left out.

    Runs are ordered repeat by repeat, so that a slow minute of the machine falls on every column,
    and the columns of a row follow each other directly.
    """
    unknown = [name for name in rows if name not in ROWS]
    if unknown:
        raise UsageError(f"there is no row {unknown[0]!r}", f"choose from {', '.join(ROWS)}")
    for column in columns:
        if column.gpu_only and options.device == "cpu":
            raise UsageError(
                f"column {column.name} does not run on CPUs: {column.gpu_only}",
                "leave it out, or train on GPUs",
            )
    wanted: list[Row] = []
    total = sum(sizes) or nodes * slots
    shape = f"of {' + '.join(map(str, sizes))}" if sizes else f"x {slots}"
    for name in ROWS:
        if name not in rows:
            continue
        if name == "one":
            wanted.append(Row(name, f"1 {device_word}", 1, 1))
        elif name == "node" and slots > 1:
            wanted.append(Row(name, f"one node: {plural(slots, device_word)}", 1, slots))
        elif name == "all" and nodes > 1:
            title = f"{nodes} nodes {shape}: {plural(total, device_word)}"
            wanted.append(Row(name, title, nodes, total))
    if not wanted:
        raise UsageError(
            f"rows {', '.join(rows)}: nothing to train with {nodes} nodes {shape} slots",
            "give more slots or nodes, or the row `one`",
        )
    runs: list[Run] = []
    for repeat in range(options.repeats):
        for row in wanted:
            for name in [PLAIN.name] if row.ranks == 1 else [column.name for column in columns]:
                runs.append(Run(len(runs), row.name, name, repeat))
    return Plan(options, nodes, slots, tuple(wanted), tuple(columns), tuple(runs), tuple(sizes))


def plural(count: int, word: str) -> str:
    """`1 GPU`, `4 GPUs`, `4 processes`."""
    ending = "" if count == 1 else "es" if word.endswith("s") else "s"
    return f"{count} {word}{ending}"


def estimate(plan: Plan, *, cpu: bool) -> float:
    """Seconds the plan will take, roughly: the start once, then every run's own start and work."""
    start = 15.0 if not cpu else 4.0 + 2.5 * plan.ranks / 2
    each = 8.0 if not cpu else 1.5
    work = plan.options.seconds if not plan.options.steps else plan.options.steps * 0.3
    return start + len(plan.runs) * (each + plan.options.warmup * 0.3 + work)
