"""The report: one HTML file with everything in it. It loads nothing, so it opens offline."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template, select_autoescape
from markupsafe import Markup

from evener import __version__
from evener.tools.analyze.findings import Finding
from evener.tools.analyze.findings.base import FOLLOWS
from evener.tools.analyze.picture import Picture
from evener.tools.analyze.report.curve import curve
from evener.tools.analyze.report.drawing import MOST_HOSTS, MOST_HOSTS_NARROW, drawing
from evener.tools.analyze.report.ringview import ring
from evener.tools.analyze.report.verdict import facts, verdict
from evener.tools.analyze.words import count, ranges, size, without_domain
from evener.tools.fabric import FabricMap

# Each figure is made twice, for a wide page and for a narrow one; the page shows one of them.
_WIDTHS = (False, True)
_MOST_PAIRS = 32
_MOST_RINGS = 128


def page(picture: Picture, findings: list[Finding]) -> str:
    """The HTML of a picture and its findings."""
    world, traffic = picture.world, picture.traffic
    hosts = len(world.hosts()) if world else 0
    better = traffic is not None and traffic.after.crossing < traffic.today.crossing

    def both(fabric: FabricMap | None, name: str, trees: bool = False) -> list[Markup | None]:
        return [drawing(picture, fabric, name, trees=trees, narrow=narrow) for narrow in _WIDTHS]

    return _template().render(
        verdict=verdict(picture, findings),
        facts=facts(picture),
        findings=[
            (finding, [picture.run.cite(where) for where in finding.evidence])
            for finding in findings
        ],
        apart=_apart(findings),
        bad=any(finding.severity != "note" for finding in findings),
        curve=[curve(picture, narrow=narrow) for narrow in _WIDTHS],
        bandwidth=picture.bandwidth,
        today=both(picture.fabric if traffic else None, "The fabric today"),
        proposed=both(traffic.rewired, "The fabric wired by rail")
        if traffic and better
        else [None, None],
        trees=both(picture.fabric, "The trees on the fabric", trees=True)
        if picture.tree_pairs
        else [None, None],
        tree_share=picture.tree_load.crossing_share if picture.tree_load else None,
        mapped=traffic is not None,
        hidden=[max(hosts - most, 0) for most in (MOST_HOSTS, MOST_HOSTS_NARROW)],
        moves=traffic.moves if traffic and better else [],
        loads=_loads(picture, better),
        matrix=_matrix(picture),
        rings=_rings(picture),
        rings_left=max(len(world.rings) - _MOST_RINGS, 0) if world else 0,
        files=[str(path) for path in picture.run.files],
        lines=f"{count(picture.run.lines, 'line')} read, {picture.run.nccl_lines} of NCCL, "
        f"{picture.run.unknown} of them not understood",
        version=__version__,
    )


def _apart(findings: list[Finding]) -> int | None:
    """How many findings can be the reason that the run ended; None where it did not end badly."""
    if not any(finding.root > FOLLOWS for finding in findings):
        return None
    return sum(finding.root > 0 for finding in findings)


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("evener.tools.analyze", "report"),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(size=size, ranges=ranges)
    return environment.get_template("page.html")


def _loads(picture: Picture, better: bool) -> list[dict[str, Any]]:
    traffic = picture.traffic
    if traffic is None:
        return []
    return [
        {
            "name": use.name,
            "links": f"{use.count} x {use.speed * 8 / 1e9:g}G",
            "today": use.weight,
            "after": traffic.after.links[ends].weight if better else None,
        }
        for ends, use in traffic.today.links.items()
    ]


def _matrix(picture: Picture) -> dict[str, Any] | None:
    """Ranks that send against ranks that receive; None where there are too many to be read."""
    pairs = picture.pairs
    if not pairs or len(pairs) > _MOST_PAIRS:
        return None
    crosses: dict[tuple[int, int], bool | None] = {}
    for route in picture.routes:
        key = (route.pair.source, route.pair.destination)
        crosses[key] = crosses.get(key) or route.crosses
    world = picture.world
    host = {rank: member.host for rank, member in world.members.items()} if world else {}
    names = without_domain(set(host.values()))
    return {
        "columns": sorted({pair.destination for pair in pairs}),
        "rows": sorted({pair.source for pair in pairs}),
        "cells": {(pair.source, pair.destination): pair.channels for pair in pairs},
        "crosses": crosses,
        "host": {rank: names[name] for rank, name in host.items()},
    }


def _rings(picture: Picture) -> list[dict[str, Any]]:
    world = picture.world
    if world is None:
        return []
    letter = {
        channel: number
        for number, (_, channels) in enumerate(world.distinct_rings())
        for channel in channels
    }
    rows = []
    for channel, shown in sorted(world.rings.items())[:_MOST_RINGS]:
        hops = shown.hops()
        rows.append(
            {
                "channel": channel,
                "which": letter[channel] + 1,
                "first": min(c for c, n in letter.items() if n == letter[channel]),
                "whole": shown.whole,
                "leaves": [hop for hop in hops if world.apart(*hop)],
                "steps": [
                    (rank, any(world.apart(*hop) for hop in hops[i : i + 1]))
                    for i, rank in enumerate(shown.ranks)
                ],
                "figure": ring(world, shown),
                "where": picture.run.cite(shown.where),
            }
        )
    return rows
