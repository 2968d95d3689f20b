"""The network that NCCL chose: which plug-in, GPUDirect, interface, sockets a connection."""

from __future__ import annotations

import re
from collections.abc import Iterator

from evener.tools.analyze.findings.base import CONTEXT, Finding, check
from evener.tools.analyze.model import LOCAL, Host
from evener.tools.analyze.picture import Picture
from evener.tools.analyze.words import count, names, ranges


def _hosts(picture: Picture) -> list[Host]:
    return list(picture.run.hosts.values())


def _named(hosts: list[Host]) -> str:
    return names([host.name or "a host" for host in hosts])


def _between_hosts(picture: Picture) -> bool:
    """Whether something crosses between hosts, as far as the log knows the hosts of its ranks."""
    if picture.pairs:
        return True
    world = picture.world
    known = world is not None and world.size > 0 and len(world.members) == world.size
    if known and world is not None and len(world.hosts()) == 1:
        return False
    return any(host.used for host in _hosts(picture))


_NO_CARD = (
    " NCCL found no RDMA device there: if the host has cards, its container was not given "
    "/dev/infiniband."
)


@check({"network.one-stream": "NCCL's sockets with one TCP stream per connection"})
def sockets(picture: Picture) -> Iterator[Finding]:
    """NCCL's socket transport between hosts, and how many streams it opens."""
    found: list[Host] = []
    for host in _hosts(picture):
        nets = {network for network, _ in host.used} or set(host.networks)
        if "Socket" not in nets or not _between_hosts(picture):
            continue
        threads, per_thread, _ = host.sockets or _asked(picture)
        if threads * per_thread > 1:
            return
        found.append(host)
    if found:
        host = found[0]
        threads, per_thread, where = host.sockets or (1, 1, host.network_where)
        where = where or host.indirect_where
        instead = any(True for _ in (*sockets_despite_card(picture), *plugin_missing(picture)))
        yield Finding(
            "network.one-stream",
            "note" if instead else "problem",
            "one TCP stream per connection",
            f"{_named(found)}: NCCL's sockets with {count(threads, 'thread')} and "
            f"{count(per_thread, 'socket')} per thread. One stream is capped by one core, by "
            "clouds (5 to 25 Gb/s per flow), and a hash puts it on one path."
            + (_NO_CARD if any(network == "IB" for network, _ in host.absent) else ""),
            "measured" if host.sockets else "inferred",
            (where,) if where else (),
            "Use Evener's transport, or at least several sockets (NCCL_SOCKET_NTHREADS=4 "
            "NCCL_NSOCKS_PERTHREAD=4).",
            "evener launch -np N COMMAND",
            "All equal-cost paths in use.",
        )


def _asked(picture: Picture) -> tuple[int, int, int]:
    """Threads and sockets per thread that variables ask for, 1 each where none does."""
    values = []
    for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"):
        given = [v for v in picture.run.settings.get(name, {}) if v.isdigit() and len(v) < 4]
        values.append(max((int(v) for v in given), default=1))
    return values[0], values[1], 0


@check({"network.mixed": "hosts that chose different networks"})
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


def _slow_provider(host: Host) -> bool:
    """Whether libfabric runs over sockets there."""
    return (
        host.provider is not None
        and re.match(r"tcp|sockets|udp", host.provider[0].name) is not None
    )


def _family(network: str) -> str:
    """`ib`, `ofi` or ``: whose advice fits a network."""
    if re.match(r"IB(?:ext|_|$)|IB\b", network):
        return "ib"
    return "ofi" if re.search(r"libfabric|OFI", network, re.IGNORECASE) else ""


_DIRECT = {
    "ib": (
        "Load the peer memory module (NVIDIA: nvidia-peermem; ROCm has its own in the driver), or "
        "use DMA-BUF; allow the distance where card and GPU share a CPU.",
        "modprobe nvidia-peermem; export NCCL_NET_GDR_LEVEL=PHB",
    ),
    "ofi": (
        "See that the provider offers it for this machine (EFA: instances with GPUDirect RDMA; "
        "Slingshot: NCCL_NET_GDR_LEVEL).",
        "export NCCL_NET_GDR_LEVEL=PHB; fi_info -c FI_HMEM",
    ),
}


