"""The network that NCCL chose: which plug-in, GPUDirect, interface, sockets a connection."""

from __future__ import annotations

from collections.abc import Iterator

from evener.analyze.findings.base import Finding, check
from evener.analyze.model import Host
from evener.analyze.picture import Picture
from evener.analyze.words import count, ranges

_LOCAL = ("docker", "virbr", "br-", "veth", "cni", "flannel", "cali", "lo", "tun", "tailscale")


def _hosts(picture: Picture) -> list[Host]:
    return list(picture.run.hosts.values())


def _between_hosts(picture: Picture) -> bool:
    return bool(picture.pairs) or any(host.used for host in _hosts(picture))


@check
def sockets(picture: Picture) -> Iterator[Finding]:
    """NCCL's socket transport between hosts, and how many streams it opens."""
    for host in _hosts(picture):
        nets = {network for network, _ in host.used} or set(host.networks)
        if "Socket" not in nets or not _between_hosts(picture):
            continue
        threads, per_thread, where = host.sockets or (1, 1, host.network_where)
        where = where or host.indirect_where
        streams = threads * per_thread
        if streams > 1:
            return
        yield Finding(
            "network.one-stream",
            "problem",
            "one TCP stream a connection",
            f"{host.name} and others use NCCL's sockets with {count(threads, 'thread')} and "
            f"{count(per_thread, 'socket')} a thread. One stream is capped by one core, by clouds "
            "(5 to 25 Gb/s a flow), and a hash puts it on one path.",
            "measured" if host.sockets else "inferred",
            (where,) if where else (),
            "Use Evener's transport, or at least several sockets (NCCL_SOCKET_NTHREADS=4 "
            "NCCL_NSOCKS_PERTHREAD=4).",
            "evener launch -np N COMMAND",
            "All equal-cost paths in use.",
        )
        return


@check
def mixed(picture: Picture) -> Iterator[Finding]:
    """Hosts that chose different networks."""
    chosen = {h.name: sorted(h.networks) for h in _hosts(picture) if h.networks}
    if len({tuple(nets) for nets in chosen.values()}) > 1:
        yield Finding(
            "network.mixed",
            "problem",
            "hosts chose different networks",
            "; ".join(f"{host}: {', '.join(nets)}" for host, nets in list(chosen.items())[:6]),
            "measured",
            tuple(h.network_where for h in _hosts(picture) if h.networks)[:4],
            "Install the same drivers and plug-in everywhere; name the network so that a host "
            "without it stops.",
            "export NCCL_NET=" + max((n for nets in chosen.values() for n in nets), default="IB"),
            "The same network on every host, or an error at start.",
        )


@check
def gpu_direct(picture: Picture) -> Iterator[Finding]:
    """RDMA cards that do not reach GPU memory."""
    for host in _hosts(picture):
        rdma = [net for net in {n for n, _ in host.used} if net not in ("Socket", "Evener")]
        if not rdma or not host.direct[False]:
            continue
        total = host.direct[False] + host.direct[True]
        off = [d for d, _ in host.gdr.values() if not d.enabled and d.network in rdma]
        why = f" NCCL says it is off for {', '.join(d.name for d in off)}." if off else ""
        if host.far:
            far = next(iter(host.far.values()))[0]
            why += f" One pair is too far apart: distance {far.distance} above {far.limit}."
        yield Finding(
            "network.gpudirect-off",
            "warning",
            f"{host.name}: {host.direct[False]} of {total} connection ends without GPUDirect RDMA",
            "Bytes then go through host memory twice." + why,
            "measured",
            (host.indirect_where,),
            "Load the peer memory module; allow the distance where card and GPU share a CPU.",
            "modprobe nvidia-peermem; export NCCL_NET_GDR_LEVEL=PHB",
            "`/GDRDMA` in every NET line.",
        )
        return


@check
def interface(picture: Picture) -> Iterator[Finding]:
    """Bootstrap or data over an interface that is none of the cluster's."""
    for host in _hosts(picture):
        socket_cards = [(c, key) for key, c in host.cards.items() if key[0] == "Socket"]
        wrong = [(c, k) for c, k in socket_cards if c.name.startswith(_LOCAL)]
        if wrong and ("Socket" in host.networks or "Socket" in {n for n, _ in host.used}):
            names = ", ".join(card.name for card, _ in wrong)
            good = ",".join(c.name for c, _ in socket_cards if not c.name.startswith(_LOCAL))
            yield Finding(
                "network.wrong-interface",
                "problem",
                f"{host.name}: NCCL uses {names}",
                "Such an interface is of a container or a virtual network: slow, or not reachable "
                "from other hosts.",
                "measured",
                (host.card_lines[wrong[0][1]],),
                "Name the interface of the cluster's network.",
                f"export NCCL_SOCKET_IFNAME={good or 'IFACE'}",
                "Only that interface in `NET/Socket : Using`.",
            )
            return


@check
def slow_local(picture: Picture) -> Iterator[Finding]:
    """Ranks of one host that talk through host memory."""
    world = picture.world
    if world is None or not world.transports["SHM"]:
        return
    total = sum(n for name, n in world.transports.items() if name != "NET")
    yield Finding(
        "network.shm",
        "warning",
        f"{world.transports['SHM']} of {total} hops inside hosts go through host memory",
        "Peer-to-peer access between the GPUs is off or not there (VFIO, ACS, IOMMU, or "
        "NCCL_P2P_DISABLE).",
        "measured",
        (world.where,),
        "Check the access, turn ACS off on bare metal.",
        "nvidia-smi topo -p2p r",
        "`via P2P` in place of `via SHM`.",
    )


@check
def proxies(picture: Picture) -> Iterator[Finding]:
    """PXN: another GPU's card sends."""
    through = [host for host in _hosts(picture) if host.proxied]
    if through:
        yield Finding(
            "network.pxn",
            "note",
            f"PXN: {sum(h.proxied for h in through)} connections go through another GPU's card",
            "NCCL hands data over NVLink to the GPU whose card is on the rail of the destination. "
            "It keeps traffic on one rail at the price of a hop inside the host.",
            "measured",
            tuple(host.proxied_where for host in through[:3]),
            "",
            "export NCCL_PXN_DISABLE=1    # to compare",
        )


@check
def counts(picture: Picture) -> Iterator[Finding]:
    """Nodes as NCCL counted them against hosts in the log."""
    world = picture.world
    if world is None or not world.nodes or not world.size:
        return
    if len(world.members) == world.size and world.nodes != len(world.hosts()):
        yield Finding(
            "network.node-count",
            "warning",
            f"NCCL counts {count(world.nodes, 'node')}, the log has "
            f"{count(len(world.hosts()), 'host')}",
            f"Hosts of ranks {ranges(world.members)}: {', '.join(world.hosts())}. NCCL_HOSTID or "
            "equal host names make it so; ranks that NCCL believes on one node use shared memory.",
            "measured",
            (world.where,),
            "Unset NCCL_HOSTID, or give each host a name of its own.",
            "unset NCCL_HOSTID; hostname",
        )
