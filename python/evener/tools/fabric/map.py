"""The map file: what is plugged into what. YAML, checked word by word.

    version: 1
    mtu: 4096                          # bytes of payload a packet, optional
    hosts:
      node-a:
        gpus: [nic0, nic0, nic1, nic1] # the nearest card of GPU 0, 1, 2, 3
        nics:
          nic0: {speed: 400G, switch: leaf0, rail: 0}
          nic1: {speed: 400G, switch: leaf0, rail: 1}
    switches: [leaf0, leaf1]
    links:
      - {between: [leaf0, leaf1], speed: 400G, count: 4}

Nothing is taken on trust: an unknown key is refused by name with the nearest known one, so a typing
error cannot silently remove a switch from the picture. Speeds are bits per second with a factor of
1000 (10G, 400G, 2.5G, 100M); inside, bytes per second.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from evener.errors import UsageError

_SPEED = re.compile(r"^(\d+(?:\.\d+)?) ?([MGT]) ?(?:b(?:it)?(?:/s|ps)?)?$", re.IGNORECASE)
_FACTOR = {"M": 1e6, "G": 1e9, "T": 1e12}
DEFAULT_MTU = 4096
# Ethernet with checksum, VLAN tag, preamble and gap 42, IPv4 20, UDP 8, and for RDMA writes base
# header 12, address header 16 and checksum 4 (InfiniBand specification, annex 17: RoCEv2).
PACKET_OVERHEAD = 102


class MapError(UsageError):
    """A map that cannot be: the file, the place in it, what is wrong."""


@dataclass(frozen=True, slots=True)
class Card:
    """One network card of one host."""

    host: str
    name: str
    speed: float
    """Bytes per second, each way."""
    switch: str
    rail: int
    """Cards of equal rail belong together across hosts; by default their order in the host."""


@dataclass(frozen=True, slots=True)
class HostMap:
    """One host: its cards, and the card nearest to each GPU in order of device."""

    name: str
    cards: tuple[Card, ...]
    gpus: tuple[str, ...]

    def card(self, name: str) -> Card | None:
        """The card of that name, None where there is none."""
        return next((card for card in self.cards if card.name == name), None)

    def nearest(self, device: int) -> Card | None:
        """The card nearest to a GPU, None where the map has no such GPU."""
        return self.card(self.gpus[device]) if 0 <= device < len(self.gpus) else None


@dataclass(frozen=True, slots=True)
class LinkGroup:
    """Parallel links between two switches."""

    ends: tuple[str, str]
    speed: float
    """Bytes per second of one link, each way."""
    count: int

    @property
    def name(self) -> str:
        """`leaf0-leaf1`."""
        return "-".join(self.ends)


@dataclass(frozen=True, slots=True)
class FabricMap:
    """A checked map. Hosts in the order of the file."""

    name: str
    mtu: int
    hosts: Mapping[str, HostMap]
    switches: tuple[str, ...]
    links: tuple[LinkGroup, ...]

    @property
    def efficiency(self) -> float:
        """Share of the line rate that payload can have at this MTU."""
        return self.mtu / (self.mtu + PACKET_OVERHEAD)

    def find(self, host: str) -> HostMap | None:
        """The host of that name; a short name matches a full one where only one does."""
        if host in self.hosts:
            return self.hosts[host]
        short = [h for name, h in self.hosts.items() if name.split(".")[0] == host.split(".")[0]]
        return short[0] if len(short) == 1 else None


def read_map(path: Path) -> FabricMap:
    """Read a map file. Raises MapError that names the file and the key."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "not UTF-8 text"
        raise MapError(
            f"{path}: {why}", "name a map file: docs/reference/map.md shows one"
        ) from None
    return parse_map(text, str(path))


def parse_map(text: str, name: str = "map") -> FabricMap:
    """Check a map's text; `name` stands in messages. Raises MapError."""
    try:
        document = yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        line = getattr(getattr(error, "problem_mark", None), "line", None)
        at = f"{name}:{line + 1}" if line is not None else name
        why = getattr(error, "problem", None) or str(error)
        raise MapError(
            f"{at}: no YAML: {why}", "correct the line: docs/reference/map.md shows a map"
        ) from None
    return _Checker(name).map(document)


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where YAML keeps the last in silence."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is there twice", key.start_mark
                )
            seen.add(key.value if isinstance(key.value, str) else id(key))
        return super().construct_mapping(node, deep)


