"""The JSON of `evener analyze --json`. Fields are documented in docs/reference/analyze.md and stay.

VERSION grows when a field changes its meaning or goes; new fields do not change it. Bandwidths are
GB/s (10^9 bytes per second) of bus bandwidth, sizes bytes.
"""

from __future__ import annotations

from typing import Any

from evener import __version__
from evener.tools.analyze.findings import Finding
from evener.tools.analyze.findings.base import ENDED
from evener.tools.analyze.model import Pair
from evener.tools.analyze.picture import Bandwidth, CardUse, Picture, Route
from evener.tools.fabric import Load

VERSION = 1


def document(picture: Picture, findings: list[Finding]) -> dict[str, Any]:
    """All of a picture, in types of JSON."""
    run = picture.run
    return {
        "version": VERSION,
        "evener": __version__,
        "files": [str(path) for path in run.files],
        "nccl_versions": sorted(run.versions),
        "hosts": _hosts(picture),
        "communicators": _communicators(picture),
        "bandwidth": _bandwidth(picture, picture.bandwidth),
        "tables": [
            {
                **(_bandwidth(picture, found) or {}),
                "at": run.cite(found.table.where),
                "mixed": found.mixed,
                "main": found is picture.bandwidth,
            }
            for found in picture.tables
        ],
        "failed": any(finding.root >= ENDED for finding in findings),
        "rings": _rings(picture),
        "pairs": _pairs(picture.pairs, picture.routes),
        "trees": {
            "channels": len(picture.world.trees) if picture.world else 0,
            "pairs": _pairs(picture.tree_pairs, picture.tree_routes),
            "fabric": _load(picture.tree_load, picture.fabric.efficiency)
            if picture.tree_load and picture.fabric
            else None,
        },
        "rails": _rails(picture),
        "fabric": _fabric(picture),
        "settings": {name: sorted(values) for name, values in sorted(run.settings.items())},
        "algorithms": [
            {
                "collective": choice.collective,
                "size": choice.size,
                "algorithm": choice.algorithm,
                "protocol": choice.protocol,
                "channels": choice.channels or None,
            }
            for choice, _ in sorted(run.choices.values(), key=lambda item: item[0][:2])
        ],
        "findings": [
            {
                "id": finding.id,
                "severity": finding.severity,
                "title": finding.title,
                "detail": finding.detail,
                "confidence": finding.confidence,
                "evidence": [run.cite(where) for where in finding.evidence],
                "do": finding.do,
                "command": finding.command,
                "expect": finding.expect,
            }
            for finding in findings
        ],
        "lines": {
            "total": run.lines,
            "nccl": run.nccl_lines,
            "unknown": run.unknown,
            "unknown_samples": [
                {"text": text, "at": run.cite(where)} for text, where in run.unknown_samples
            ],
        },
    }


def _hosts(picture: Picture) -> list[dict[str, Any]]:
    world = picture.world
    return [
        {
            "name": host.name,
            "ranks": sorted(r for r, m in world.members.items() if m.host == host.name)
            if world
            else [],
            "networks": sorted(set(host.networks) | {name for name, _ in host.used}),
            "plugins": {name: abi for name, (abi, _) in sorted(host.plugins.items())},
            "cards": [
                {
                    "network": network,
                    "index": index,
                    "name": card.name,
                    "link": card.link,
                    "connections": host.used[network, index],
                }
                for (network, index), card in sorted(host.cards.items())
            ],
            "gpudirect": {"with": host.direct[True], "without": host.direct[False]},
            "pxn": host.proxied,
        }
        for host in picture.run.hosts.values()
    ]


def _communicators(picture: Picture) -> list[dict[str, Any]]:
    return [
        {
            "name": comm.name,
            "ranks": comm.size,
            "copies": comm.copies,
            "ranks_read": len(comm.members),
            "hosts": comm.hosts(),
            "channels": comm.channels,
            "transports": dict(sorted(comm.transports.items())),
            "trees": len(comm.trees),
            "analyzed": comm is picture.world,
        }
        for comm in picture.run.communicators
    ]


