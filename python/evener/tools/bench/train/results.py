"""What came out: outcomes of runs -> cells -> figures -> JSON, and back.

The JSON keeps every sample; its figures can be made again from them, and `from_json` does so, thus
a table drawn from a file cannot differ from one drawn after the run. The file's form is
`SCHEMA`; a change that an old reader would misread gets a new number.
"""

from __future__ import annotations

import datetime
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from evener.errors import UsageError
from evener.tools.bench.train import columns, guard, models, nccl
from evener.tools.bench.train.columns import PLAIN
from evener.tools.bench.train.plan import Plan, Row, Run
from evener.tools.bench.train.stats import Spread, efficiency, spread

SCHEMA = "evener.bench.train/1"

_LOST_PEER = re.compile(r"reset by peer|closed by peer|connection closed|timed out", re.IGNORECASE)


@dataclass(frozen=True)
class ColumnInfo:
    """A column as the results name it."""

    name: str
    title: str
    what: str
    evener: bool
    tolerance: float


@dataclass
class RunResult:
    """One run. `rate`: samples/s per rank, of the slowest rank; None where it failed."""

    row: str
    column: str
    repeat: int
    rate: float | None = None
    reason: str = ""
    tail: list[str] = field(default_factory=list)
    distance: float | None = None
    later: float | None = None
    equal: bool | None = None
    sent_bytes_per_step: float | None = None
    seconds: float = 0.0
    nccl: dict[str, Any] = field(default_factory=dict)
    ranks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether its figure counts."""
        return self.rate is not None and not self.reason


@dataclass(frozen=True)
class Cell:
    """A row with a column: what the table shows."""

    row: Row
    column: str
    runs: tuple[RunResult, ...]
    rate: Spread | None
    efficiency: Spread | None

    @property
    def reason(self) -> str:
        """Why it failed, or why some of its runs did; empty where none did."""
        return next((run.reason for run in self.runs if run.reason), "")

    @property
    def sent_bytes_per_step(self) -> float | None:
        """What node 0 sent through its network card for one step, median over the runs."""
        sent = [run.sent_bytes_per_step for run in self.runs if run.sent_bytes_per_step]
        return statistics.median(sent) if sent else None

    @property
    def coding_share(self) -> float | None:
        """Encoding and decoding on the GPU over the step, median over the runs; None unknown."""
        shares = [
            run.ranks[0]["coding_ms"] / statistics.median(run.ranks[0]["step_ms"])
            for run in self.runs
            if run.ranks and run.ranks[0].get("coding_ms") is not None
        ]
        return statistics.median(shares) if shares else None

    @property
    def nccl(self) -> str:
        """NCCL's choices in words; several where runs differ."""
        seen = dict.fromkeys(nccl.in_words(run.nccl) for run in self.runs if run.nccl)
        return "; ".join(text for text in seen if text)


