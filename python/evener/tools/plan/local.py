"""`evener plan --every`: local steps on nodes of mixed speed, between ranks and through a hub.

A round repeats, so one is worked out. Between ranks (`evener.comm.rounds`) all take N steps, wait
for the slowest, and exchange; the exchange may run behind the next steps. Its time is the planner's
(`comm.planner.costs`), bucket after bucket, because a ring pays its latency for each, with a round
trip for a hop: who receives says first that it is ready, as Gloo has it. Before, the ranks meet,
with a hop to each. Through a hub
(`evener.comm.hub`) the first node that has taken N steps calls the others, each brings what it has
after the step that it is in, and all bytes go through the hub's card: up, and then down.

What the hub's own processor takes to add changes up is not in it, nor are lost packets, congestion,
and steps that are slow now and then.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from evener.base.units import parse_rate
from evener.comm import pace, wires
from evener.comm.hub.shared import FORMS as HUB_FORMS
from evener.comm.pace import Pace
from evener.comm.planner.costs import Costs, Link, of_network
from evener.comm.wires import Paper
from evener.errors import UsageError
from evener.tools.plan import given as read
from evener.tools.plan import shapes

# As `evener.ddp.accelerate(every=N)` lays weights out.
BUCKET_MB = 64


@dataclass(frozen=True)
class Job:
    """What trains: bytes of float32 weights, ms of a step on a GPU of speed 1, and speeds, which
    nodes have in turn."""

    bytes: int
    compute_ms: float
    speeds: tuple[float, ...]
    bucket_bytes: int

    def steps(self, nodes: int) -> list[float]:
        """Milliseconds of a step, by node."""
        turns = itertools.islice(itertools.cycle(self.speeds), nodes)
        return [self.compute_ms / speed for speed in turns]


@dataclass(frozen=True)
class Row:
    """One way to train on one cluster; times are of a round.

    `share`: of what the nodes would do if none ever waited. `slowest`, `network`: what waiting
    for slower nodes, and for bytes, takes of it. They add up to 1. `steps_per_ms`: of all GPUs.
    `sent`: bytes that a node sends to the network, `hub`: that go into the hub.
    """

    nodes: int
    per_node: int
    way: str
    form: str
    every: int
    overlap: int
    exchange_ms: float
    round_ms: float
    share: float
    slowest: float
    network: float
    steps_per_ms: float
    sent: float
    hub: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def rows(job: Job, costs: Costs, forms: Sequence[Paper], every: int | str, hub: Hub) -> list[Row]:
    """All ways on one cluster. A hub needs `every` as a number, and a form that travels to it."""
    found = []
    for form in forms:
        trip = 2 * hub.node.latency_ms
        takes = exchange_ms(job, costs, form.name, (costs.nodes - 1) * trip)
        slow = max(job.steps(costs.nodes))
        if every == "auto":
            paces = [pace.choose(slow, takes)]
        else:
            paces = [Pace(int(every), 0)]
            behind = min(math.ceil(pace.MARGIN * takes / slow), int(every) // pace.PART)
            if behind:
                paces.append(Pace(int(every), behind))
        found += [between_ranks(job, costs, form, chosen, takes) for chosen in paces]
        if every != "auto" and form.name in HUB_FORMS:
            found.append(through_hub(job, costs, form, int(every), hub))
    return found


def exchange_ms(job: Job, costs: Costs, form: str, meet_ms: float) -> float:
    """An exchange between all ranks: the stages of buckets run side by side, each in turn.

    `meet_ms`: what comes before, while they see that all are at the same place.
    """
    whole, rest = divmod(job.bytes, job.bucket_bytes)
    full = costs.stages("two", form, job.bucket_bytes) if whole else (0.0, 0.0, 0.0)
    last = costs.stages("two", form, rest) if rest else (0.0, 0.0, 0.0)
    lanes = [whole * a + b for a, b in zip(full, last, strict=True)]
    first = full if whole else last
    longest = max(range(3), key=lambda stage: lanes[stage])
    return meet_ms + lanes[longest] + sum(first) - first[longest]


def between_ranks(job: Job, costs: Costs, form: Paper, chosen: Pace, takes: float) -> Row:
    """All ranks take as many steps."""
    steps = job.steps(costs.nodes)
    slow, alone = max(steps), sum(1 / step for step in steps)
    computes = chosen.every * slow
    whole = computes + max(0.0, takes - chosen.overlap * slow)
    share = chosen.every * costs.nodes / (whole * alone)
    network = 1 - computes / whole
    return Row(
        nodes=costs.nodes, per_node=costs.per_node,
        way="ranks", form=form.name,
        every=chosen.every, overlap=chosen.overlap, exchange_ms=takes, round_ms=whole,
        share=share, slowest=max(0.0, 1 - share - network), network=network,
        steps_per_ms=chosen.every * costs.nodes * costs.per_node / whole,
        sent=form.sent(job.bytes, costs.nodes) if costs.nodes > 1 else 0.0, hub=0.0,
    )  # fmt: skip


@dataclass(frozen=True)
class Hub:
    """The hub's link and a node's, in each direction."""

    link: Link
    node: Link


def through_hub(job: Job, costs: Costs, form: Paper, every: int, hub: Hub) -> Row:
    """Each node brings what it has."""
    nodes = costs.nodes
    # Inside a node gradients are averaged in every step, behind backward: two thirds of a step.
    inside = costs.scatter(job.bytes) + costs.gather(job.bytes) if costs.two_level else 0.0
    steps = [step / 3 + max(2 / 3 * step, inside) for step in job.steps(nodes)]
    called = every * min(steps) + 2 * hub.node.latency_ms
    taken = [max(every, 1) if s == min(steps) else math.floor(called / s) + 1 for s in steps]
    done = [count * step for count, step in zip(taken, steps, strict=True)]
    payload = form.payload(job.bytes)
    through, own = payload / hub.link.bytes_a_ms, payload / hub.node.bytes_a_ms
    arrived = 0.0
    for at in sorted(done):
        arrived = max(arrived, at) + through
    arrived = max(arrived, max(done) + own)
    whole = arrived + max(nodes * through, own) + 2 * hub.node.latency_ms
    alone = sum(1 / step for step in job.steps(nodes))
    share = sum(taken) / (whole * alone)
    waits = sum((max(done) - at) / step for at, step in zip(done, steps, strict=True))
    slowest = waits / (whole * alone)
    return Row(
        nodes=nodes, per_node=costs.per_node, way="hub", form=form.name, every=every, overlap=0,
        exchange_ms=whole - max(done), round_ms=whole, share=share, slowest=slowest,
        network=max(0.0, 1 - share - slowest), steps_per_ms=sum(taken) * costs.per_node / whole,
        sent=payload, hub=nodes * payload,
    )  # fmt: skip


def forms_to(floor: str, ratio: float) -> list[Paper]:
    """Forms on paper from exact down to `floor`."""
    tried = wires.candidates(floor)
    return [paper for paper in wires.papers(ratio) if paper.name in tried]


def parse_speeds(text: str) -> tuple[float, ...]:
    """`1,0.8,0.5` as numbers. Raises UsageError."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 < speed < math.inf for speed in found):
        raise UsageError(f"--speeds {text!r} are no speeds", "write numbers above 0, as 1,0.8,0.5")
    return found


