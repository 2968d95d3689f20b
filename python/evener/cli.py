"""`evener`: parses and dispatches; every verb lives in a package of its own."""

from __future__ import annotations

import json
import os
import sys

import click

from evener.base import settings
from evener.base.click import LazyGroup, run
from evener.net import plugin
from evener.tools.launch.secret import shown

VERBS: dict[str, tuple[str, str]] = {
    "quickstart": (
        "evener.tools.quickstart.command:quickstart",
        "Write a small working project.",
    ),
    "completion": ("evener.tools.completion:completion", "Complete commands in your shell."),
    "launch": ("evener.tools.launch.command:launch", "Start a job on one host or many."),
    "hub": ("evener.tools.hub.command:hub", "Average the weights of nodes that come and go."),
    "horovodrun": ("evener.horovod.runner.launch:horovodrun", "`launch` with Horovod's options."),
    "net": ("evener.net.command:net", "Turn the NCCL plug-in on and off, see what it does."),
    "stats": (
        "evener.tools.stats.command:stats",
        "What a running job does, from its records.",
    ),
    "bench": ("evener.tools.bench.command:bench", "Measure training and its parts, side by side."),
    "doctor": ("evener.tools.doctor.command:doctor", "Check this machine and its network."),
    "analyze": (
        "evener.tools.analyze.command:analyze",
        "Read logs, say what to change.",
    ),
    "why": (
        "evener.tools.why.command:why",
        "Say why a running job is stuck or slow.",
    ),
    "place": (
        "evener.tools.place.command:place",
        "Order hosts and ranks by the fabric's map.",
    ),
    "embedding": (
        "evener.embedding.command:embedding",
        "Answer lookups from snapshots and deltas, see what tables hold.",
    ),
    "compile": (
        "evener.compile.command:compile_group",
        "Compilation by shape buckets: what was compiled, what it cost and saved.",
    ),
    "lab": (
        "evener.tools.lab.command:lab",
        "Simulate clusters: hosts, rates, paths, faults.",
    ),
    "plan": (
        "evener.tools.plan.command:plan",
        "What a network will cost, what would be sent how: before renting it.",
    ),
    "zero": (
        "evener.tools.plan.memory:zero_group",
        "What the memory engine recorded.",
    ),
    "pipeline": (
        "evener.tools.plan.pipeline:pipeline_group",
        "Cut a model into the stages of a pipeline, see what to expect of it.",
    ),
    "plan-memory": (
        "evener.tools.plan.memory:plan_memory",
        "Does a model fit, where will it live, how fast is a step.",
    ),
}


def _show_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from evener.tools import about  # not at the top: --help and completion do without it

        click.echo(about.describe())
        ctx.exit()


@click.group(cls=LazyGroup, lazy=VERBS, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Version, build, plug-in, Python and torch; then exit.",
)
def evener() -> None:
    """Fast distributed training on ordinary networks and ordinary memory."""


@evener.command("settings")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def show_settings(as_json: bool) -> None:
    """Every environment variable, its value here, its default and its meaning."""
    rows = [
        {
            "name": setting.name,
            "value": shown(setting.name, setting.show(setting.get())),
            "default": setting.show(setting.default),
            "set": setting.is_set(),
            "allowed": setting.allowed,
            "meaning": setting.meaning,
        }
        for setting in settings.registry().values()
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    for row in rows:
        mark = "*" if row["set"] else " "
        click.echo(f"{mark} {row['name']}={row['value']}  (default {row['default']})")
        click.echo(f"      {row['meaning']}")


def main() -> None:
    """Entry point of the `evener` command."""
    for line in settings.misspelt(os.environ):
        click.echo(f"warning: {line}", err=True)
    plugin.withdraw()  # each verb decides for the jobs that it starts
    sys.exit(run(lambda: evener(prog_name="evener", standalone_mode=False)))
