"""One ring as a circle of ranks, hops between hosts dashed and labelled."""

from __future__ import annotations

from math import cos, pi, sin

from markupsafe import Markup

from evener.tools.analyze.model import Communicator, Ring
from evener.tools.analyze.report import svg

MOST_RANKS = 64


def ring(world: Communicator, shown: Ring) -> Markup | None:
    """The figure; None where there are too many ranks to be read."""
    count = len(shown.ranks)
    if not 2 <= count <= MOST_RANKS:
        return None
    radius = max(70.0, count * 4.2)
    size = 2 * radius + 60
    middle = size / 2
    hosts = world.hosts()
    at = {}
    for place, rank in enumerate(shown.ranks):
        angle = 2 * pi * place / count - pi / 2
        at[rank] = (middle + radius * cos(angle), middle + radius * sin(angle))
    parts = []
    for source, destination in shown.hops():
        (x1, y1), (x2, y2) = at[source], at[destination]
        apart = world.apart(source, destination)
        parts.append(
            svg.line(
                x1,
                y1,
                x2,
                y2,
                "hop apart" if apart else "hop",
                f"{source} to {destination}" + (", between hosts" if apart else ""),
            )
        )
    for rank, (x, y) in at.items():
        member = world.members.get(rank)
        number = hosts.index(member.host) if member else -1
        tip = svg.title(f"rank {rank}" + (f" on {member.host}" if member else ""))
        # Hosts differ in shape as well: circles and squares in turn.
        if number % 2:
            parts.append(
                svg.tag("rect", tip, x=x - 10, y=y - 10, width=20, height=20, class_="node odd")
            )
        else:
            parts.append(svg.tag("circle", tip, cx=x, cy=y, r=11, class_="node even"))
        parts.append(svg.text(x, y + 4, rank, class_="small"))
    inner = Markup("").join(parts)
    return svg.tag(
        "svg",
        inner,
        viewBox=f"0 0 {size:.0f} {size:.0f}",
        role="img",
        aria_label=f"ring of {count} ranks",
        style=f"max-width:{size:.0f}px",
    )