class _Checker:
    """Builds the map; every message starts with the path of keys to the place."""

    def __init__(self, name: str) -> None:
        self.name = name

    def fail(self, place: str, problem: str, fix: str) -> MapError:
        return MapError(
            f"{self.name}: {place}: {problem}" if place else f"{self.name}: {problem}", fix
        )

    def map(self, raw: Any) -> FabricMap:
        keys = ("version", "name", "mtu", "hosts", "switches", "links")
        top = self.keys(raw, "", keys, need=("version", "hosts", "switches"))
        if top["version"] != 1 or top["version"] is True:
            raise self.fail("version", f"{top['version']!r} is not 1", "write version: 1")
        mtu = top.get("mtu", DEFAULT_MTU)
        if not isinstance(mtu, int) or isinstance(mtu, bool) or not 256 <= mtu <= 65535:
            raise self.fail("mtu", f"{mtu!r} is not a number of bytes", "write 256 to 65535")
        switches = self.switches(top["switches"])
        if not isinstance(top["hosts"], dict) or not top["hosts"]:
            raise self.fail("hosts", "is no table of hosts", "write hosts: {node-a: {nics: ...}}")
        hosts = {str(n): self.host(str(n), host, switches) for n, host in top["hosts"].items()}
        links = self.links(top.get("links", []), switches)
        return FabricMap(str(top.get("name", "")), mtu, hosts, switches, links)

    def keys(
        self, raw: Any, place: str, known: tuple[str, ...], need: Iterable[str]
    ) -> dict[str, Any]:
        if not isinstance(raw, dict):
            what = "is no table" if place else "the map is no table"
            raise self.fail(place, what, f"write keys out of: {', '.join(known)}")
        for key in raw:
            if key not in known:
                raise self.fail(place, f"unknown key {key!r}", self.nearest(str(key), known))
        for key in need:
            if key not in raw:
                raise self.fail(
                    place, f"has no {key!r}", f"add {key}: docs/reference/map.md shows it"
                )
        return raw

    @staticmethod
    def nearest(word: str, known: Iterable[str]) -> str:
        known = tuple(known)
        close = difflib.get_close_matches(word, known, 1, 0.5)
        return f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"

    def switches(self, raw: Any) -> tuple[str, ...]:
        if not isinstance(raw, list) or not raw:
            raise self.fail("switches", "is no list of names", "write switches: [leaf0, leaf1]")
        names = tuple(str(name) for name in raw)
        if twice := next((n for n in names if names.count(n) > 1), None):
            raise self.fail("switches", f"{twice!r} is there twice", "give each switch one name")
        return names

    def host(self, name: str, raw: Any, switches: tuple[str, ...]) -> HostMap:
        place = f"hosts.{name}"
        host = self.keys(raw, place, ("gpus", "nics"), need=("nics",))
        if not isinstance(host["nics"], dict) or not host["nics"]:
            raise self.fail(
                f"{place}.nics", "is no table of cards", "write nic0: {speed: 100G, ...}"
            )
        cards = tuple(
            self.card(name, str(card), raw_card, number, switches)
            for number, (card, raw_card) in enumerate(host["nics"].items())
        )
        gpus = host.get("gpus", [])
        if not isinstance(gpus, list):
            raise self.fail(f"{place}.gpus", "is no list", "write the nearest card of each GPU")
        names = tuple(card.name for card in cards)
        for number, gpu in enumerate(gpus):
            if str(gpu) not in names:
                raise self.fail(
                    f"{place}.gpus[{number}]",
                    f"{gpu!r} is no card of this host",
                    self.nearest(str(gpu), names),
                )
        return HostMap(name, cards, tuple(str(gpu) for gpu in gpus))

    def card(self, host: str, name: str, raw: Any, number: int, switches: tuple[str, ...]) -> Card:
        place = f"hosts.{host}.nics.{name}"
        card = self.keys(raw, place, ("speed", "switch", "rail"), need=("speed", "switch"))
        rail = card.get("rail", number)
        if not isinstance(rail, int) or isinstance(rail, bool) or rail < 0:
            raise self.fail(f"{place}.rail", f"{rail!r} is not a number", "write 0 or more")
        return Card(
            host,
            name,
            self.speed(card["speed"], f"{place}.speed"),
            self.switch(card["switch"], f"{place}.switch", switches),
            rail,
        )

    def switch(self, raw: Any, place: str, switches: tuple[str, ...]) -> str:
        if str(raw) not in switches:
            fix = self.nearest(str(raw), switches)
            raise self.fail(place, f"{raw!r} is not in switches", fix)
        return str(raw)

    def speed(self, raw: Any, place: str) -> float:
        found = _SPEED.match(raw.strip()) if isinstance(raw, str) else None
        value = float(found[1]) * _FACTOR[found[2].upper()] / 8 if found else 0.0
        if not 0 < value < 1e15:
            raise self.fail(
                place, f"{raw!r} is not a speed", "write 10G, 100G, 400G (bits per second)"
            )
        return value

    def links(self, raw: Any, switches: tuple[str, ...]) -> tuple[LinkGroup, ...]:
        if not isinstance(raw, list):
            raise self.fail("links", "is no list", "write links: [{between: [a, b], speed: 400G}]")
        groups = []
        for number, item in enumerate(raw):
            place = f"links[{number}]"
            link = self.keys(item, place, ("between", "speed", "count"), need=("between", "speed"))
            ends = link["between"]
            if not isinstance(ends, list) or len(ends) != 2 or ends[0] == ends[1]:
                raise self.fail(
                    f"{place}.between", f"{ends!r} is not two switches", "write [leaf0, leaf1]"
                )
            one, other = (self.switch(end, f"{place}.between", switches) for end in ends)
            count = link.get("count", 1)
            if not isinstance(count, int) or isinstance(count, bool) or not 0 < count < 10_000:
                raise self.fail(f"{place}.count", f"{count!r} is not a number", "write 1 or more")
            speed = self.speed(link["speed"], f"{place}.speed")
            groups.append(LinkGroup((one, other), speed, count))
        return tuple(groups)
