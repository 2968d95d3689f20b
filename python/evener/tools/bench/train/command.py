"""`evener bench train`: options in, table, JSON and page out."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import sys
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from evener.base import settings
from evener.base.click import require
from evener.comm.world.ranks import detect
from evener.errors import EvenerError, UsageError
from evener.tools.bench.train import (
    clusters,
    columns,
    drive,
    files,
    lab,
    machine,
    markdown,
    meet,
    models,
    page,
    plan,
    progress,
    results,
    table,
)
from evener.tools.bench.train.clusters import Cluster
from evener.tools.bench.train.plan import Options, Plan
from evener.tools.bench.train.results import Results

_PIPE_WIDTH = 120


class _Command(click.Command):
    """Remembers its arguments as given: a result names the command that made it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["evener.arguments"] = list(args)
        return super().parse_args(ctx, args)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Columns"):
            formatter.write_dl(list(columns.listing()))


def _complete_columns(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    del ctx, param
    before, comma, last = incomplete.rpartition(",")
    names = [name for name, _ in columns.listing() if name.startswith(last)]
    return [f"{before}{comma}{name}" for name in names]


def _complete_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    del ctx, param
    known = [*models.BUILT_IN, *models.TEXT, *models.USUAL]
    return [name for name in known if name.startswith(incomplete)]


@click.command(cls=_Command)
@click.option(
    "--model",
    shell_complete=_complete_models,
    help="A built-in, gpt2 and bert-base among them, or a classifier of torchvision "
    "(--list-models). "
    "Default: vgg16 on GPUs, vgg-tiny on CPUs.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1),
    help="Samples a rank and step. Default: 128 on GPUs (gpt2 8, bert-base 16), 16 on CPUs.",
)
@click.option(
    "--image-size", type=click.IntRange(1), help="Pixels a side. Default: what the model is for."
)
@click.option(
    "--columns",
    "column_names",
    default=",".join(columns.DEFAULT),
    show_default=True,
    shell_complete=_complete_columns,
    help="Ways to combine gradients, side by side; see below.",
)
@click.option(
    "--modes",
    metavar="MODES",
    help="Evener's modes to compare with DDP, such as exact,int8,topk: columns ddp and these; or "
    "behind those of --columns, where that is given too.",
)
@click.option(
    "--rows",
    default=",".join(plan.ROWS),
    show_default=True,
    help="How many ranks train: one, the ranks of one node, all.",
)
@click.option(
    "--lab",
    "lab_spec",
    metavar="SPEC",
    help="Simulate the cluster on this machine: 2x2@25gbit is 2 nodes of 2 slots, 25 Gb/s each; "
    "2+1@25gbit one of 2 and one of 1.",
)
@click.option(
    "--processes",
    type=click.IntRange(1),
    help="Without --lab and launcher: processes on this machine. Default: one a GPU, or 2.",
)
@click.option(
    "--hosts",
    metavar="H1:N,H2:N",
    help="Start itself on these hosts by `evener launch -H`.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1),
    default=10.0,
    show_default=True,
    help="Measure each run for about so long.",
)
@click.option("--steps", type=click.IntRange(1), help="Measure this number of steps instead.")
@click.option(
    "--warmup",
    type=click.IntRange(0),
    default=5,
    show_default=True,
    help="Steps before the clock starts, after the first.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Runs of each cell, interleaved over the columns.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(1),
    default=300.0,
    show_default=True,
    help="Seconds after which a run counts as failed.",
)
@click.option(
    "--amp",
    type=click.Choice(["none", "bf16"]),
    help="bf16: autocast the forward pass; with FSDP2's columns weights are gathered and gradients "
    "reduced in bf16 instead. Default: bf16 in a table with FSDP2's columns, else none.",
)
@click.option(
    "--tf32/--no-tf32", default=True, show_default=True, help="Let GPUs multiply FP32 in TF32."
)
@click.option("--channels-last", is_flag=True, help="Store images and filters channels last.")
@click.option(
    "--topk-ratio",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.01,
    show_default=True,
    help="Share of the gradients that columns topk and topk-chunk send.",
)
@click.option(
    "--lr",
    type=click.FloatRange(0, min_open=True),
    default=0.01,
    show_default=True,
    help="Learning rate of the SGD.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="What a rank trains on.",
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="CPU threads per process. Default: the cores divided among the processes.",
)
@click.option(
    "--background/--no-background",
    default=None,
    help="Keep ranks that a row does not use training on their own, so that every row "
    "has the same share of the machine. Default: on CPUs only.",
)
@click.option(
    "--json",
    "json_path",
    metavar="PATH",
    help="Write settings, machine, every sample and the figures; - for stdout.",
)
@click.option(
    "--trace",
    type=click.Path(file_okay=False, resolve_path=True),
    metavar="DIR",
    help="After each measurement profile a few more steps; one Chrome trace of rank 0 a run.",
)
@click.option("--html", "html_path", metavar="PATH", help="Write one page with the chart.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the table in Markdown.")
@click.option(
    "--from",
    "source",
    metavar="RESULTS.json",
    help="Measure nothing; draw again from a file that --json wrote.",
)
@click.option("--dry-run", is_flag=True, help="List the runs and how long they will take.")
@click.option("--list-models", is_flag=True, help="List the models and their gradients' size.")
@click.pass_context
def train(ctx: click.Context, /, **given: Any) -> None:
    """Train on synthetic images or text, combining gradients in several ways, side by side.

    Rows are numbers of ranks, columns ways to combine gradients; every cell is run in fresh
    processes, repeats are interleaved, medians are shown with their spread. A column whose ranks
    do not end with equal parameters, or whose first updates are not DDP's (without DDP: FSDP2's),
    fails and shows no figure.

    The ranks are simulated nodes (--lab), the ranks of the launcher that started it (torchrun,
    mpirun, evener launch; or --hosts), or processes of this machine. NCCL keeps the network that
    it has without Evener, in all columns, unless EVENER_NET is set.
    """
    if given["modes"]:
        asked = ctx.get_parameter_source("column_names") == ParameterSource.COMMANDLINE
        beside = given["column_names"] if asked else columns.REFERENCES[0]
        given["column_names"] = f"{beside},{columns.modes(given['modes'])}"
    if given["list_models"]:
        _list_models()
        return
    if not given["source"]:
        require("torch")
    if given["source"]:
        _show(files.read(given["source"]), given)
        return
    # The peers are measured as they are without Evener; and all columns on the same network.
    os.environ.setdefault(settings.EVENER_NET.name, "off")
    # Evener is under its own columns only.
    for door in (settings.EVENER_DDP, settings.EVENER_FSDP):
        os.environ.pop(door.name, None)
    if given["hosts"]:
        _start_on_hosts(ctx, given["hosts"], given["dry_run"])
    for path in (given["json_path"], given["html_path"]):
        if path and path != "-":
            files.require_writable(path)
    cluster, why = _cluster(given)
    made = _plan(given, cluster)
    if given["dry_run"]:
        _dry_run(made, cluster)
        return
    if isinstance(cluster, clusters.Ranks) and cluster.given.rank:
        ctx.exit(_follow(made, cluster))
    taken = _measure(made, cluster, command_line(ctx), why, given["json_path"])
    _show(taken, given)
    ctx.exit(130 if taken.interrupted else 0 if taken.complete else 1)


def command_line(ctx: click.Context) -> str:
    """The command as typed."""
    return shlex.join([*ctx.command_path.split(), *ctx.meta.get("evener.arguments", [])])


def _cluster(given: dict[str, Any]) -> tuple[Cluster, str]:
    launched = detect().size > 1
    if given["lab_spec"]:
        if launched:
            raise UsageError(
                "--lab was given to a process that a launcher started",
                "start it without the launcher, or leave --lab out",
            )
        return lab.make(given["lab_spec"])
    if launched:
        return clusters.Ranks(meet.given()), ""
    gpus = clusters.count_gpus(os.environ) if given["device"] != "cpu" else 0
    return clusters.Loopback(1, given["processes"] or gpus or 2), ""


def _plan(given: dict[str, Any], cluster: Cluster) -> Plan:
    device = given["device"]
    gpus = clusters.count_gpus(os.environ)
    if device == "auto":
        device = "cuda" if gpus else "cpu"
    elif device == "cuda" and not gpus:
        raise UsageError("--device cuda: there is no GPU here", "give --device cpu")
    cpu = device == "cpu"
    model = given["model"] or ("vgg-tiny" if cpu else "vgg16")
    models.require(model)
    wanted = columns.parse(given["column_names"])
    if any(column.sharded for column in wanted):
        from evener.tools.bench.train import sharded

        sharded.require(model, wanted)
    if model in models.TEXT and (given["image_size"] or given["channels_last"]):
        raise UsageError(
            f"model {model} trains on text, and --image-size and --channels-last are for images",
            "leave them out",
        )
    simulated = not isinstance(cluster, clusters.Ranks)
    sizes = cluster.sizes
    local = sum(sizes or (cluster.slots,) * cluster.nodes) if simulated else cluster.slots
    background = given["background"]
    names = {field.name for field in dataclasses.fields(Options)}
    options = {name: value for name, value in given.items() if name in names and value is not None}
    options |= {
        "device": device,
        "model": model,
        "amp": given["amp"] or ("bf16" if any(column.sharded for column in wanted) else "none"),
        "batch_size": given["batch_size"] or (16 if cpu else models.gpu_batch(model)),
        "threads": given["threads"] or max(1, len(os.sched_getaffinity(0)) // local),
        "background": cpu if background is None else background,
    }
    return plan.make(
        Options(**options),
        nodes=cluster.nodes,
        slots=cluster.slots,
        sizes=sizes,
        rows=[name.strip() for name in given["rows"].split(",") if name.strip()],
        columns=wanted,
        device_word="process" if cpu else "GPU",
    )


def _measure(
    made: Plan, cluster: Cluster, command: str, why: str, json_path: str | None
) -> Results:
    taken = results.begin(made, command=command, cluster=cluster.describe())
    taken.machine, taken.versions = machine.describe(), machine.versions()
    taken.environment = machine.environment(os.environ)
    console = Console(stderr=True)
    word = taken.device_word
    expected = plan.estimate(made, cpu=made.options.device == "cpu")
    shown: progress.Progress
    if console.is_terminal:
        shown = progress.Live(made, word, console, expected)
    else:
        shown = progress.Lines(made, word)
    shown.say(
        f"{made.options.model}, {len(made.runs)} runs on {table.cluster(taken)}: "
        f"about {progress.duration(expected)}"
    )
    if why:
        shown.say(f"no simulated cluster: {why}. Loopback processes instead, no link is limited")

    def keep() -> None:
        if json_path and json_path != "-":
            files.write(json_path, results.dump(taken))

    # A time limit around the command ends it as Ctrl-C does: with what was measured.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        drive.measure(made, cluster, taken, shown, keep)
    except KeyboardInterrupt:
        shown.say("interrupted: what was measured before follows")
        taken.interrupted = True
        taken.notes.append("It was interrupted.")
    except EvenerError as error:
        if not taken.runs:
            raise
        taken.notes.append(f"It ended early: {error.problem}")
    finally:
        signal.signal(signal.SIGTERM, before)
    return taken


def _follow(made: Plan, cluster: clusters.Ranks) -> int:
    """A rank that is not rank 0 of the user's launcher: run the agent, show nothing."""

    def hear(rank: int, stream: str, line: str) -> None:
        del rank
        if stream == "stderr":
            click.echo(line, err=True)

    from evener.tools.bench.train import agent

    argv = clusters.agent_argv(agent.plan_to_json(made))
    return cluster.run(argv, hear, 300 + len(made.runs) * (made.options.timeout + 60))


def _show(taken: Results, given: dict[str, Any]) -> None:
    to_stdout = given["json_path"] == "-"
    if given["as_markdown"]:
        click.echo(markdown.render(taken), nl=False, err=to_stdout)
    else:
        console = Console(stderr=to_stdout)
        if not console.is_terminal:
            console = Console(stderr=to_stdout, width=_PIPE_WIDTH, no_color=True, highlight=False)
        table.show(taken, console)
    if to_stdout:
        click.echo(results.dump(taken), nl=False)
    elif given["json_path"]:
        files.write(given["json_path"], results.dump(taken))
        click.echo(f"every sample: {given['json_path']}", err=True)
    if given["html_path"]:
        files.write(given["html_path"], page.render(taken))
        click.echo(f"the page: {given['html_path']}", err=True)


def _dry_run(made: Plan, cluster: Cluster) -> None:
    for run in made.runs:
        click.echo(f"{run.index + 1:3}  {progress.describe(made, run)}")
    expected = plan.estimate(made, cpu=made.options.device == "cpu")
    click.echo(
        f"{len(made.runs)} runs on {json.dumps(cluster.describe())}: "
        f"about {progress.duration(expected)}"
    )


def _list_models() -> None:
    click.echo("built in, for CPUs:")
    for model in models.BUILT_IN.values():
        click.echo(f"  {model.name:24} {_gradients(model.parameters):>12}  {model.what}")
    click.echo("built in, text:")
    for text in models.TEXT.values():
        click.echo(f"  {text.name:24} {_gradients(text.parameters):>12}  {text.what}")
    try:
        listed = models.torchvision_listing()
    except ImportError as error:
        click.echo(f"torchvision's cannot be listed: {error}")
        return
    click.echo("torchvision, for GPUs:")
    for name, parameters in listed:
        click.echo(f"  {name:24} {_gradients(parameters):>12}")


def _gradients(parameters: int) -> str:
    return f"{table.megabytes(4 * parameters)} MB" if parameters else ""


def _start_on_hosts(ctx: click.Context, hosts: str, dry_run: bool) -> None:
    """Become `evener launch -H hosts` of this very command without --hosts. Does not return.

    A dry run is one of the launcher's, which asks no host anything.
    """
    arguments: list[str] = []
    skip = False
    for argument in ctx.meta.get("evener.arguments", []):
        if skip or argument.startswith("--hosts="):
            skip = False
        elif argument == "--hosts":
            skip = True
        else:
            arguments.append(argument)
    slots = 0
    for part in hosts.split(","):
        _, _, count = part.rpartition(":") if ":" in part else ("", "", "1")
        if not count.isdecimal() or not int(count):
            raise UsageError(
                f"--hosts {hosts!r}: {part!r} is not HOST:SLOTS", "write host1:2,host2:2"
            )
        slots += int(count)
    program = [sys.executable, "-m", "evener"]
    argv = [*program, "launch", *["--dry-run"] * dry_run, "-np", str(slots), "-H", hosts]
    os.execv(sys.executable, [*argv, *program, "bench", "train", *arguments])
