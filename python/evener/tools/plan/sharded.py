"""`evener plan --fsdp`: the step of a model that FSDP2 shards over all ranks, plain and Evener's.

A step is played unit by unit in virtual time, forward and then backward, with one network that
carries one message at a time. Weights and gradients have 16 bits.

    plain       every unit is gathered in forward and, but for the root, in backward; its gradient
                is reduced behind its backward. Rings of all ranks, so a node's card carries
                (W-1)/W of a unit each time
    Evener's    forward: each unit is compared with its mirror, and differences cross once for each
                node (`comm.mirrors`); backward gathers nothing; gradients as plain FSDP2 sends
                them, or in a form, once for each node (`comm.shards`)

What is assumed and was measured is in the constants. Forward is a third of what a step computes
beside the optimizer, and a unit's share of it is its share of the weights.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from evener.comm import wires
from evener.comm.planner.forecast import BACKWARD
from evener.errors import UsageError
from evener.tools.plan import given as read
from evener.tools.plan import shapes
from evener.tools.plan.shapes import Unit

PLAIN = "fsdp2"
# BF16 makes gradients of 16 bits no smaller.
WAYS = (PLAIN, "exact", "int8", "int4")
WIDE = 2  # bytes of a weight and of a gradient
BITS = 3.9
"""Bits per weight that a difference takes: 4.5 in the first steps of an earlier run of this model,
3.4 ten steps later, and 0.12 less since (the same trainings with the code of then and of now:
fsdp-bits.json). Later in a training it is 1 to 3. Embeddings take less where a step sees few of
their rows."""
CODER = 23.0
"""Times that coding and decoding a difference take what the memory takes for the weight's bytes:
6.2 ms to encode 706 MB and 2.1 ms to decode as much (114 and 339 GB/s: fsdp-coder.json), at
2 TB/s."""
CHECK_MS = 0.6
"""Milliseconds that the host waits per unit and forward pass, for the GPU's comparison and for all
ranks' numbers; of 15 units in fsdp-ethernet.json, with the copy on the GPU."""
CODE_MS = 0.5
"""Milliseconds per unit that a backward pass takes beyond bytes and computing where gradients go in
a form; as above."""
OPTIMIZER = 75.0
"""Bytes of memory traffic per weight of a rank's shard in AdamW's step: 13.2 ms for 353M weights at
2 TB/s (the same profile)."""


@dataclass(frozen=True)
class Setup:
    """What is trained where. `compute_ms`: of a step without a network, `passes`: micro-batches of
    it, of which the last one reduces gradients. `units`: the root first."""

    units: tuple[Unit, ...]
    compute_ms: float
    passes: int
    nodes: int
    per_node: int
    links: read.Links

    @property
    def ranks(self) -> int:
        """In all."""
        return self.nodes * self.per_node

    @property
    def optimizer_ms(self) -> float:
        """Half of the step at most."""
        held = sum(unit.numel for unit in self.units) / self.ranks
        return min(OPTIMIZER * held / self.links.memory, self.compute_ms / 2)

    def computes(self, unit: Unit) -> tuple[float, float]:
        """Milliseconds of a unit's forward and backward."""
        share = unit.numel / sum(each.numel for each in self.units)
        one = (self.compute_ms - self.optimizer_ms) / self.passes * share
        return one / (1 + BACKWARD), one * BACKWARD / (1 + BACKWARD)


@dataclass(frozen=True)
class Message:
    """`ms` on the network or, in one node, on its links; `sent`: bytes that a node's card sends;
    `before`, `after`: ms of what happens inside the node and in memory, beside other messages."""

    ms: float
    sent: float
    before: float = 0.0
    after: float = 0.0


def ring(setup: Setup, size: float) -> Message:
    """A gather or a reduction of `size` bytes by all ranks."""
    inner, outer = setup.links.inside, setup.links.between
    crossing = (setup.ranks - 1) / setup.ranks * size
    latency = (setup.ranks - setup.nodes) * inner.latency_ms
    if setup.nodes == 1:
        return Message(latency + crossing / inner.bytes_a_ms, 0.0)
    latency += (setup.nodes - 1) * outer.latency_ms
    slowest = min(outer.bytes_a_ms, inner.bytes_a_ms)
    return Message(latency + crossing / slowest, crossing)


