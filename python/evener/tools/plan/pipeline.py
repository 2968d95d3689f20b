"""`evener pipeline`: the options, without torch; `evener.pipeline.command` does what they say."""

from __future__ import annotations

from typing import Any

import click

SCHEDULES = [
    "GPipe",
    "1F1B",
    "Eager1F1B",
    "Interleaved1F1B",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
]


@click.group("pipeline")
def pipeline_group() -> None:
    """Cut a model into the stages of a pipeline, see what to expect of it."""


@pipeline_group.command("plan")
@click.argument("model")
@click.option("--stages", default=2, show_default=True, type=click.IntRange(1), help="Ranks.")
@click.option("--schedule", default="1F1B", show_default=True, type=click.Choice(SCHEDULES))
@click.option(
    "--stages-per-rank", type=click.IntRange(1), help="Of interleaved schedules; default 2."
)
@click.option(
    "--microbatches", default="auto", show_default=True, help="A number; auto: part of the search."
)
@click.option("--memory", help="Of each rank, as 80GB; several with commas: one per rank.")
@click.option(
    "--speeds", help="Of each rank, as 1,1,0.5: multiples of the device that is profiled."
)
@click.option(
    "--optimizer",
    default="adam",
    show_default=True,
    type=click.Choice(["adam", "momentum", "sgd"]),
    help="Its states take memory.",
)
@click.option(
    "--recompute",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "yes", "no"]),
    help="Forward runs again before backward. auto: where nothing fits without.",
)
@click.option(
    "--batch",
    default="16x512",
    show_default=True,
    help="Of a whole step, for a config.json: rows x tokens; for torchvision: rows.",
)
@click.option(
    "--dtype",
    default="fp32",
    show_default=True,
    type=click.Choice(["bf16", "fp32"]),
    help="Of parameters.",
)
@click.option("--device", help="Where operations are timed; default: a GPU if there is one.")
@click.option("--flops", help="Estimate instead of timing: operations per second, as 400T.")
@click.option("--bandwidth", help="Of the device's memory, as 3TB/s; with --flops.")
@click.option("--inside", default="20GB/s", show_default=True, help="Links inside a node.")
@click.option("--network", default="25gbit", show_default=True, help="Links between nodes.")
@click.option(
    "--per-node", default=0, show_default=True, help="Ranks of one node; 0: all share one."
)
@click.option(
    "--activations", default="exact", show_default=True,
    type=click.Choice(["exact", "bf16", "int8"]), help="How they go between nodes.",
)  # fmt: skip
@click.option("-o", "--output", type=click.Path(dir_okay=False), help="Write the plan as JSON.")
@click.option("--html", type=click.Path(dir_okay=False), help="Write a page with the timeline.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def plan(model: str, **given: Any) -> None:
    """Cut MODEL into stages; show the step, bubble and memory to expect.

    MODEL is a config.json of transformers (if it is installed), torchvision:NAME, or
    FILE.py:FUNCTION. The function returns a dict with `model`, `example`, and where the model does
    not return its loss, `loss` and `target`. Nothing of the model is allocated. Exit status 1: it
    does not fit.
    """
    from evener.pipeline.command import run_plan

    run_plan(model, **given)


@pipeline_group.command("report")
@click.argument("recording", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    help="The page; default: beside the recording. Its folder is made where it is missing.",
)
def report(recording: str, output: str | None) -> None:
    """RECORDING (a plan, or what `pipe.record` wrote) as a page: predicted against measured."""
    from evener.pipeline.command import write_report

    write_report(recording, output)
