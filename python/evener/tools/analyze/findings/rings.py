"""Rings: how many different ones, how often they leave a host, what the log calls them."""

from __future__ import annotations

from collections.abc import Iterator

from evener.tools.analyze.findings.base import Finding, check
from evener.tools.analyze.picture import Picture
from evener.tools.analyze.words import count, names


@check({"rings.repeated": "channels that repeat one another's rings"})
def distinct(picture: Picture) -> Iterator[Finding]:
    """Channels that repeat one another's rings: fewer ways through the fabric than channels."""
    world = picture.world
    if world is None or len(world.rings) < 2 or len(world.hosts()) < 2:
        return
    orders = world.distinct_rings()
    if len(orders) == len(world.rings):
        return
    uses = sorted({len(channels) for _, channels in orders})
    if picture.spread or not picture.pairs:
        return  # each connection is many flows already
    times = f"each {uses[0]} times" if len(uses) == 1 else f"{uses[0]} to {uses[-1]} times each"
    networks = {edge.network for edge in world.edges.values() if edge.network}
    if networks == {"Socket"}:
        do = "Give the hash more to work with: several sockets per connection."
        command = "export NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4"
    elif all(network.startswith("IB") for network in networks):
        do = "Give the hash more to work with: several queue pairs per connection."
        command = "export NCCL_IB_QPS_PER_CONNECTION=4 NCCL_IB_SPLIT_DATA_ON_QPS=1"
    else:  # EFA and Slingshot spread packets themselves
        do, command = "Nothing, where the network spreads packets by itself.", ""
    yield Finding(
        "rings.repeated",
        "note",
        f"{len(world.rings)} channels are {count(len(orders), 'distinct ring')}, used {times}",
        f"All traffic between hosts goes over {count(len(picture.pairs), 'directed pair')} of "
        "GPUs. A switch that spreads flows by a hash sees few different addresses.",
        "measured",
        tuple(world.rings[channels[0]].where for _, channels in orders[:4]),
        do,
        command,
        "More, smaller flows, which a hash spreads more evenly." if command else "",
    )


@check({"rings.leaves-often": "a ring that leaves a host more than once"})
def leaves_host_often(picture: Picture) -> Iterator[Finding]:
    """A ring that leaves a host more than once loads the network more than once."""
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


@check({"network.cards-idle": "cards that NCCL found and no connection uses"})
def short_of_ranks(picture: Picture) -> Iterator[Finding]:
    """Few channels leave through few cards.

    Only where the log has every edge: a cut log shows idle cards that are in use. A card of the
    other kind (InfiniBand beside RoCE) is mostly for storage, and fewer GPUs than cards cannot use
    all of them.
    """
    world = picture.world
    if world is None or len(world.hosts()) < 2 or not world.size:
        return
    seen = {edge.channel for edge in world.edges.values()}
    if len(world.members) < world.size or not seen or len(seen) < world.channels:
        return
    found: list[tuple[str, list[str], int, int, int]] = []
    for host in world.hosts():
        known = picture.run.hosts.get(host)
        if known is None or not known.used:
            continue
        network = known.used.most_common(1)[0][0][0]
        used = {index for name, index in known.used if name == network}
        kinds = {known.cards[network, i].link for i in used if (network, i) in known.cards}
        have = {
            index
            for (name, index), card in known.cards.items()
            if name == network and (not kinds or card.link in kinds)
        }
        gpus = sum(member.host == host for member in world.members.values())
        idle = sorted(have - used)
        if idle and len(have) > 1 and gpus > len(used):
            texts = [known.cards[network, index].name for index in idle]
            where = known.card_lines[network, idle[0]]
            found.append((host, texts, len(have), len(used), where))
    if not found:
        return
    _, texts, have_count, used_count, _ = found[0]
    crossing = "" if "NCCL_CROSS_NIC" in picture.run.settings else " NCCL_CROSS_NIC=1"
    yield Finding(
        "network.cards-idle",
        "warning",
        f"{names([host for host, *_ in found])}: {count(len(texts), 'card')} of {have_count} not "
        f"used: {', '.join(texts)}",
        "NCCL found them and no connection uses them.",
        "measured",
        tuple(where for *_, where in found[:4]),
        "Use all cards near GPUs that take part; more channels than cards are needed.",
        f"export NCCL_MIN_NCHANNELS={max(have_count, world.channels)}{crossing}",
        f"Up to {have_count / max(used_count, 1):.2g} times the bandwidth between hosts.",
    )
