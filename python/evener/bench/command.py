"""The group `evener bench`. Each benchmark is a package of its own, imported when it is called."""

from __future__ import annotations

import click

from evener._click import LazyGroup

BENCHMARKS: dict[str, tuple[str, str]] = {
    "train": (
        "evener.bench.train.command:train",
        "Synthetic training: images/s and scaling efficiency, column by column.",
    ),
}


@click.group(cls=LazyGroup, lazy=BENCHMARKS)
def bench() -> None:
    """Measure, side by side, in one run."""
