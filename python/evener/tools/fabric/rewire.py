"""Rail wiring: the cards of one rail of all hosts on one switch.

Traffic between cards of one rail then never leaves its switch, and with several rails a switch
neither does traffic between those. The inter-switch links stay as they are: they are for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from evener.tools.fabric.map import Card, FabricMap, HostMap


@dataclass(frozen=True, slots=True)
class Move:
    """One cable: card from one switch to another."""

    host: str
    card: str
    rail: int
    before: str
    after: str


def rail_wiring(fabric: FabricMap) -> tuple[FabricMap, list[Move]]:
    """The map with its cards wired by rail, and the cables that move.

    Only switches that have cards today take cards (a spine stays a spine). Rails are spread in
    blocks, the first rails on the first switch, so that a switch takes as many cards as before
    where hosts have equal cards.
    """
    leaves = [s for s in fabric.switches if any(c.switch == s for c in _cards(fabric))]
    rails = sorted({card.rail for card in _cards(fabric)})
    home = {rail: leaves[n * len(leaves) // len(rails)] for n, rail in enumerate(rails)}
    hosts: dict[str, HostMap] = {}
    moves: list[Move] = []
    for name, host in fabric.hosts.items():
        cards = tuple(replace(card, switch=home[card.rail]) for card in host.cards)
        hosts[name] = replace(host, cards=cards)
        moves += [
            Move(name, old.name, old.rail, old.switch, new.switch)
            for old, new in zip(host.cards, cards, strict=True)
            if old.switch != new.switch
        ]
    return replace(fabric, hosts=hosts), moves


def _cards(fabric: FabricMap) -> list[Card]:
    return [card for host in fabric.hosts.values() for card in host.cards]