def _bandwidth(picture: Picture, found: Bandwidth | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "collective": found.collective or None,
        "collective_confidence": found.collective_known,
        "ranks": found.ranks or None,
        "mean": found.mean,
        "values": found.values,
        "printed_mean": found.table.average,
        "peak": found.peak,
        "peak_size": found.peak_row.size,
        "peak_side": found.peak_side,
        "line_rate": picture.line_rate if found is picture.bandwidth else None,
        "rows": [
            {
                "size": row.size,
                "out_of_place": row.out_of_place.busbw if row.out_of_place else None,
                "in_place": row.in_place.busbw if row.in_place else None,
            }
            for row, _ in found.table.rows
        ],
    }


def _rings(picture: Picture) -> dict[str, Any]:
    world = picture.world
    orders = world.distinct_rings() if world else []
    return {
        "channels": world.channels if world else 0,
        "read": len(world.rings) if world else 0,
        "distinct": len(orders),
        "cut": sum(not ring.whole for ring in world.rings.values()) if world else 0,
        "orders": [
            {
                "ranks": list(order),
                "channels": channels,
                "whole": world.rings[channels[0]].whole if world else False,
            }
            for order, channels in orders
        ],
    }


def _pairs(pairs: list[Pair], all_routes: list[Route]) -> list[dict[str, Any]]:
    rows = []
    for pair in pairs:
        routes = [route for route in all_routes if route.pair is pair]
        rows.append(
            {
                "from": pair.source,
                "to": pair.destination,
                "channels": pair.channels,
                "from_host": routes[0].source.host if routes else None,
                "to_host": routes[0].destination.host if routes else None,
                "routes": [
                    {
                        "channels": list(route.channels),
                        "from_card": _card(route.source),
                        "to_card": _card(route.destination),
                        "rail": route.rail,
                        "switches": list(route.switches) if route.switches else None,
                        "crosses": route.crosses,
                    }
                    for route in routes
                ],
            }
        )
    return rows


def _card(use: CardUse) -> dict[str, Any]:
    return {"name": use.name or None, "confidence": use.known}


def _rails(picture: Picture) -> dict[str, Any]:
    status, confidence, why = picture.rails()
    states = [route.rail for route in picture.routes]
    return {
        "status": status,
        "confidence": confidence,
        "why": why,
        "aligned": states.count("aligned"),
        "crossed": states.count("crossed"),
        "unknown": states.count("unknown"),
    }


def _fabric(picture: Picture) -> dict[str, Any] | None:
    traffic, fabric = picture.traffic, picture.fabric
    if traffic is None or fabric is None:
        return None
    return {
        "payload_share": fabric.efficiency,
        "placed_share": traffic.placed,
        "today": _load(traffic.today, fabric.efficiency),
        "rewired": _load(traffic.after, fabric.efficiency),
        "moves": [
            {
                "host": move.host,
                "card": move.card,
                "rail": move.rail,
                "from": move.before,
                "to": move.after,
            }
            for move in traffic.moves
        ],
    }


def _load(load: Load, efficiency: float) -> dict[str, Any]:
    return {
        "crossing_share": load.crossing_share,
        "bound": _finite(load.bound),
        "payload_bound": _finite(load.bound * efficiency),
        "one_link_bound": _finite(load.one_link),
        "links": [
            {
                "from": ends[0],
                "to": ends[1],
                "links": use.count,
                "link_speed": use.speed / 1e9,
                "share": use.weight,
            }
            for ends, use in load.links.items()
        ],
        "cards": [
            {"host": host, "card": card, "direction": way, "share": use.weight}
            for (host, card, way), use in load.cards.items()
        ],
    }


def _finite(value: float) -> float | None:
    return value / 1e9 if value < float("inf") else None
