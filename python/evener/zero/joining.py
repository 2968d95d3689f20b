"""The ranks of a run: all share one copy of the states, or each node has a copy, as the
configuration says or as is planned to be faster."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
import torch.distributed as dist

from evener.errors import UsageError
from evener.zero import groups
from evener.zero.config import Config
from evener.zero.device import Device
from evener.zero.form import Form
from evener.zero.planner import Machine
from evener.zero.planning import budget_of, plan_units
from evener.zero.profile import Profile
from evener.zero.ranks import Crossing, Layout, Ranks, crossing, join, layout, makes, world_size
from evener.zero.units import Unit

logger = logging.getLogger("evener.zero")


def forced(config: Config, device: Device, nodes: Layout) -> Ranks:
    """What the configuration says of nodes; "auto" shares states out over all ranks."""
    if config.nodes != "replicate" or not nodes.able:
        return _joined(config, device.device)
    return _joined(config, device.device, nodes, crossing(device.device, nodes))


def planned(
    units: list[Unit],
    config: Config,
    machine: Machine,
    device: Device,
    tokens: int,
    profile: Profile | None,
) -> tuple[Ranks, float]:
    """The ranks, with a copy of the states on each node where that is asked for, or fits and is
    planned to be faster; and the rate between nodes. Collective."""
    nodes = layout()
    if not nodes.able:
        if config.nodes == "replicate" and len(nodes.nodes) > 1:
            raise UsageError(
                "evener.nodes = 'replicate' needs the same number of ranks on every node",
                f"there are {', '.join(str(len(ranks)) for ranks in nodes.nodes)}",
            )
        return _joined(config, device.device), 0.0
    between = crossing(device.device, nodes)
    rate = between.rate
    size, inner, copies = world_size(), len(nodes.nodes[0]), len(nodes.nodes)
    budget = budget_of(config, device.device, inner)
    measured = replace(machine, between=rate, ssd=machine.ssd or 1e9)
    ways = {
        # Inside a node the network was not measured; it is far faster than between nodes.
        "replicate": plan_units(units, config, measured, budget, tokens, inner, profile, copies),
        "shard": plan_units(
            # A ring passes the wires between nodes once, whatever the ranks on each.
            units,
            config,
            replace(measured, network=rate * inner),
            budget,
            tokens,
            size,
            profile,
        ),
    }
    fitting = [name for name, made in ways.items() if made.fits]
    chosen = config.nodes
    if chosen == "auto":
        chosen = min(fitting, key=lambda name: ways[name].step_seconds, default="shard")
    box = [chosen]
    dist.broadcast_object_list(box, src=0)
    chosen = box[0]
    words = [
        f"{name}: {made.step_seconds:.3f} s per step" if made.fits else f"{name}: {made.problem}"
        for name, made in ways.items()
    ]
    logger.info(
        "%d nodes, %.2f GB/s between them: %s (%s; %s)",
        copies,
        rate / 1e9,
        "each has a copy of the states" if chosen == "replicate" else "all share the states",
        "asked for"
        if config.nodes != "auto"
        else "planned to be faster"
        if len(fitting) > 1
        else "the other does not fit",
        "; ".join(words),
    )
    if chosen == "replicate":
        return _joined(config, device.device, nodes, between), rate
    return _joined(config, device.device), rate


def _joined(
    config: Config,
    device: torch.device,
    nodes: Layout | None = None,
    between: Crossing | None = None,
) -> Ranks:
    """See `join`."""
    matrices = groups.has_matrices(config)
    if nodes is not None and matrices:
        groups.refuse_unlike(config, makes(device))
    form = Form(config.crossing) if nodes is not None else None
    return join(device, nodes, between, form, matrices)