@dataclass
class Results:
    """A whole benchmark, finished or not."""

    command: str
    started: str
    cluster: dict[str, Any]
    settings: dict[str, Any]
    rows: tuple[Row, ...]
    columns: tuple[ColumnInfo, ...]
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    runs: list[RunResult] = field(default_factory=list)
    planned: int = 0
    duration_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    @property
    def device_word(self) -> str:
        """What a rank is: "GPU" or "process"."""
        return "process" if self.settings.get("device") == "cpu" else "GPU"

    @property
    def sample(self) -> str:
        """What is counted: "image" or "sequence"."""
        return models.sample(self.settings["model"])

    @property
    def reference(self) -> ColumnInfo | None:
        """The column that the others are compared with, if it is there."""
        name = columns.reference(column.name for column in self.columns)
        return next((column for column in self.columns if column.name == name), None)

    def cell(self, row: Row, column: str) -> Cell | None:
        """The cell, or None where it was not planned or has not run."""
        runs = tuple(run for run in self.runs if run.row == row.name and run.column == column)
        if not runs:
            return None
        rates = {run.repeat: run.rate for run in runs if run.ok and run.rate is not None}
        return Cell(row, column, runs, spread(list(rates.values())), efficiency(rates, self._one()))

    def cells(self) -> list[Cell]:
        """All cells that have run, row by row."""
        names = [PLAIN.name, *(column.name for column in self.columns)]
        found = (self.cell(row, name) for row in self.rows for name in names)
        return [cell for cell in found if cell is not None]

    def _one(self) -> dict[int, float]:
        return {
            run.repeat: run.rate
            for run in self.runs
            if run.column == PLAIN.name and run.ok and run.rate is not None
        }

    @property
    def failures(self) -> list[RunResult]:
        """Runs without a figure."""
        return [run for run in self.runs if run.reason]

    @property
    def complete(self) -> bool:
        """Whether every planned run has its figure."""
        return len(self.runs) == self.planned and not self.failures

    def to_json(self) -> dict[str, Any]:
        """Plain values, samples and figures."""
        return {
            "schema": SCHEMA,
            "command": self.command,
            "started": self.started,
            "duration_s": round(self.duration_s, 1),
            "machine": self.machine,
            "versions": self.versions,
            "cluster": self.cluster,
            "settings": self.settings,
            "environment": self.environment,
            "rows": [vars(row) for row in self.rows],
            "columns": [vars(column) for column in self.columns],
            "planned_runs": self.planned,
            "notes": self.notes,
            "cells": [
                {
                    "row": cell.row.name,
                    "column": cell.column,
                    f"{self.sample}s_per_second_per_rank": cell.rate and cell.rate.to_json(),
                    f"{self.sample}s_per_second_total": cell.rate
                    and cell.rate.times(cell.row.ranks).to_json(),
                    "efficiency": cell.efficiency and cell.efficiency.to_json(),
                    "sent_bytes_per_step": cell.sent_bytes_per_step,
                    "coding_share": cell.coding_share,
                    "nccl": cell.nccl,
                    "reason": cell.reason,
                }
                for cell in self.cells()
            ],
            "runs": [vars(run) for run in self.runs],
        }

    @staticmethod
    def from_json(raw: Any) -> Results:
        """The inverse of `to_json`. Raises UsageError where `raw` is no such result."""
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            found = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
            raise UsageError(
                f"these are no results of evener bench train: schema {found!r}, not {SCHEMA!r}",
                "give a file that --json of this version wrote",
            )
        try:
            return Results(
                command=raw["command"],
                started=raw["started"],
                cluster=raw["cluster"],
                settings=raw["settings"],
                rows=tuple(Row(**row) for row in raw["rows"]),
                columns=tuple(ColumnInfo(**column) for column in raw["columns"]),
                machine=raw["machine"],
                versions=raw["versions"],
                environment=raw["environment"],
                runs=[RunResult(**run) for run in raw["runs"]],
                planned=raw["planned_runs"],
                duration_s=raw["duration_s"],
                notes=raw["notes"],
            )
        except (KeyError, TypeError) as error:
            raise UsageError(
                f"the results are damaged: {error}", "give a file that --json of this version wrote"
            ) from error


def begin(plan: Plan, *, command: str, cluster: Mapping[str, Any]) -> Results:
    """Results of a plan of which nothing has run yet."""
    return Results(
        command=command,
        started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        cluster=dict(cluster),
        settings=plan.options.to_json(),
        rows=plan.rows,
        columns=tuple(
            ColumnInfo(column.name, column.title, column.what, column.evener, column.tolerance)
            for column in plan.columns
        ),
        planned=len(plan.runs),
    )


def add(
    results: Results, plan: Plan, run: Run, outcomes: Sequence[dict[str, Any]], seconds: float
) -> RunResult:
    """Take what the ranks reported about a run: its figure, and whether it may count."""
    taken = RunResult(run.row, run.column, run.repeat, seconds=seconds)
    failed = [outcome for outcome in outcomes if outcome["status"] == "failed"]
    stopped = [outcome for outcome in outcomes if outcome["status"] == "stopped"]
    done = [outcome for outcome in outcomes if outcome["status"] == "ok"]
    if failed or stopped or not done:
        first = min(failed or stopped or [{"reason": "no rank took part"}], key=_remoteness)
        taken.reason = first["reason"]
        taken.tail = first.get("tail", [])
    else:
        _figures(results, plan, taken, done)
    taken.ranks = [
        {key: value for key, value in outcome.items() if key not in ("versions", "nccl")}
        for outcome in done
    ]
    results.runs.append(taken)
    return taken


