"""`evener plan` itself: the options' values in, tables or JSON out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from evener.comm import wires
from evener.comm.planner import choose
from evener.comm.planner.choose import Decision
from evener.comm.planner.costs import Costs, of_network
from evener.comm.profile import StepProfile
from evener.tools.plan import given as read

# (ranks, overlap across the step or not) > ways to lay out a step's buckets. The shortest step is
# taken.
Profiles = Callable[[int, bool], list[StepProfile]]
# From the mildest to the harshest.
LADDER = wires.names()


@dataclasses.dataclass(frozen=True)
class Row:
    """One way to train on one cluster."""

    nodes: int
    per_node: int
    mode: str
    made: Decision
    profile: StepProfile

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "nodes": self.nodes,
            "per_node": self.per_node,
            "mode": self.mode,
            "efficiency": self.made.compute_ms / self.made.step_ms,
            **self.made.to_json(),
        }


def run(given: dict[str, Any]) -> None:
    """Print the prediction for the options of `evener plan`, by their names there."""
    console = read.console(given["as_json"])
    clusters = read.clusters(given["nodes"])
    links = read.Links.of(given)
    profiles, source = _profiles(given)
    profile = profiles(1, False)[0]
    rows = []
    for nodes, per_node in clusters:
        forms = wires.papers(given["topk_ratio"])
        costs = of_network(nodes, per_node, links.between, links.inside, forms, links.memory)
        rows += _rows(profiles, costs, given["floor"])
    if given["as_json"]:
        record = {
            "schema": "evener.plan/1",
            "given": {k: v for k, v in given.items() if k != "as_json"},
            "source": source,
            "profile": profile.to_json(),
            "rows": [row.to_json() for row in rows],
        }
        click.echo(json.dumps(record, indent=1))
        return
    total = sum(bucket.bytes for bucket in profile.buckets) / 1e6
    console.print(
        f"{source}: {total:.1f} MB of gradients in {len(profile.buckets)} buckets, "
        f"{profile.compute_ms:.1f} ms of compute"
    )
    _show_rows(rows, given["batch_size"], console)
    last = clusters[-1]
    wanted = f"auto, floor {given['floor']}" + (" + overlap" if given["overlap"] else "")
    detail = next(row for row in rows if (row.nodes, row.per_node) == last and row.mode == wanted)
    _show_buckets(detail, console)


def _rows(profiles: Profiles, costs: Costs, floor: str) -> list[Row]:
    rows = []
    for overlap in (False, True):
        suffix = " + overlap" if overlap else ""
        ways: list[tuple[str, tuple[str, ...]]] = [(form, (form,)) for form in LADDER]
        ways.append((f"auto, floor {floor}", wires.candidates(floor)))
        for name, tried in ways:
            found = [
                Row(
                    costs.nodes,
                    costs.per_node,
                    name + suffix,
                    choose.choose(
                        profile,
                        costs,
                        tried,
                        overlap=overlap,
                        # Rows have no sparse form.
                        allowed=lambda b, form, p=profile: (  # type: ignore[misc]
                            not (p.buckets[b].by_rows and wires.get(form).late)
                        ),
                    ),
                    profile,
                )
                for profile in profiles(costs.nodes * costs.per_node, overlap)
            ]
            # Forms that come late take nothing apart.
            several = found[:1] if wires.get(tried[0]).late else found
            rows.append(min(several, key=lambda row: row.made.step_ms))
    return rows


def _profiles(given: dict[str, Any]) -> tuple[Profiles, str]:
    """What there is to choose from, and where it comes from."""
    if given["profile_path"]:
        profile = StepProfile.load(Path(given["profile_path"]))
        if given["compute_ms"]:
            profile = profile.scaled(given["compute_ms"])
        return lambda _, __: [profile], str(given["profile_path"])
    from evener.tools.bench.train import models

    name = given["model"]
    models.require(name)
    batch = given["batch_size"] = given["batch_size"] or models.gpu_batch(name)
    compute_ms, said = read.compute_ms(given["compute_ms"], name, batch)
    from evener.comm.planner.forecast import Traced

    click.echo(f"tracing {name} without memory", err=True)
    traced = Traced.of(
        lambda: models.build(name),
        lambda: (models.data(name, batch, "meta")[0],),
    )
    if given["bucket_mb"] is None:
        given["bucket_mb"] = 25
    bucket_bytes = given["bucket_mb"] << 20

    def laid_out(ranks: int, overlap: bool) -> list[StepProfile]:
        found = [traced.profile(compute_ms, bucket_bytes)]
        if rows := traced.rows(ranks, shared=overlap):
            found.append(traced.profile(compute_ms, bucket_bytes, rows=rows))
        return found

    return laid_out, f"{name}, batch {batch}, compute {said}"


def _show_rows(rows: list[Row], batch: int | None, console: Console) -> None:
    """batch: samples per GPU and step; None where nothing says it, as with a profile alone."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    rate = "samples/s per GPU" if batch else "steps/s"
    for title in ("nodes", "mode", "step ms", "of linear", rate, "forms"):
        left = title in ("mode", "forms")
        table.add_column(title, justify="left" if left else "right", no_wrap=left)
    for row in rows:
        made = row.made
        forms = [choice.form for choice in made.choices]
        counts = ", ".join(f"{forms.count(form)} {form}" for form in dict.fromkeys(forms))
        table.add_row(
            f"{row.nodes}x{row.per_node}",
            row.mode,
            f"{made.step_ms:.1f}",
            f"{100 * made.compute_ms / made.step_ms:.0f}%",
            f"{batch / made.step_ms * 1e3:,.0f}" if batch else f"{1e3 / made.step_ms:,.2f}",
            counts,
        )
    console.print(table)


def _show_buckets(row: Row, console: Console) -> None:
    made, profile = row.made, row.profile
    console.print(f"\n{row.nodes}x{row.per_node}, {row.mode}; buckets in the order they leave:")
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("bucket", "MB", "way", "form", "stages ms", "ready ms", "needed ms"):
        left = title in ("bucket", "way", "form")
        table.add_column(title, justify="left" if left else "right", no_wrap=left)
    for b in made.sequence:
        bucket, choice = profile.buckets[b], made.choices[b]
        table.add_row(
            f"{b} {bucket.name}",
            f"{bucket.bytes / 1e6:.1f}",
            choice.algorithm,
            choice.form,
            " + ".join(f"{took:.2f}" for took in choice.stages_ms if took),
            f"{bucket.ready_ms:.1f}",
            f"{bucket.need_ms:.1f}",
        )
    console.print(table)
    console.print(
        f"{made.step_ms:.1f} ms per step expected, {made.compute_ms:.1f} ms of it compute "
        "(a prediction, not a measurement)"
    )
