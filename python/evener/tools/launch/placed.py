"""`--map`: the hosts, the order of ranks, and each host's cards and GPUs, from a map of the fabric.

Cards are given to NCCL a host, not a rank: its ranks of one host must see the same cards, else they
disagree about rings (NVIDIA/nccl#1478). NCCL takes the nearest of the cards that it sees for
each GPU. So what is named are the cards nearest to the GPUs that this job has there, and no other:
none of a management network, none that belongs to GPUs of another job. A rank that is alone on its
host gets the nearest card of its own GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from evener.errors import UsageError
from evener.tools.fabric import read_map
from evener.tools.launch.hosts import Host
from evener.tools.place import Placement, place

# Devices of RDMA by the names that drivers and rdma-core give; all else is a network interface.
_RDMA = re.compile(r"(mlx\d|bnxt_re|irdma|efa|erdma|hfi1|qedr|cxgb4|rxe|siw|roce|rocep|ibp|rdmap)")


def by_map(path: Path, ranks: int | None) -> Placement:
    """Place `ranks` (None: one a GPU of the map). Raises UsageError."""
    fabric = read_map(path)
    return place(fabric, ranks or sum(len(host.gpus) for host in fabric.hosts.values()))


def hosts(placement: Placement) -> list[Host]:
    """Hosts in order, with their slots."""
    return [Host(name, slots) for name, slots in placement.after.hosts]


def environments(
    placement: Placement, given: Mapping[str, str]
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """(variables of each host, notes on what was left as the user set it).

    `given`: what the user set, in the environment or by -x; that is kept. Raises UsageError where
    GPUs must be put in order and the user has chosen some.
    """
    result: dict[str, dict[str, str]] = {}
    kept: set[str] = set()
    visible = placement.visible_devices()
    for host, _ in placement.after.hosts:
        mine = [rank for rank in placement.after.ranks if rank.host == host]
        cards = [card for _, card in sorted({(rank.rail, rank.card) for rank in mine})]
        kinds = {bool(_RDMA.match(card)) for card in cards}
        if len(kinds) > 1:
            raise UsageError(
                f"the map's cards of {host} are RDMA devices and interfaces: {', '.join(cards)}",
                "name all by their device (mlx5_0) or all by their interface (eth0)",
            )
        name = "NCCL_IB_HCA" if kinds == {True} else "NCCL_SOCKET_IFNAME"
        # `=`: exactly these, for mlx5_1 would also mean mlx5_10.
        wanted = {name: "=" + ",".join(cards)}
        if visible[host] != ",".join(str(number) for number in range(len(mine))):
            wanted["CUDA_VISIBLE_DEVICES"] = visible[host]
            if "CUDA_VISIBLE_DEVICES" in given:
                raise UsageError(
                    f"--map orders the GPUs of {host} ({visible[host]}), and "
                    f"CUDA_VISIBLE_DEVICES={given['CUDA_VISIBLE_DEVICES']} is set",
                    "unset it, or leave --map out",
                )
        kept |= wanted.keys() & given.keys()
        result[host] = {n: value for n, value in wanted.items() if n not in given}
    return result, [f"{name}={given[name]} is kept as you set it" for name in sorted(kept)]


def describe(path: Path, placement: Placement) -> list[str]:
    """Lines for --dry-run and -v: each rank's place, and what the order does to the fabric."""
    lines = [f"placed by {path}:"]
    for rank in placement.after.ranks:
        lines.append(
            f"rank {rank.rank}: {rank.host}, local rank {rank.local_rank}, GPU {rank.gpu}, nearest "
            f"card {rank.card} (rail {rank.rail}, {rank.switch})"
        )
    before, after = placement.before, placement.after
    lines.append(
        f"ring traffic that leaves its switch: {before.ring.crossing_share:.0%} in the map's "
        f"order, {after.ring.crossing_share:.0%} as placed; of two-level groups: "
        f"{before.groups.crossing_share:.0%}, {after.groups.crossing_share:.0%}"
    )
    return lines