def _remoteness(outcome: Mapping[str, Any]) -> int:
    """How far a rank's failure is from the cause: a crash, an error of its own, a lost peer."""
    reason = outcome["reason"]
    if _LOST_PEER.search(reason):
        return 2
    return 0 if reason.startswith("ended with") else 1


def _figures(
    results: Results, plan: Plan, taken: RunResult, done: Sequence[dict[str, Any]]
) -> None:
    groups: dict[int, list[dict[str, Any]]] = {}
    for outcome in done:
        groups.setdefault(outcome["group"], []).append(outcome)
    rates = [
        sum(rank["samples"] for rank in ranks) / len(ranks) / max(r["elapsed_s"] for r in ranks)
        for ranks in groups.values()
    ]
    taken.rate = statistics.mean(rates)
    first = groups[0]
    taken.nccl = next((rank["nccl"] for rank in first if "nccl" in rank), {})
    for rank in first:
        results.versions.update(rank.get("versions", {}))
    results.settings["device"] = first[0]["device"]
    results.settings["gradient_bytes"] = first[0]["gradient_bytes"]
    sent = first[0].get("sent_bytes")
    taken.sent_bytes_per_step = sent / first[0]["steps"] if sent else None
    _guard(results, plan, taken, list(groups.values()))


# cuDNN picks algorithms by timing, and TF32 keeps 10 bits: with equal weights and data, two runs
# of DDP itself were up to 0.07 apart (ResNet-18). A rank that keeps its own gradients is near 1.
_GPU_TOLERANCE = 0.25
# A first update nearer to DDP's than this differs by rounding alone. With three processes the next
# ones of ResNet-18 are 0.15 apart then, at a learning rate of 0.01; docs/reference/limits.md.
_ROUNDING = 1e-3


def _guard(
    results: Results, plan: Plan, taken: RunResult, groups: Sequence[Sequence[dict[str, Any]]]
) -> None:
    for ranks in groups:
        problem = guard.unequal([rank["checksum"] for rank in ranks])
        taken.equal = problem is None
        if problem:
            taken.reason = f"does not synchronise: {problem}"
            return
    allowed = plan.column(taken.column).tolerance
    reference = PLAIN if taken.column == PLAIN.name else results.reference
    if reference is None:
        return
    taken.distance = _distance(results, taken, groups[0][0], reference.name, "update")
    taken.later = _distance(results, taken, groups[0][0], reference.name, "later")
    if results.settings["device"] == "cuda":
        allowed = max(allowed, _GPU_TOLERANCE)
    for what, distance in (
        ("first update is", taken.distance),
        (f"next {guard.LATER} updates are", taken.later),
    ):
        if distance is not None and not distance <= allowed:
            taken.reason = (
                f"wrong result: its {what} {distance:.3g} from {reference.title}'s, "
                f"relative to their length; {allowed:g} is allowed"
            )
            if (
                distance is taken.later
                and taken.distance is not None
                and taken.distance < _ROUNDING
            ):
                taken.reason += (
                    f". The first is {taken.distance:.1g} from it. Some models "
                    "amplify rounding from step to step: if that is all, --lr 0.0001 passes"
                )
            return


def _distance(
    results: Results, taken: RunResult, rank: dict[str, Any], reference: str, key: str
) -> float | None:
    """From the reference's; None where there is nothing to compare."""
    mine, theirs = rank.get(key), _reference_update(results, taken, reference, key)
    return None if mine is None or theirs is None else guard.distance(mine, theirs)


def _reference_update(results: Results, taken: RunResult, reference: str, key: str) -> str | None:
    """Its updates in this row; of the first repeat, so that it is compared with itself."""
    for run in results.runs:
        if run.row == taken.row and run.column == reference and run.ranks:
            update: str | None = run.ranks[0].get(key)
            return update
    return None


def dump(results: Results) -> str:
    """The JSON text, one run a line so that a diff can be read."""
    raw = results.to_json()
    runs = ",\n  ".join(json.dumps(run, default=str) for run in raw.pop("runs"))
    head = json.dumps(raw, indent=2, default=str)
    return f'{head[: head.rindex("}")].rstrip()},\n "runs": [\n  {runs}\n ]\n}}\n'
