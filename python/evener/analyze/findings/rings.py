"""Rings: how many different ones, how often they leave a host, what the log calls them."""

from __future__ import annotations

from collections.abc import Iterator

from evener.analyze.findings.base import Finding, check
from evener.analyze.picture import Picture
from evener.analyze.words import count


@check
def distinct(picture: Picture) -> Iterator[Finding]:
    """Channels that repeat one another's rings: fewer ways through the fabric than channels."""
    world = picture.world
    if world is None or len(world.rings) < 2 or len(world.hosts()) < 2:
        return
    orders = world.distinct_rings()
    if len(orders) == len(world.rings):
        return
    uses = sorted({len(channels) for _, channels in orders})
    if picture.spread:
        return  # each connection is many flows already
    times = f"each {uses[0]} times" if len(uses) == 1 else f"{uses[0]} to {uses[-1]} times each"
    sockets = {edge.network for edge in world.edges.values() if edge.network} == {"Socket"}
    streams, command = (
        ("sockets", "export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4")
        if sockets
        else (
            "queue pairs",
            "export NCCL_IB_QPS_PER_CONNECTION=4 NCCL_IB_SPLIT_DATA_ON_QPS=1",
        )
    )
    yield Finding(
        "rings.repeated",
        "note",
        f"{len(world.rings)} channels are {count(len(orders), 'distinct ring')}, used {times}",
        f"All traffic between hosts goes over {count(len(picture.pairs), 'directed pair')} of "
        "GPUs. A switch that spreads flows by a hash sees few different addresses.",
        "measured",
        tuple(world.rings[channels[0]].where for _, channels in orders[:4]),
        f"Give the hash more to work with: several {streams} a connection.",
        command,
        "More, smaller flows, which a hash spreads more evenly.",
    )


@check
def leaves_host_often(picture: Picture) -> Iterator[Finding]:
    """A ring that leaves a host more than once pays the network more than once."""
    world = picture.world
    if world is None:
        return
    for channel, ring in sorted(world.rings.items()):
        if not ring.whole:
            continue
        out: dict[str, int] = {}
        for source, destination in ring.hops():
            if world.apart(source, destination):
                host = world.members[source].host
                out[host] = out.get(host, 0) + 1
        worst = max(out, key=lambda host: out[host], default=None)
        if worst is not None and out[worst] > 1:
            yield Finding(
                "rings.leaves-often",
                "problem",
                f"channel {channel}: the ring leaves {worst} {out[worst]} times",
                "Once is enough. Each further time the same bytes cross the network again. It "
                "happens where ranks are not numbered host by host, or NCCL_HOSTID lies.",
                "measured",
                (ring.where,),
                "Number ranks host by host.",
                "evener place --map map.yaml -np N",
                f"Up to {out[worst]} times the bandwidth between hosts.",
            )
            return


@check
def short_of_ranks(picture: Picture) -> Iterator[Finding]:
    """Few channels leave through few cards."""
    world = picture.world
    if world is None or len(world.hosts()) < 2:
        return
    for host in world.hosts():
        known = picture.run.hosts.get(host)
        if known is None or not known.used:
            continue
        network = known.used.most_common(1)[0][0][0]
        have = {index for name, index in known.cards if name == network}
        used = {index for name, index in known.used if name == network}
        idle = sorted(have - used)
        if idle and len(have) > 1:
            names = ", ".join(known.cards[network, index].name for index in idle)
            yield Finding(
                "network.cards-idle",
                "warning",
                f"{host}: {count(len(idle), 'card')} of {len(have)} not used: {names}",
                f"NCCL found them ({network}) and no connection uses them.",
                "measured",
                (known.card_lines[network, idle[0]],),
                "Use all cards near GPUs that take part; more channels than cards are needed.",
                f"export NCCL_MIN_NCHANNELS={max(len(have), world.channels)} NCCL_CROSS_NIC=1",
                f"Up to {len(have) / max(len(used), 1):.2g} times the bandwidth between hosts.",
            )
            return