@check({"network.gpudirect-off": "RDMA cards that do not reach GPU memory"})
def gpu_direct(picture: Picture) -> Iterator[Finding]:
    """RDMA cards that do not reach GPU memory."""
    found: list[Host] = []
    reasons: list[str] = []
    family = ""
    if not _between_hosts(picture) or any(_slow_provider(host) for host in _hosts(picture)):
        return  # without RDMA network.sockets-despite-card says so
    for host in _hosts(picture):
        rdma = sorted({n for n, _ in host.used if _family(n)})
        if not rdma or not host.direct[False]:
            continue
        found.append(host)
        family = family or _family(rdma[0])
        off = [d for d, _ in host.gdr.values() if not d.enabled and d.network in rdma]
        if off:
            reasons.append(f"NCCL says it is off for {', '.join(sorted({d.name for d in off}))}.")
        if host.far:
            far = next(iter(host.far.values()))[0]
            reasons.append(f"One pair is too far apart: distance {far.distance} above {far.limit}.")
    if not found:
        return
    found.sort(key=lambda host: host.indirect_where)
    level = sorted(picture.run.settings.get("NCCL_NET_GDR_LEVEL", {}))
    if level:
        reasons.append(f"NCCL_NET_GDR_LEVEL is set to {', '.join(level)}.")
    without = sum(h.direct[False] for h in found)
    total = without + sum(h.direct[True] for h in found)
    do, command = _DIRECT[family]
    yield Finding(
        "network.gpudirect-off",
        "warning",
        f"{_named(found)}: {without} of {total} connection ends without GPUDirect RDMA",
        "Bytes then go through host memory twice. " + " ".join(dict.fromkeys(reasons)),
        "measured",
        tuple(h.indirect_where for h in found[:4]),
        do,
        command,
        "`/GDRDMA` in every NET line.",
    )


@check({"network.sockets-despite-card": "sockets although a faster card is there, and why"})
def sockets_despite_card(picture: Picture) -> Iterator[Finding]:
    """Sockets, or libfabric over TCP, although a card is there."""
    for host in _hosts(picture):
        if host.provider and _slow_provider(host):
            provider, where = host.provider
            yield Finding(
                "network.sockets-despite-card",
                "problem",
                f"{host.name}: libfabric runs over {provider.name}, not over a card's own provider",
                f"The plug-in found {count(provider.cards, 'card')} and took {provider.name}: the "
                "device files of the cards are missing in the container, or the provider is not "
                "built in.",
                "measured",
                (where,),
                "Give the container the devices (/dev/cxi*, /dev/infiniband/uverbs*), and ask for "
                "the provider by name so that it stops where it is not there.",
                "export FI_PROVIDER=cxi    # or efa",
                "`Selected Provider is cxi` or efa.",
            )
            return
    using = [
        h
        for h in _hosts(picture)
        if "Socket" in ({n for n, _ in h.used} or set(h.networks))
        and not any(_family(n) for n in h.networks)
    ]
    if not using or (not _between_hosts(picture) and _whole(picture)):
        return
    cards, seen = _cards(picture)
    if not cards:
        return
    why, places, do, command = _reason(picture, using)
    yield Finding(
        "network.sockets-despite-card",
        "problem",
        f"{_named(using)}: sockets are used although there is a card ({cards})",
        why,
        "measured" if places else "inferred",
        tuple(dict.fromkeys([*places, seen, *(h.network_where for h in using[:2])])),
        do,
        command,
        "`Using network IB` (or the plug-in's name) on every host.",
    )


@check({"network.plugin-missing": "a network plug-in that is wanted and not found (EFA)"})
def plugin_missing(picture: Picture) -> Iterator[Finding]:
    """EFA is there or asked for, and NCCL finds no plug-in for it."""
    signs = [s for s in picture.run.evidence.signs if s.kind == "efa"]
    hosts = [
        h
        for h in _hosts(picture)
        if "Socket" in h.networks
        and not any(_family(n) for n in h.networks)
        and any(network == "Plugin" for network, _ in h.absent)
    ]
    asked = [
        (value, where)
        for name in ("NCCL_NET", "NCCL_NET_PLUGIN")
        for value, where in picture.run.settings.get(name, {}).items()
        if re.search(r"ofi|aws|libfabric", value, re.IGNORECASE)
    ]
    amazon = len(hosts) > 1 and all(re.match(r"ip-\d+-\d+-\d+-\d+", h.name) for h in hosts)
    if not hosts or not (signs or asked or amazon):
        return
    why = "The job asks for EFA" if signs or asked else "The hosts' names are those of AWS"
    places = [
        where for h in hosts for (network, _), where in h.absent.items() if network == "Plugin"
    ]
    yield Finding(
        "network.plugin-missing",
        "problem" if signs or asked else "warning",
        "EFA is not used: NCCL finds no plug-in for it (aws-ofi-nccl, libnccl-net.so), so "
        "everything "
        "between hosts goes over sockets (Ethernet)",
        f"{why}, and on {_named(hosts)} no libnccl-net.so is on the library path. NCCL then "
        f"takes TCP "
        "sockets without an error: many times slower, and slow enough for time-outs.",
        "measured" if signs or asked else "inferred",
        (*(s.where for s in signs[:1]), *(w for _, w in asked[:1]), *places[:2]),
        "Install aws-ofi-nccl in the image, and put its folder on LD_LIBRARY_PATH of every rank "
        "(srun "
        "and containers may drop the variable).",
        "export LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib:$LD_LIBRARY_PATH; "
        "fi_info -p efa",
        "`Selected provider is efa` and `Using network AWS Libfabric`.",
        root=CONTEXT,
    )


