"""Between GPUs of one host: over the network, through host memory, or as it should be."""

from __future__ import annotations

import re
from collections.abc import Iterator

from evener.tools.analyze.findings.base import Finding, check
from evener.tools.analyze.picture import Picture
from evener.tools.analyze.words import count, names


@check({"network.inside-host": "GPUs of one host that talk over the network"})
def inside_host(picture: Picture) -> Iterator[Finding]:
    """NET edges whose two ends are on one host."""
    world = picture.world
    if world is None or picture.same_names:
        return
    inside = [
        edge
        for edge in world.edges.values()
        if edge.source in world.members
        and edge.destination in world.members
        and world.members[edge.source].host == world.members[edge.destination].host
        and world.members[edge.source].host
    ]
    if not inside:
        return
    hosts = sorted({world.members[edge.source].host for edge in inside})
    off = [
        f"{name}={value}"
        for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_HOSTID")
        for value in picture.run.settings.get(name, {})
        if value not in ("0", "")
    ]
    why = f" It is set by {', '.join(off)}." if off else ""
    if world.nodes > len(world.hosts()):
        why += f" NCCL counts {count(world.nodes, 'node')}: it takes these GPUs for two machines."
    yield Finding(
        "network.inside-host",
        "problem",
        f"{names(hosts)}: GPUs of one host talk over the network ({inside[0].network})",
        f"{count(len(inside), 'edge')} with both ends on one host go through a card and back, "
        "where NVLink, PCIe or shared memory is there." + why,
        "measured",
        tuple(edge.where for edge in inside[:3]),
        "Unset what forbids the faster ways; let containers of one host share /dev/shm and see "
        "all GPUs.",
        "unset NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_HOSTID",
        "`via P2P` or `via SHM` between GPUs of one host.",
    )


@check(
    {
        "network.shm": "GPUs of one host that talk through host memory",
        "host.p2p-off": "NCCL says that GPUs of a host do not reach one another, and why",
    }
)
def slow_local(picture: Picture) -> Iterator[Finding]:
    """Ranks of one host that talk through host memory."""
    world = picture.world
    told = [(h, *h.no_peers) for h in picture.run.hosts.values() if h.no_peers]
    if told:
        where = [place for _, _, place in told]
        yield Finding(
            "host.p2p-off",
            "warning",
            f"{names([h.name or 'a host' for h, *_ in told])}: GPUs do not reach one another's "
            "memory",
            f"NCCL says: {told[0][1].rstrip('.')}. " + _peers(picture),
            "measured",
            tuple(where[:4]),
            "On bare metal turn ACS off on the PCIe bridges and set iommu=pt; in a virtual "
            "machine ask for passthrough that keeps peer access.",
            "nvidia-smi topo -p2p r; lspci -vvv | grep ACSCtl; cat /proc/cmdline",
            "OK for every pair, and `via P2P`.",
        )
    if world is None or not world.transports["SHM"] or told:
        return
    total = sum(n for name, n in world.transports.items() if name != "NET")
    yield Finding(
        "network.shm",
        "warning",
        f"{world.transports['SHM']} of {total} hops inside hosts go through host memory",
        "Peer-to-peer access between the GPUs is off or not there. " + _peers(picture),
        "measured",
        (world.where,),
        "Check the access, turn ACS off on bare metal.",
        "nvidia-smi topo -p2p r",
        "`via P2P` instead of `via SHM`.",
    )


def _peers(picture: Picture) -> str:
    """Why GPUs of a host may not reach one another, as far as the files tell."""
    values = picture.run.settings
    if "1" in values.get("NCCL_P2P_DISABLE", {}):
        return "NCCL_P2P_DISABLE=1 forbids it."
    if level := sorted(values.get("NCCL_P2P_LEVEL", {})):
        return f"NCCL_P2P_LEVEL={level[0]} limits how far apart the GPUs may be."
    gpus = {d.name for table in picture.run.tables for d in table.devices.values()}
    if any(re.search(r"RTX (?:40|50)\d\d", name) for name in gpus):
        return "NVIDIA's driver gives GeForce cards of the 40 and 50 series no peer access."
    if any("iommu" in text for text in picture.run.warnings):
        return "The IOMMU is on without pt: peer requests go through the CPU."
    return "Causes: ACS on PCIe bridges, the IOMMU, a virtual machine, or GPUs on two CPUs."
