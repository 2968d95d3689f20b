"""What `evener plan-memory` and `evener zero report` do. Options: `evener.tools.plan.memory`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from evener.base.units import has_unit, parse_rate
from evener.errors import UsageError
from evener.zero import groups, report
from evener.zero.api import plans
from evener.zero.config import MOMENTS, Config
from evener.zero.device import pick
from evener.zero.form import Form
from evener.zero.form import names as forms
from evener.zero.machines import DEFAULT, imagine
from evener.zero.named import configuration, model_of, remarks
from evener.zero.planner import Plan
from evener.zero.probe import probe
from evener.zero.rules import AdamW, Muon
from evener.zero.split import hidden

UNLIMITED = 1 << 50
"""Bytes of host memory where nobody says how much there is."""

REACHED = 0.77
"""Share of a network's rate that gradients reach: 2.41 GB/s of 25 Gb/s between two H200s
(benchmarks/results/zero_nodes.json)."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _batch(text: str) -> tuple[int, int]:
    try:
        rows, length = (int(part) for part in text.lower().split("x"))
    except ValueError:
        raise UsageError(f"batch {text!r} is not known", "write it as 8x1024") from None
    if rows < 1 or length < 1:
        raise UsageError(f"batch {text!r} is empty", "write it as 8x1024")
    return rows, length


def _show(made: Plan, console: Console) -> None:
    word = "[green]fits[/]" if made.fits else f"[red]does not fit[/]: {made.problem}"
    console.print(word, highlight=False, soft_wrap=True)
    for fit in made.nearest:
        speed = f": {fit.tokens_per_second:,.0f} tokens/s" if fit.tokens_per_second else ""
        console.print(f"  fits with {fit.option}{speed}", highlight=False, soft_wrap=True)
    where = Table(box=None)
    for title in ("where", "chunks", "parameters", "memory", "budget"):
        where.add_column(title, justify="left" if title == "where" else "right")
    for tier, total, limit in (
        ("gpu", made.gpu_bytes, made.budget.gpu),
        ("host", made.host_bytes, made.budget.host),
        ("ssd", made.ssd_bytes, made.budget.ssd),
    ):
        places = [p for p in made.places if p.where == tier]
        if tier == "ssd" and not limit:
            continue
        count = sum(p.numel for p in places)
        where.add_row(
            tier,
            str(len(places)),
            f"{count / 1e6:,.1f} M",
            f"{total / 1e9:.2f} GB",
            f"{limit / 1e9:.2f} GB" if limit < UNLIMITED else "no limit",
        )
    console.print(where)
    times = Table(box=None)
    times.add_column("of a step")
    times.add_column("seconds", justify="right")
    for name, seconds in made.times.items():
        times.add_row(name, f"{seconds:.4f}")
    times.add_row("[bold]step[/]", f"[bold]{made.step_seconds:.4f}[/]")
    console.print(times)
    if made.ssd_bytes:
        console.print(
            f"SSD: {made.ssd_bytes / 1e9:.2f} GB of states are read and written once per step; "
            "weights and gradients of these chunks are on the host"
        )
    lanes = "the cores and the streaming lane" if made.streaming else "the cores"
    console.print(f"activations: {made.checkpointing}; optimizer on the host's states: {lanes}")
    console.print(
        f"{made.tokens_per_second:,.0f} tokens/s expected, bound by {made.bound} "
        "(a prediction, not a measurement)"
    )


def _show_nodes(
    alone: Plan, ways: dict[str, Plan], asked: str, nodes: int, console: Console
) -> None:
    """What several nodes bring, in each form of what crosses between them."""
    table = Table(box=None)
    table.add_column("crossing")
    for title in ("GB sent per step", "step", "tokens/s", "x one node"):
        table.add_column(title, justify="right")
    for form, made in ways.items():
        fits = f"{made.tokens_per_second / alone.tokens_per_second:.2f}"
        table.add_row(
            f"[bold]{form}[/]" if form == asked else form,
            f"{made.crossing_bytes / 1e9:.2f}",
            f"{made.step_seconds:.3f} s",
            f"{made.tokens_per_second:,.0f}",
            fits if made.fits and alone.fits else "does not fit",
        )
    console.print(f"{nodes} nodes with a copy of the states each (predictions):")
    console.print(table)


def _elsewhere(text: str) -> str:
    """The budget of an SSD that need not be here: any folder stands for its own."""
    folder, colon, amount = text.rpartition(":")
    if not colon or not has_unit(amount):
        raise UsageError(f"--ssd {text!r} has no size", "write it as /mnt/nvme:500GB")
    return text if Path(folder).is_dir() else f"{Path.cwd()}:{amount}"