@check({"network.cards-differ": "a card that one host opens and another does not"})
def cards_differ(picture: Picture) -> Iterator[Finding]:
    """A card that cannot be opened on some hosts, and that others use."""
    failed: dict[str, tuple[str, int]] = {}
    for text, warning in picture.run.warnings.items():
        if found := re.search(r"[Uu]nable to open (?:device )?(\w+)", text):
            for host, _ in warning.processes:
                failed[host] = (found[1], warning.where)
    lists = {
        h.name: {c.name for (n, _), c in h.cards.items() if _family(n) == "ib"}
        for h in _hosts(picture)
    }
    lists = {host: cards for host, cards in lists.items() if cards}
    everything = set().union(*lists.values()) if lists else set()
    lacking = {
        host: sorted(everything - cards) for host, cards in lists.items() if everything - cards
    }
    if failed:
        host, (card, where) = next(iter(failed.items()))
        users = [h for h, cards in lists.items() if card in cards]
    elif len({len(cards) for cards in lists.values()}) > 1 and len(lacking) == 1:
        host, cards = next(iter(lacking.items()))
        card, where = ", ".join(cards), next(iter(picture.run.host(host).card_lines.values()), 0)
        users = [h for h in lists if h != host]
    else:
        return
    if not users:
        return
    ignored = "NCCL_IGNORE_NET_MISMATCH" in picture.run.settings
    yield Finding(
        "network.cards-differ",
        "problem",
        f"{host} cannot open {card}, which {names(users)} use{'s' if len(users) == 1 else ''}: "
        f"what is "
        "sent to it there waits for ever",
        f"{host} has {', '.join(sorted(lists.get(host, {'no card'})))}; {users[0]} has "
        f"{', '.join(sorted(lists[users[0]]))}. Channels are put on cards that the other end "
        f"does not "
        "have." + (" NCCL_IGNORE_NET_MISMATCH hides NCCL's own check of it." if ignored else ""),
        "inferred",
        (where, *(w for h in users[:2] for w in list(picture.run.host(h).card_lines.values())[:1])),
        f"Give {host} (its container) every device under /dev/infiniband, or name the cards "
        f"that all "
        "hosts have.",
        f"ibv_devices; ls /dev/infiniband; export "
        f"NCCL_IB_HCA={next(iter(sorted(set.intersection(*lists.values()))), 'mlx5_0')}",
        "The same list after `NET/IB : Using` on every host.",
        root=CONTEXT + 1,
    )


def _whole(picture: Picture) -> bool:
    world = picture.world
    return world is not None and world.size > 0 and len(world.members) == world.size


def _cards(picture: Picture) -> tuple[str, int]:
    """RDMA cards that something in the files names, and where."""
    for host in _hosts(picture):
        found = {
            c.name: where
            for (n, i), c in host.cards.items()
            if _family(n)
            for where in [host.card_lines[n, i]]
        }
        if found:
            return ", ".join(list(found)[:4]), next(iter(found.values()))
    for matrix, where in picture.run.matrices:
        rdma = [c for c in matrix.cards() if re.match(r"mlx|NIC|hfi|bnxt_re|irdma", c)]
        if rdma:
            return ", ".join(matrix.names.get(c, c) for c in rdma[:4]), where
    for topology, where in picture.run.topologies:
        rdma = [
            net.name for net in topology.nets if re.match(r"mlx|hfi|bnxt_re|irdma|rdmap", net.name)
        ]
        if rdma:
            return ", ".join(rdma[:4]), where
    for value, where in picture.run.settings.get("NCCL_IB_HCA", {}).items():
        if value and not value.startswith("^"):
            return f"NCCL_IB_HCA={value}", where
    return "", 0