# --- the command ---


def run(given: dict[str, Any]) -> None:
    """Print the prediction for the options of `evener plan`, by their names there."""
    console = read.console(given["as_json"])
    clusters, links = read.clusters(given["nodes"]), read.Links.of(given)
    hub_rate = parse_rate(given["hub"] or given["network"], "--hub")
    at = Hub(Link.of_rate(hub_rate, given["latency_us"], given["goodput"]), links.between)
    trips = Link(2 * links.between.latency_ms, links.between.bytes_a_ms)
    speeds = parse_speeds(given["speeds"])
    if given["bucket_mb"] == 0:
        raise UsageError(
            "--bucket-mb 0: of local steps buckets are planned by their size", "give 1 or more"
        )
    if given["profile_path"]:
        shape, known = shapes.of_profile(given["profile_path"])
        step, said = given["compute_ms"] or known, "of the profile"
    else:
        shape = shapes.of(given["model"], given["batch_size"])
        step, said = read.compute_ms(given["compute_ms"], shape.name, shape.runs)
    job = Job(4 * shape.numel, step, speeds, (given["bucket_mb"] or BUCKET_MB) << 20)
    forms = forms_to(given["floor"], given["topk_ratio"])
    found: list[Row] = []
    for nodes, per_node in clusters:
        costs = of_network(nodes, per_node, trips, links.inside, forms, links.memory)
        found += rows(job, costs, forms, given["every"], at)
    amount, unit = shape.per_step()
    if given["as_json"]:
        record = {
            "schema": "evener.plan-local/1",
            "given": {k: v for k, v in given.items() if k != "as_json"},
            "weights": shape.numel,
            "compute_ms": step,
            "unit": unit,
            "rows": [{**row.to_json(), "rate": 1e3 * amount * row.steps_per_ms} for row in found],
        }
        click.echo(json.dumps(record, indent=1))
        return
    console.print(
        f"{shape.name}: {shape.numel / 1e6:,.1f}M weights, a step of {step:,.1f} ms ({said}) at "
        f"speed 1; nodes of speed {given['speeds']} in turn"
    )
    _show(found, amount, unit, console)


def _show(found: Sequence[Row], amount: float, unit: str, console: Console) -> None:
    table = Table(box=None, padding=(0, 1, 0, 0))
    titles = ["nodes", "way", "form", "N", "exchange s", "round s", unit, "of no network"]
    for title in [*titles, "slowest", "network", "GB/node", "GB at hub"]:
        left = title in ("way", "form")
        table.add_column(title, justify="left" if left else "right", no_wrap=left)
    for row in found:
        table.add_row(
            f"{row.nodes}x{row.per_node}",
            row.way,
            row.form,
            f"{row.every}+{row.overlap}" if row.overlap else str(row.every),
            _short(row.exchange_ms / 1e3),
            _short(row.round_ms / 1e3),
            _short(1e3 * amount * row.steps_per_ms),
            f"{row.share:.1%}",
            f"{row.slowest:.1%}",
            f"{row.network:.1%}",
            _short(row.sent / 1e9),
            _short(row.hub / 1e9) if row.hub else "",
        )
    console.print(table)
    console.print(
        "of no network: what all nodes would do if none ever waited. The rest is lost to waiting "
        "for slower nodes, and for bytes. N+M: an exchange runs behind the next M steps. A "
        "prediction, not a measurement"
    )


def _short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