def run_plan(
    model: str,
    on: str | None,
    gpu: str,
    host: str,
    ssd: str,
    batch: str,
    accumulation: int,
    ranks: int,
    nodes: int,
    between: str,
    crossing: str,
    dtype: str,
    moments: str,
    optimizer: str,
    master: bool,
    checkpointing: str,
    loss: str,
    tiles: bool,
    sequence: int,
    chunks: bool,
    as_json: bool,
) -> None:
    """Probe this machine, or imagine one (`on`), plan, and print it. Exit(1): it does not fit."""
    if not master and dtype != "bf16":
        raise UsageError(f"--no-master with --dtype {dtype}", "use --dtype bf16")
    read = configuration(model)
    shape = model_of(read)
    said = remarks(read, shape)
    config = Config(
        dtype=_DTYPES[dtype],
        moments=MOMENTS[moments],
        master=master,
        accumulation=accumulation,
        checkpointing={"none": False, "recompute": True}.get(checkpointing, checkpointing),
        loss=loss,
        tiles=tiles,
        sequence=sequence,
        crossing=Form(crossing).name,
    )
    if optimizer == "muon":
        config.rules = [AdamW(), Muon()]
        groups.refuse(config, ranks * nodes)
    limits: dict[str, str | int] = {
        name: text
        for name, text in (("gpu", gpu), ("host", host), ("ssd", ssd or "auto"))
        if text != "auto"
    }
    lines: list[str] = []
    record: dict[str, Any] = {}
    found = None
    if on is None and torch.cuda.is_available():
        found = probe(pick().device, config.dtype, config.moments)
        machine, lines, record = found.machine, found.lines(), {"probe": dataclasses.asdict(found)}
    else:
        imagined = imagine(on or DEFAULT)
        machine, lines = imagined.machine, imagined.words
        if ssd:
            lines = [*lines, f"SSD {machine.ssd / 1e9:g} GB/s, read and written at once (assumed)"]
            limits["ssd"] = _elsewhere(ssd)
        if on is None:
            lines = [f"no GPU is here: {DEFAULT} is assumed (--on names another)", *lines]
        limits.setdefault("gpu", imagined.memory)
        limits.setdefault("host", UNLIMITED)
        record = {"assumed": {"on": on or DEFAULT, "lines": lines,
                              "machine": dataclasses.asdict(machine)}}  # fmt: skip

    if nodes > 1:
        rate = parse_rate(between, "--between") / 8
        machine = dataclasses.replace(machine, between=REACHED * rate)
        lines = [*lines, f"{between} between nodes: {REACHED:.0%} of it is reached (assumed)"]
    config.budget = limits or "auto"
    ways = [(nodes, config.crossing)]
    if nodes > 1:
        ways += [(1, "exact"), *((nodes, form) for form in forms())]
    size = _batch(batch)
    with Console(stderr=True).status("planning") as shown:  # nothing, where that is no terminal
        made, *others = plans(
            shape, config, ways, batch=size, ranks=ranks, machine=machine, tell=shown.update,
            numbers=hidden if config.rules else lambda _: {},
        )  # fmt: skip
    if not made.traced:
        # What a sequence of 64k tokens takes by shapes is as much as twice what it takes.
        said = [*said, "planned from its shapes, without tiles and the time of attention: "
                "install transformers to plan long sequences"]  # fmt: skip
    if not record.get("assumed") and made.ssd_bytes:
        lines = [*lines, f"SSD              measured in {made.budget.folder}"]
    if said:
        record["remarks"] = said
    if as_json:
        if nodes > 1:
            record["ways"] = [
                {
                    "nodes": count,
                    "crossing": form,
                    "fits": each.fits,
                    "step_seconds": each.step_seconds,
                    "tokens_per_second": each.tokens_per_second,
                    "crossing_bytes": each.crossing_bytes,
                }
                for (count, form), each in zip(ways[1:], others, strict=True)
            ]
        click.echo(json.dumps({"plan": made.to_dict(), **record}, indent=2))
    else:
        console = Console()
        total = sum(place.numel for place in made.places)
        console.print(f"[bold]{total / 1e9:.2f} B parameters[/] in {len(made.places)} chunks")
        for line in [*said, *lines]:
            console.print(f"  {line}", highlight=False)
        _show(made, console)
        if nodes > 1:
            by_form = dict(zip(forms(), others[1:], strict=True))
            _show_nodes(others[0], by_form, config.crossing, nodes, console)
        if chunks:
            for place in made.places:
                click.echo(f"  {place.where:5} {place.numel / 1e6:10.1f} M  {place.name}")
    if not made.fits:
        raise click.exceptions.Exit(1)


def write_report(recording: str, output: str | None) -> None:
    """Write the page of `evener zero report`."""
    record = report.read(recording)
    path = Path(output) if output else Path(recording).with_suffix(".html")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(report.page(record), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error}", "give another -o") from None
    found = record["summary"]
    click.echo(
        f"{found['step'] * 1000:.1f} ms per step, "
        f"{found['transfers hidden']:.0%} of copies hidden, "
        f"{found['exposed optimizer'] * 1000:.1f} ms of the optimizer exposed: {path}"
    )