def difference(setup: Setup, unit: Unit) -> Message:
    """The refresh of a unit's mirrors after an optimizer step."""
    own = BITS / 8 * unit.numel / setup.ranks  # a rank's message
    outer, inner = setup.links.between, setup.links.inside
    sent = (setup.nodes - 1) * setup.per_node * own
    spread = (setup.per_node - 1) * (inner.latency_ms + setup.nodes * own / inner.bytes_a_ms)
    codes = CODER * WIDE * unit.numel / setup.ranks / setup.links.memory
    latency = (setup.nodes - 1) * outer.latency_ms
    # A rank encodes its own shard, a half of the work, and decodes all others'.
    return Message(
        latency + sent / outer.bytes_a_ms, sent, codes / 2, spread + codes / 2 * (setup.ranks - 1)
    )


def gradient(setup: Setup, unit: Unit, form: str) -> Message:
    """A unit's gradients from all ranks to each one's shard."""
    if form in (PLAIN, "exact") or setup.nodes == 1:
        return ring(setup, WIDE * unit.numel)
    paper = next(paper for paper in wires.papers() if paper.name == form)
    outer, inner = setup.links.between, setup.links.inside
    others = (setup.nodes - 1) / setup.nodes
    large = others * paper.payload(4 * (unit.numel - unit.small))
    sent = large + others * WIDE * unit.small
    width = setup.per_node
    within = (width - 1) * inner.latency_ms + (width - 1) / width * WIDE * unit.numel / (
        inner.bytes_a_ms
    )
    codes = paper.passes * 4 * unit.numel / width / setup.links.memory
    latency = (setup.nodes - 1) * outer.latency_ms
    return Message(latency + sent / outer.bytes_a_ms, sent, within + codes / 2, codes / 2)


@dataclass(frozen=True)
class Row:
    """One way on one cluster, in milliseconds; `sent`: bytes of a node's card in a step."""

    nodes: int
    per_node: int
    way: str
    step_ms: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    sent: float
    efficiency: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def predict(setup: Setup, way: str) -> Row:
    """A step in virtual time."""
    forward = backward = sent = 0.0
    for number in range(setup.passes):
        if way == PLAIN:
            took, moved = plain_forward(setup)
        else:
            took, moved = mirrored_forward(setup, first=number == 0)
        forward, sent = forward + took, sent + moved
        took, moved = go_back(setup, way, last=number == setup.passes - 1)
        backward, sent = backward + took, sent + moved
    step = forward + backward + setup.optimizer_ms
    return Row(
        setup.nodes, setup.per_node, way, step, forward, backward, setup.optimizer_ms, sent,
        setup.compute_ms / step,
    )  # fmt: skip


def plain_forward(setup: Setup) -> tuple[float, float]:
    """Gathers follow each other; a unit computes behind its own. The root's end is the last."""
    net = computed = sent = 0.0
    for unit in setup.units:
        message = ring(setup, WIDE * unit.numel)
        net, sent = net + message.ms, sent + message.sent
        if unit is not setup.units[0]:
            computed = max(computed, net) + setup.computes(unit)[0]
    return max(computed, net) + setup.computes(setup.units[0])[0], sent


def mirrored_forward(setup: Setup, first: bool) -> tuple[float, float]:
    """Each unit is compared; in the step's first pass differences follow."""
    net = computed = sent = 0.0
    for unit in setup.units:
        message = difference(setup, unit) if first else Message(0.0, 0.0)
        net += CHECK_MS + max(message.ms, message.before)
        sent += message.sent
        ready = max(net + message.after, computed + CHECK_MS)
        computed = ready + (setup.computes(unit)[0] if unit is not setup.units[0] else 0.0)
    return computed + setup.computes(setup.units[0])[0], sent


