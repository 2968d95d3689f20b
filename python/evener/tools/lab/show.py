"""A lab as text: what would be built, drawn and in numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

from evener.base.units import show_rate
from evener.tools.lab.layout import Layout

_MANY = 8  # up to this number of nodes or paths, each gets its own line


def as_json(layout: Layout) -> dict[str, Any]:
    """For machines: rates in bits per second, queues in bytes, times in nanoseconds."""
    spec, shape = layout.spec, layout.shape
    return {
        "spec": dataclasses.asdict(spec),
        "short": str(spec),
        "world_size": spec.world_size,
        "nodes": [
            {
                "name": node.name,
                "ranks": list(spec.ranks(node.index)),
                "nics": [
                    {"device": nic.device, "address": nic.address, "gateway": nic.gateway}
                    for nic in node.nics
                ],
            }
            for node in layout.nodes
        ],
        "paths": list(layout.spines),
        "link_rate": spec.link_rate,
        "path_rate": spec.path_rate,
        "flow_rate": spec.flow_rate,
        "queue_ns": spec.queue_ns,
        "delay_ns": spec.delay_ns,
        "loss": spec.loss_share,
        "queue_bytes": None if shape is None else shape.limit,
        "burst_bytes": None if shape is None else shape.burst,
        "namespaces": len(layout.nodes)
        + len(layout.nics)
        + len(layout.spines)
        + (spec.delay is not None),
        "cables": len(layout.nics) * (1 + spec.paths * (1 + (spec.delay is not None))),
    }


def as_text(layout: Layout) -> str:
    """For people."""
    spec, shape = layout.spec, layout.shape
    slots = " + ".join(map(str, spec.uneven)) + " slots" if spec.uneven else ""
    slots = f"of {slots}" if slots else f"x {_count(spec.slots, 'slot')}"
    lines = [f"{spec}: {_count(spec.nodes, 'node')} {slots}", ""]
    lines += _picture(layout)
    lines.append("")
    nic = "unshaped" if spec.link is None else f"{spec.link} each way"
    rows = [
        ("NICs", f"{spec.nics} a node, {nic}, MTU {spec.mtu}, {spec.congestion}"),
        ("paths", _paths(layout)),
    ]
    if spec.flow_cap:
        rows.append(("flow cap", f"{spec.flow_cap} (64 classes by both ports)"))
    if shape is not None:
        rows.append(("queue", f"{spec.queue} = {shape.limit:,} bytes per path, then packets drop"))
    if spec.delay is not None or spec.loss is not None:
        loss = f", {spec.loss} of packets lost on each path" if spec.loss else ""
        rows.append(("delay", f"{spec.delay or 'none'} one way{loss}"))
    total = as_json(layout)
    rows.append(("to build", f"{total['namespaces']} namespaces, {total['cables']} cables"))
    lines += [f"  {name:9} {text}" for name, text in rows]
    lines += ["", "  faults    on " + ", ".join(_targets(layout))]
    return "\n".join(lines)


def _paths(layout: Layout) -> str:
    spec = layout.spec
    rate = "unshaped" if spec.path_rate is None else show_rate(spec.path_rate)
    if spec.paths == 1:
        return f"1 of {rate}" if spec.path_rate else "1, unshaped"
    return f"{spec.paths} of {rate} behind each NIC, by header hash with seed {spec.hash_seed}"


def _picture(layout: Layout) -> list[str]:
    """Nodes on the left, paths on the right; the leaves that spread flows between them."""
    spec = layout.spec
    left = []
    for node in layout.nodes[:_MANY]:
        own = spec.ranks(node.index)
        ranks = str(own.start) if len(own) == 1 else f"{own.start}-{own.stop - 1}"
        for nic in node.nics:
            who = f"{node.name} ranks {ranks}" if nic.index == 0 else ""
            left.append(f"{who:20} {nic.device} {nic.address:11}")
    if spec.nodes > _MANY:
        left.append(f"... to {layout.nodes[-1].name}")
    right = list(layout.spines[:_MANY]) + (["..."] if spec.paths > _MANY else [])
    height = max(len(left), len(right))
    lines = []
    for row in range(height):
        here = left[row] if row < len(left) else ""
        if "eth" in here:
            here += " ---[leaf]--"
        start = (height - len(right)) // 2
        there = f"--( {right[row - start]} )" if 0 <= row - start < len(right) else ""
        lines.append(f"  {here:50}|{there}".rstrip())
    return lines


def _targets(layout: Layout) -> list[str]:
    spec = layout.spec
    return [
        _range("path", spec.paths),
        _range("node", spec.nodes),
        "node0." + _range("eth", spec.nics),
        "node0." + _range("path", spec.paths),
    ]


def _range(word: str, count: int) -> str:
    return f"{word}0" if count == 1 else f"{word}0..{count - 1}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")
