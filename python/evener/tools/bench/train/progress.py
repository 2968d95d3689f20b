"""What is shown while it runs: bars on a terminal, a line a run where the output is piped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bars

from evener.tools.bench.train import models
from evener.tools.bench.train.plan import Plan, Run
from evener.tools.bench.train.results import RunResult
from evener.tools.bench.train.table import number


class Progress(Protocol):
    """Told what happens; shows it."""

    def __enter__(self) -> Progress: ...

    def __exit__(self, *exc: object) -> None: ...

    def phase(self, run: Run, message: dict[str, Any]) -> None:
        """A run says where it is: {"phase": ...} and, while measuring, step and steps."""

    def done(self, run: Run, result: RunResult) -> None:
        """A run is over."""

    def say(self, text: str) -> None:
        """A line that is not a figure."""


def describe(plan: Plan, run: Run) -> str:
    """`4 processes, Evener exact, repeat 1/3`."""
    row, column = plan.row(run.row), plan.column(run.column)
    return f"{row.title}, {column.title}, repeat {run.repeat + 1}/{plan.options.repeats}"


def outcome(result: RunResult, word: str, sample: str) -> str:
    """A run's figure, or why it has none. `sample`: what is counted, "image" or "sequence"."""
    if result.reason or result.rate is None:
        return f"failed: {result.reason}"
    return f"{number(result.rate)} {sample}s/s per {word}"


class Lines:
    """One line a run, plain text: for a pipe or a log file."""

    def __init__(self, plan: Plan, word: str, write: Callable[[str], None] | None = None) -> None:
        self.plan, self.word = plan, word
        self.sample = models.sample(plan.options.model)
        self.write = write or (lambda line: click.echo(line, err=True))
        self.width = len(str(len(plan.runs)))

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def phase(self, run: Run, message: dict[str, Any]) -> None:
        """Nothing: a log needs no ticks."""

    def done(self, run: Run, result: RunResult) -> None:
        count = f"{run.index + 1:{self.width}}/{len(self.plan.runs)}"
        text = f"[{count}] {describe(self.plan, run)}: {outcome(result, self.word, self.sample)}"
        self.write(f"{text} ({result.seconds:.1f} s)")

    def say(self, text: str) -> None:
        self.write(text)


class Live:
    """Two bars, all runs and the steps of the one that runs; finished runs scroll above."""

    def __init__(self, plan: Plan, word: str, console: Console, expected: float) -> None:
        self.plan, self.word, self.console = plan, word, console
        self.sample = models.sample(plan.options.model)
        self.bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
        )
        self.expected = expected
        self.current = -1
        self.seconds = 0.0

    def __enter__(self) -> Live:
        self.bars.start()
        left = f"about {duration(self.expected)} left"
        self.all = self.bars.add_task("starting", total=len(self.plan.runs), left=left)
        self.one = self.bars.add_task("", total=None, left="")
        return self

    def __exit__(self, *exc: object) -> None:
        self.bars.stop()

    def phase(self, run: Run, message: dict[str, Any]) -> None:
        if run.index != self.current:
            self.current = run.index
            self.bars.reset(self.one)
        self.bars.update(self.all, description=describe(self.plan, run))
        if message["phase"] == "measure" and "step" in message:
            self.bars.update(
                self.one,
                description="  steps",
                total=message["steps"],
                completed=message["step"],
            )
        else:
            self.bars.update(self.one, description=f"  {message['phase']}", total=None, completed=0)

    def done(self, run: Run, result: RunResult) -> None:
        style = "red" if result.reason else ""
        self.bars.console.print(
            f"{describe(self.plan, run)}: {outcome(result, self.word, self.sample)}",
            style=style,
            highlight=False,
            markup=False,
        )
        finished = run.index + 1
        self.seconds += result.seconds
        left = self.seconds / finished * (len(self.plan.runs) - finished)
        self.bars.update(self.all, completed=finished, left=f"about {duration(left)} left")

    def say(self, text: str) -> None:
        self.bars.console.print(text, style="dim", highlight=False, markup=False)


def duration(seconds: float) -> str:
    """`45 s`, `3 min`."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