def _reason(picture: Picture, hosts: list[Host]) -> tuple[str, list[int], str, str]:
    """Why RDMA is not used, where that stands, what to do and with which command."""
    values = picture.run.settings
    for name, bad, do in (
        ("NCCL_IB_DISABLE", ("1",), "unset NCCL_IB_DISABLE"),
        ("NCCL_NET", ("Socket",), "unset NCCL_NET"),
    ):
        for value, where in values.get(name, {}).items():
            if value in bad:
                return (
                    f"{name}={value} asks for it.",
                    [where],
                    "Unset it unless it is needed.",
                    do,
                )
    absent = [(key, where) for h in hosts for key, where in h.absent.items()]
    for (_, text), where in absent:
        if "open lib" in text:
            return (
                f"NCCL cannot load a library: {text}. Without it there is no RDMA.",
                [where],
                "Install rdma-core in the image, or the library of the plug-in.",
                "apt-get install libibverbs1 ibverbs-providers librdmacm1",
            )
    for (network, text), where in absent:
        if network == "IB":
            wanted = sorted(values.get("NCCL_IB_HCA", {}))
            asked = f" NCCL_IB_HCA={wanted[0]} may fit none of the names." if wanted else ""
            return (
                f"NCCL looked for RDMA devices and found none ({text}).{asked} The container may "
                "lack /dev/infiniband, the ports may be down, or the names differ.",
                [where],
                "See that the ports are active, and give the container the devices.",
                "ibv_devinfo | grep -E 'hca_id|state'; ls /dev/infiniband",
            )
    for (network, text), where in absent:
        if network == "Plugin":
            return (
                f"The network's plug-in did not load: {text}.",
                [where],
                "Put the plug-in's folder on LD_LIBRARY_PATH (aws-ofi-nccl on EFA and Slingshot).",
                "export LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:$LD_LIBRARY_PATH",
            )
    return (
        "No line says why. Log the subsystems INIT, NET and ENV from the start.",
        [],
        "Ask for the network by name: then NCCL stops and says what is missing.",
        "export NCCL_NET=IB NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET,ENV",
    )


@check({"network.wrong-interface": "data over docker0 and the like"})
def interface(picture: Picture) -> Iterator[Finding]:
    """Bootstrap or data over an interface that is none of the cluster's."""
    found: list[tuple[Host, list[str], int, str]] = []
    for host in _hosts(picture):
        cards = [(c, key) for key, c in host.cards.items() if key[0] == "Socket"]
        wrong = [(c, k) for c, k in cards if LOCAL.match(c.name)]
        if not wrong or not ("Socket" in host.networks or "Socket" in {n for n, _ in host.used}):
            continue
        if picture.world and _whole(picture) and not _between_hosts(picture):
            continue  # nothing goes over an interface
        good = ",".join(c.name for c, _ in cards if not LOCAL.match(c.name))
        found.append((host, [c.name for c, _ in wrong], host.card_lines[wrong[0][1]], good))
    if not found:
        return
    wrong_names = sorted({name for _, cards, _, _ in found for name in cards})
    yield Finding(
        "network.wrong-interface",
        "problem",
        f"{_named([h for h, *_ in found])}: NCCL uses {', '.join(wrong_names)}",
        "Such an interface is of a container or a virtual network: slow, or not reachable from "
        "other hosts.",
        "measured",
        tuple(where for _, _, where, _ in found[:4]),
        "Name the interface of the cluster's network.",
        f"export NCCL_SOCKET_IFNAME={found[0][3] or 'IFACE'}",
        "Only that interface in `NET/Socket : Using`.",
    )


@check({"network.pxn": "another GPU's card sends"})
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


@check({"network.node-count": "NCCL counts other nodes than the log has"})
def counts(picture: Picture) -> Iterator[Finding]:
    """Nodes as NCCL counted them against hosts in the log."""
    world = picture.world
    if world is None or not world.nodes or not world.size:
        return
    if picture.same_names:
        yield Finding(
            "network.node-count",
            "warning",
            f"several machines have one name: NCCL counts {count(world.nodes, 'node')}, the log "
            f"has {count(len(world.hosts()), 'name')}",
            f"Names of ranks {ranges(world.members)}: {', '.join(world.hosts())}. NCCL tells nodes "
            "apart by their boot id too, the log only by their name: pairs between hosts of one "
            "name are left out here.",
            "measured",
            (world.where,),
            "Give each host a name of its own.",
            "hostname; cat /proc/sys/kernel/random/boot_id    # on each host",
            "As many names as nodes.",
        )
    elif len(world.members) == world.size and world.nodes != len(world.hosts()):
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
