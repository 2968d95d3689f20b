"""The fabric: a map of hosts, cards, switches and links, and the load that traffic puts on it.

`read_map` reads and checks the file; `Flow`s go in, `load` says what every card and every group of
inter-switch links carries and how much bus bandwidth that leaves. docs/reference/map.md describes
the file.
"""

from evener.tools.fabric.load import Flow, Load, Use, load
from evener.tools.fabric.map import (
    Card,
    FabricMap,
    HostMap,
    LinkGroup,
    MapError,
    parse_map,
    read_map,
)
from evener.tools.fabric.rewire import Move, rail_wiring

__all__ = [
    "Card",
    "FabricMap",
    "Flow",
    "HostMap",
    "LinkGroup",
    "Load",
    "MapError",
    "Move",
    "Use",
    "load",
    "parse_map",
    "rail_wiring",
    "read_map",
]
