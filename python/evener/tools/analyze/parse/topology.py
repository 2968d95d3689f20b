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
class PciLink:
    """The PCIe link of a GPU or card: its name (`GPU0`, `mlx5_0`), lanes and GT/s per lane."""

    name: str
    bus: str
    model: str
    """Vendor and device number, equal for equal devices."""
    lanes: int
    rate: float
    gpu: bool
    line: float = 0.0
    """A card's line rate over all its ports, Mb/s."""

    @property
    def bytes_per_second(self) -> float:
        """What the link carries one way, after its encoding (8b/10b below 8 GT/s)."""
        return self.rate * 1e9 * self.lanes * (0.8 if self.rate < 8 else 128 / 130) / 8


@dataclass(frozen=True, slots=True)
class Topology:
    """One host: cards by device number, GPUs as (device, rank or -1), and their distances."""

    nets: tuple[Net, ...]
    gpus: tuple[tuple[int, int], ...]
    distance: dict[tuple[int, int], str]
    """(GPU device, card device) to one of DISTANCES."""
    links: tuple[PciLink, ...] = ()


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
    links: list[PciLink] = []

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
        if element.tag == "pci" and (link := _link(element)):
            links.append(link)
        stack.extend((child, (*above, element)) for child in element)
    distance = {
        (gpu, net.device): _distance(paths["gpu", gpu], paths["net", net.device])
        for gpu, _ in gpus
        for net in nets
    }
    return Topology(
        tuple(sorted(nets, key=lambda n: n.device)),
        tuple(sorted(gpus)),
        distance,
        tuple(sorted(links, key=lambda link: (not link.gpu, link.name))),
    )


def _link(pci: Element) -> PciLink | None:
    """The link of a PCI element that holds a GPU or a card, None of a bridge."""
    gpu, nets = pci.find("gpu"), pci.findall("nic/net")
    lanes, rate = _int(pci, "link_width", 0), (pci.get("link_speed") or "").split()
    try:
        speed = float(rate[0]) if rate else 0.0
    except ValueError:
        speed = 0.0
    if lanes <= 0 or not 0 < speed < 1000 or (gpu is None and not nets):
        return None
    return PciLink(
        name=f"GPU{_int(gpu, 'dev', 0)}" if gpu is not None else nets[0].get("name", ""),
        bus=pci.get("busid", ""),
        model=f"{pci.get('vendor', '')}:{pci.get('device', '')}",
        lanes=lanes,
        rate=speed,
        gpu=gpu is not None,
        line=float(sum(max(_int(net, "speed", 0), 0) for net in nets)),
    )


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
