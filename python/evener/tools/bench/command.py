"""The group `evener bench`. Each benchmark is a package of its own, imported when it is called."""

from __future__ import annotations

import click

from evener.base.click import LazyGroup
from evener.tools.bench.collectives.names import COLLECTIVES, plain

BENCHMARKS: dict[str, tuple[str, str]] = {
    "embedding": (
        "evener.tools.bench.embedding.command:embedding",
        "Embedding lookups and steps, beside the peers that are installed.",
    ),
    "net": (
        "evener.tools.bench.net.command:net",
        "The network as NCCL would use it: single TCP streams against Evener.",
    ),
    "train": (
        "evener.tools.bench.train.command:train",
        "Synthetic training: images/s and scaling efficiency, column by column.",
    ),
    **COLLECTIVES,
}


class _Bench(LazyGroup):
    """Also takes nccl-tests' program names: `all_reduce_perf`."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, plain(cmd_name))


@click.group(cls=_Bench, lazy=BENCHMARKS)
def bench() -> None:
    """Measure, side by side, in one run."""
