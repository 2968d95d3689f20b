"""Between switches: rails, crossings, one link that carries everything, and the better cabling."""

from __future__ import annotations

from collections.abc import Iterator

from evener.tools.analyze.findings.base import Finding, check
from evener.tools.analyze.picture import Picture
from evener.tools.analyze.words import count, gigabytes

ONE_LINK = (0.80, 1.05)
"""The peak as a share of k links' payload rate that makes it `about k links`."""
GAIN = 1.10
"""A rewiring is proposed where it allows this much more."""


@check(
    {
        "rails.crossed": "the two ends of a pair use different cards",
        "rails.unknown": "nothing says which cards pairs use; never concluded from rank numbers",
    }
)
def rails(picture: Picture) -> Iterator[Finding]:
    """Whether pairs stay on their rail; unknown is said, never guessed."""
    if not picture.pairs:
        return
    status, confidence, why = picture.rails()
    first = tuple(pair.where for pair in picture.pairs[:2])
    if status == "unknown" and picture.spread:
        return
    if status == "unknown":
        yield Finding(
            "rails.unknown",
            "note",
            "rail match unknown",
            why[0].upper() + why[1:] + ". A rank's number says nothing about its card.",
            "unknown",
            first,
            "Log the network lines of every rank, or describe the cabling in a map.",
            "export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET",
            "Rails are `aligned` or `crossed`.",
        )
    elif status == "crossed":
        crossed = [route for route in picture.routes if route.rail == "crossed"]
        shown = ", ".join(
            f"{r.pair.source}>{r.pair.destination} ({r.source.name} to {r.destination.name})"
            for r in crossed[:4]
        )
        inside = picture.traffic is not None and not any(r.crosses for r in picture.routes)
        yield Finding(
            "rails.crossed",
            "note" if inside or confidence != "measured" else "warning",
            f"{count(len(crossed), 'route')} of {len(picture.routes)} change their rail",
            f"{shown}. {why[0].upper() + why[1:]}."
            + (" They stay under one switch all the same." if inside else ""),
            confidence,
            tuple(route.where for route in crossed[:3]),
            "Keep each channel on one card, where cards of a rail share a switch.",
            ""
            if "0" in picture.run.settings.get("NCCL_CROSS_NIC", {})
            else "export NCCL_CROSS_NIC=0",
            "Equal cards at both ends of every pair.",
        )


@check({"fabric.not-in-map": "hosts or cards of the log that the map lacks"})
def not_in_map(picture: Picture) -> Iterator[Finding]:
    """Hosts or cards of the log that the map does not have."""
    fabric, world = picture.fabric, picture.world
    if fabric is None or world is None:
        return
    hosts = [host for host in world.hosts() if fabric.find(host) is None]
    cards = sorted(
        {
            f"{end.host}/{end.name}"
            for route in picture.routes
            for end in (route.source, route.destination)
            if end.card is None and end.host not in hosts and end.name
        }
    )
    if hosts or cards:
        yield Finding(
            "fabric.not-in-map",
            "warning",
            "the map lacks " + ", ".join([*hosts[:4], *cards[:4]]),
            "Their traffic is not in any load below.",
            "measured",
            (world.where,),
            "Add them to the map under the names that the log uses.",
        )


@check({"fabric.crossings": "pairs of neighbours on different switches"})
def crossings(picture: Picture) -> Iterator[Finding]:
    """Pairs whose two cards are on different switches."""
    what, all_pairs, routes, traffic = picture.judged()
    if traffic is None:
        return
    placed = [route for route in routes if route.crosses is not None]
    crossing = [route for route in placed if route.crosses]
    pairs = {(r.pair.source, r.pair.destination) for r in crossing}
    if not crossing:
        return
    confidence = "measured" if all(r.source.known == "measured" for r in crossing) else "inferred"
    loads = "; ".join(
        f"{use.name}: {use.weight:.2g} times the bus bandwidth over {count(use.count, 'link')}"
        for use in traffic.today.links.values()
        if use.weight
    )
    yield Finding(
        "fabric.crossings",
        "warning",
        f"{len(pairs)} of {len(all_pairs)} pairs cross between switches",
        f"{traffic.today.crossing_share:.0%} of the traffic between hosts along the {what} leaves "
        f"its switch ({loads}).",
        confidence,  # type: ignore[arg-type]
        tuple(route.where for route in crossing[:3]),
        "Place ranks, or wire cards, so that neighbours share a switch.",
        "evener place --map map.yaml -np " + str(picture.world.size if picture.world else 0),
    )