def go_back(setup: Setup, way: str, last: bool) -> tuple[float, float]:
    """Backward, from the last layer to the root, which was kept. `last`: gradients are reduced.

    Plain FSDP2 asks for the next unit's weights when it begins with one. What is asked for goes
    through the network in that order.
    """
    order = [*reversed(setup.units[1:]), setup.units[0]]
    asked: list[tuple[float, int, int, Message]] = []  # (when, kind, unit, what)
    sent, net, ended = 0.0, 0.0, 0.0
    there = [0.0] * len(order)

    def serve(until: float) -> None:
        nonlocal net, sent, ended
        while asked and asked[0][0] <= until:
            when, kind, place, message = heapq.heappop(asked)
            net = max(net, when + message.before) + message.ms
            sent += message.sent
            if kind == 0:
                there[place] = net
            ended = max(ended, net + message.after)

    def ask(when: float, place: int) -> None:
        if way == PLAIN and place < len(order) - 1:
            heapq.heappush(asked, (when, 0, place, ring(setup, WIDE * order[place].numel)))

    now = setup.computes(setup.units[0])[1]  # the head's part of the root comes first
    ask(0.0, 0)
    for place, unit in enumerate(order):
        serve(now)
        now = max(now, there[place])
        ask(now, place + 1)
        now += setup.computes(unit)[1] if unit is not setup.units[0] else 0.0
        if last:
            now += CODE_MS if way not in (PLAIN, "exact") and setup.nodes > 1 else 0.0
            heapq.heappush(asked, (now, 1, place, gradient(setup, unit, way)))
    serve(float("inf"))
    return max(now, ended), sent


# --- the command ---


def run(given: dict[str, Any]) -> None:
    """Print the prediction for the options of `evener plan`, by their names there."""
    console = read.console(given["as_json"])
    clusters, links = read.clusters(given["nodes"]), read.Links.of(given)
    shape = shapes.of(given["model"], given["batch_size"])
    if len(shape.units) == 1:
        raise UsageError(
            f"--model {shape.name}: which units FSDP2 shards is not known from it",
            "give a model of layers, as 7b, 32x4096 or a config.json",
        )
    step, said = read.compute_ms(given["compute_ms"], shape.name, shape.runs)
    rows = [
        predict(Setup(shape.units, step, given["micro_batches"], nodes, per_node, links), way)
        for nodes, per_node in clusters
        for way in WAYS
    ]
    if given["as_json"]:
        record = {
            "schema": "evener.plan-fsdp/1",
            "given": {k: v for k, v in given.items() if k != "as_json"},
            "weights": shape.numel,
            "units": len(shape.units),
            "compute_ms": step,
            "rows": [row.to_json() for row in rows],
        }
        click.echo(json.dumps(record, indent=1))
        return
    console.print(
        f"{shape.name}: {shape.numel / 1e6:,.1f}M weights of 16 bits in {len(shape.units)} units, "
        f"{step:,.1f} ms of compute ({said}) in {given['micro_batches']} micro-batches"
    )
    _show(rows, shape, console)


def _show(rows: Sequence[Row], shape: shapes.Shape, console: Console) -> None:
    amount, unit = shape.per_step()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("nodes", "way", "step ms", "of no network", "x fsdp2", f"{unit} per GPU",
                  "forward ms", "backward ms", "optimizer ms", "MB per node"):  # fmt: skip
        table.add_column(title, justify="left" if title == "way" else "right", no_wrap=True)
    plain = 0.0
    for row in rows:
        plain = row.step_ms if row.way == PLAIN else plain
        table.add_row(
            f"{row.nodes}x{row.per_node}",
            row.way,
            f"{row.step_ms:,.1f}",
            f"{row.efficiency:.0%}",
            f"{plain / row.step_ms:.2f}",
            f"{1e3 * amount / row.step_ms:,.4g}",
            f"{row.forward_ms:,.1f}",
            f"{row.backward_ms:,.1f}",
            f"{row.optimizer_ms:,.1f}",
            f"{row.sent / 1e6:,.0f}",
        )
    console.print(table)
    console.print("a prediction, not a measurement: EVENER_FSDP=auto tries all of them")
