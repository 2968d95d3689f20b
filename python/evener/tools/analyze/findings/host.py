"""Inside a host: how far its cards are from its GPUs (nvidia-smi topo -m, NCCL's topology file)."""

from __future__ import annotations

from collections.abc import Iterator

from evener.tools.analyze.findings.base import Finding, check
from evener.tools.analyze.picture import Picture
from evener.tools.analyze.words import count

_NEAR = ("PIX", "PXB", "PHB", "NODE")
# NODE is another PCIe host bridge of the same CPU: its interconnect is not crossed.
_FAR = ("SYS",)


@check({"host.far-card": "GPUs with no card on their CPU"})
def far_cards(picture: Picture) -> Iterator[Finding]:
    """GPUs whose nearest card is across the CPU interconnect."""
    for matrix, where in picture.run.matrices:
        distances = {
            gpu: [matrix.cells.get((gpu, card), "") for card in matrix.cards()]
            for gpu in matrix.gpus()
        }
        yield from _far(distances, where, "nvidia-smi topo -m")
    for topology, where in picture.run.topologies:
        distances = {
            f"GPU{gpu}": [topology.distance[gpu, net.device] for net in topology.nets]
            for gpu, _ in topology.gpus
        }
        yield from _far(distances, where, "NCCL's topology file")


def _far(distances: dict[str, list[str]], where: int, source: str) -> Iterator[Finding]:
    far = [
        gpu
        for gpu, row in distances.items()
        if any(cell in _FAR for cell in row) and not any(cell in _NEAR for cell in row)
    ]
    if not far:
        return
    yield Finding(
        "host.far-card",
        "warning",
        f"{count(len(far), 'GPU')} without a card on the same CPU: {', '.join(far)}",
        f"{source} shows only SYS between them and every card: each byte crosses the "
        "interconnect of the CPUs, and GPUDirect RDMA is off at that distance.",
        "measured",
        (where,),
        "Move a card next to them, or leave these GPUs' network traffic to near ones (PXN).",
        "export NCCL_PXN_DISABLE=0 NCCL_P2P_PXN_LEVEL=2",
        "NET lines of these ranks name a near card and a proxy rank.",
    )


@check({"host.pcie-narrow": "a PCIe link with fewer lanes, or slower, than it should be"})
def narrow_links(picture: Picture) -> Iterator[Finding]:
    """GPUs and cards whose PCIe link is narrower than that of their equals, or than their line."""
    for topology, where in picture.run.topologies:
        found: list[str] = []
        best: dict[str, tuple[int, float]] = {}
        for link in topology.links:
            lanes, rate = best.get(link.model, (0, 0.0))
            best[link.model] = max(lanes, link.lanes), max(rate, link.rate)
        for link in topology.links:
            lanes, rate = best[link.model]
            what = f"{link.name} ({link.bus}): {count(link.lanes, 'lane')} at {link.rate:g} GT/s"
            if link.lanes < lanes or link.rate < rate:
                found.append(f"{what}, others of its kind have {lanes} at {rate:g}")
            elif link.gpu and link.lanes < 16:
                found.append(f"{what} of 16 lanes")
            elif link.line and link.bytes_per_second < link.line * 1e6 / 8:
                found.append(
                    f"{what} carry {link.bytes_per_second / 1e9:.3g} GB/s, less than its line of "
                    f"{link.line / 8e3:.3g}"
                )
        if not found:
            continue
        yield Finding(
            "host.pcie-narrow",
            "warning",
            f"{count(len(found), 'PCIe link')} below its width or speed",
            "; ".join(found[:6]) + ". A card in a narrow slot, a riser, or a link that fell back "
            "after errors. Idle GPUs may show a lower speed than they have under load.",
            "measured",
            (where,),
            "Compare what the link can do with what it does, under load; reseat the device.",
            "lspci -vvv -s BUSID | grep -E 'LnkCap|LnkSta'",
            "LnkSta equals LnkCap.",
        )