@check({"fabric.one-link": "the peak is the rate of one or few inter-switch links out of many"})
def one_link(picture: Picture) -> Iterator[Finding]:
    """A peak that is a few links' rate where many lie side by side."""
    traffic, found = picture.judged()[3], picture.bandwidth
    if traffic is None or found is None or picture.fabric is None:
        return
    efficiency = picture.fabric.efficiency
    for use in traffic.today.links.values():
        peak = found.peak * 1e9 * use.weight
        if use.count < 2 or not use.weight:
            continue
        links = peak / (use.speed * efficiency)
        whole = max(round(links), 1)
        if whole > use.count / 2 or not ONE_LINK[0] <= links / whole <= ONE_LINK[1]:
            continue
        yield Finding(
            "fabric.one-link",
            "problem",
            f"the peak is about {count(whole, 'link')} out of {use.count} ({use.name})",
            f"{found.peak:.4g} GB/s is {peak / (use.speed * whole):.0%} of "
            f"{gigabytes(use.speed * whole)}, the rate of {count(whole, 'link')}; evenly used, "
            f"{use.count} would carry {gigabytes(use.speed * use.count / use.weight)}. Suspected: "
            "hash polarisation (flows of few addresses hash onto one link), or one effective "
            "uplink.",
            "inferred",
            (found.peak_where,),
            "Compare the counters of the links during a run. If one is full and the others idle: "
            "hash on more fields with a seed of its own for each switch, or spread by packet.",
            "export NCCL_IB_QPS_PER_CONNECTION=4 NCCL_IB_SPLIT_DATA_ON_QPS=1"
            if picture.rdma in ("", "IB")
            else "",
            f"Towards {gigabytes(use.speed * use.count * efficiency / use.weight)}, less what "
            "collisions of hashes cost.",
        )
        return


@check({"fabric.rewire": "a cabling by rail that allows more, with the cables to move"})
def rewire(picture: Picture) -> Iterator[Finding]:
    """Cards of one rail on one switch, where that allows more."""
    what, pairs, _, traffic = picture.judged()
    fabric = picture.fabric
    if traffic is None or fabric is None or not traffic.moves:
        return
    today = traffic.today.one_link
    if picture.bandwidth is not None:
        today = min(today, picture.bandwidth.peak * 1e9)
    after = traffic.after.bound
    if traffic.after.crossing >= traffic.today.crossing or after < GAIN * today:
        return
    payload = after * fabric.efficiency / 1e9
    hosts = len({move.host for move in traffic.moves})
    yield Finding(
        "fabric.rewire",
        "problem",
        f"put the cards of one rail on one switch: about {payload:.3g} GB/s",
        f"{count(len(traffic.moves), 'cable')} of {count(hosts, 'host')} move: "
        + ", ".join(f"{m.host}/{m.card} from {m.before} to {m.after}" for m in traffic.moves[:8])
        + f". Then {traffic.after.crossing_share:.0%} instead of "
        f"{traffic.today.crossing_share:.0%} of the traffic between hosts along the {what} leaves "
        "its switch.",
        "inferred",
        tuple(pair.where for pair in pairs[:2]),
        "Wire by rail: card k of every host on the same switch.",
        "evener analyze FILES --map map.yaml --html report.html    # draws both cablings",
        f"About {payload:.3g} GB/s of {after / 1e9:.3g} GB/s line rate, at "
        f"{fabric.mtu} bytes a packet, against {today / 1e9:.3g} GB/s today.",
    )
