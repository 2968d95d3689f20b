"""Inside a host: how far its cards are from its GPUs (nvidia-smi topo -m, NCCL's topology file)."""

from __future__ import annotations

from collections.abc import Iterator

from evener.analyze.findings.base import Finding, check
from evener.analyze.picture import Picture
from evener.analyze.words import count

_NEAR = ("PIX", "PXB", "PHB")
_FAR = ("SYS", "NODE")


@check
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
        f"{source} shows only SYS or NODE between them and every card: each byte crosses the "
        "interconnect of the CPUs, and GPUDirect RDMA is off at that distance.",
        "measured",
        (where,),
        "Move a card next to them, or leave these GPUs' network traffic to near ones (PXN).",
        "export NCCL_PXN_DISABLE=0 NCCL_P2P_PXN_LEVEL=2",
        "NET lines of these ranks name a near card and a proxy rank.",
    )
