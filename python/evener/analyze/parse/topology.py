"""NCCL's own XML: what it found in a host (NCCL_TOPO_DUMP_FILE) and what it built (GRAPH).

    system > cpu > pci > ... > gpu | nic > net(name, dev, speed, port, guid, gdr; rail, plane: 2.30)
    graphs > graph(id, pattern, nchannels, ...) > channel > net(dev) | gpu(dev, rank)
The distance of a GPU and a card is that of their lowest common element, in nvidia-smi's words:
PIX (one switch), PXB (several switches), PHB (the same CPU), SYS (across CPUs).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree.ElementTree import Element, ParseError, fromstring

DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")


@dataclass(frozen=True, slots=True)
class Net:
    """A card. `speed` is in Mb/s; `rail` None where the file does not say."""

    name: str
    device: int
    speed: int
    port: int
    direct: bool
    rail: int | None


@dataclass(frozen=True, slots=True)
class Topology:
    """One host: cards by device number, GPUs as (device, rank or -1), and their distances."""

    nets: tuple[Net, ...]
    gpus: tuple[tuple[int, int], ...]
    distance: dict[tuple[int, int], str]
    """(GPU device, card device) to one of DISTANCES."""


@dataclass(frozen=True, slots=True)
class GraphChannel:
    """One channel on one host: the card in, GPU ranks or devices in order, the card out."""

    graph: int
    pattern: int
    channel: int
    nets: tuple[int, ...]
    gpus: tuple[int, ...]


def topology(text: bytes) -> Topology | list[GraphChannel] | None:
    """What an XML file holds; None where it is neither of the two, or no XML."""
    if b"<!ENTITY" in text:  # expat expands entities: a small file could fill memory
        return None
    try:
        root = fromstring(text)
    except (ParseError, ValueError, LookupError):
        return None
    if root.tag == "system":
        return _system(root)
    if root.tag == "graphs":
        return list(_graphs(root))
    return None


def _system(root: Element) -> Topology:
    nets: list[Net] = []
    gpus: list[tuple[int, int]] = []
    paths: dict[tuple[str, int], tuple[Element, ...]] = {}

    stack: list[tuple[Element, tuple[Element, ...]]] = [(root, ())]
    while stack:
        element, above = stack.pop()
        if element.tag == "net":
            device = _int(element, "dev", len(nets))
            nets.append(
                Net(
                    element.get("name", ""),
                    device,
                    _int(element, "speed", 0),
                    _int(element, "port", 0),
                    element.get("gdr") == "1",
                    _int(element, "rail", -1) if element.get("rail", "-1") != "-1" else None,
                )
            )
            paths["net", device] = above
        elif element.tag == "gpu":
            device = _int(element, "dev", len(gpus))
            gpus.append((device, _int(element, "rank", -1)))
            paths["gpu", device] = above
        stack.extend((child, (*above, element)) for child in element)
    distance = {
        (gpu, net.device): _distance(paths["gpu", gpu], paths["net", net.device])
        for gpu, _ in gpus
        for net in nets
    }
    return Topology(tuple(sorted(nets, key=lambda n: n.device)), tuple(sorted(gpus)), distance)


def _distance(one: tuple[Element, ...], other: tuple[Element, ...]) -> str:
    common = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine is not theirs:
            break
        common += 1
    joint = one[common - 1].tag if common else ""
    if joint == "pci":
        # Bridges between the joint one and either end, the end's own function not counted.
        return "PIX" if max(len(one), len(other)) - common <= 2 else "PXB"
    return "PHB" if joint == "cpu" else "SYS"


def _graphs(root: Element) -> Iterator[GraphChannel]:
    for graph in root.iter("graph"):
        for number, channel in enumerate(graph.iter("channel")):
            yield GraphChannel(
                _int(graph, "id", 0),
                _int(graph, "pattern", 0),
                number,
                tuple(_int(net, "dev", -1) for net in channel.iter("net")),
                tuple(_int(gpu, "rank", _int(gpu, "dev", -1)) for gpu in channel.iter("gpu")),
            )


def _int(element: Element, name: str, default: int) -> int:
    try:
        return int(float(element.get(name, default)))
    except (ValueError, OverflowError):
        return default
