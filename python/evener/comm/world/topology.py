"""Which rank lives on which node, and who talks to whom: ranks in, two lists of ranks out.

Two levels. The **inner** group is the ranks of one node (or LIGHT_INTRA_SIZE of them); its traffic
stays inside the machine. The **outer** group is the ranks with the same place in their inner
groups, one from each; its traffic crosses the network. Flat is the same picture with inner groups
of one rank, so the rest of `comm` knows one shape only.

Inner groups may differ in size. A bucket is then cut into as many shards as the smallest has ranks:
that many ranks of each group own a shard, and exchange it. A rank past these takes part in what its
node does, and owns nothing: its outer group is itself. What a node sends is what it sends where all
are as small as the smallest.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from evener.base import settings

Algorithm = Literal["auto", "flat", "2d"]
logger = logging.getLogger("evener.comm")


def host_identity() -> str:
    """A name that two ranks share exactly when they are on one host (container, namespace).

    EVENER_HOSTID where it is set; NCCL_HOSTID where that is, so that Evener and NCCL see the same
    hosts; else the host name with the kernel's boot id, because cloned machines often share a name.
    """
    if given := settings.EVENER_HOSTID.get() or os.environ.get("NCCL_HOSTID"):
        return given
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


@dataclass(frozen=True)
class Levels:
    """The groups of one rank. `inner` and `outer` hold positions in the list of hosts, ascending.

    `reason` says in words why it is this shape. `sizes`: of all inner groups, the same on all
    ranks. What is decided for all ranks alike is decided from `sizes`, not from this rank's groups.
    """

    inner: tuple[int, ...]
    outer: tuple[int, ...]
    nodes: int
    reason: str
    sizes: tuple[int, ...]

    @cached_property
    def two_level(self) -> bool:
        """Whether there is an inner reduction at all."""
        return max(self.sizes) > 1

    @cached_property
    def shards(self) -> int:
        """Into how many parts a bucket is cut."""
        return min(self.sizes)

    @cached_property
    def uneven(self) -> bool:
        """Whether some ranks own no shard."""
        return self.shards < max(self.sizes)

    @property
    def crosses(self) -> bool:
        """Whether there is more than one inner group, so that something is exchanged."""
        return len(self.sizes) > 1

    @property
    def owns(self) -> bool:
        """Whether this rank owns a shard."""
        return len(self.outer) == len(self.sizes)


def nodes_of(hosts: Sequence[str]) -> list[list[int]]:
    """Ranks by host, hosts in the order of their first rank."""
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    return list(nodes.values())


def levels(
    rank: int,
    hosts: Sequence[str],
    algorithm: Algorithm = "auto",
    intra_size: int = 8,
    *,
    uneven: bool = True,
) -> Levels:
    """The two groups of `rank`, where `hosts[r]` is the host identity of rank r.

    `uneven`: whether inner groups may differ in size. Never raises for a shape that cannot be
    two-level: it goes flat, and `reason` says why.
    """
    nodes = nodes_of(hosts)
    everyone = tuple(range(len(hosts)))

    def flat(reason: str) -> Levels:
        return Levels((rank,), everyone, len(nodes), reason, (1,) * len(hosts))

    sizes = [len(node) for node in nodes]
    if algorithm == "flat":
        return flat("flat was asked for")
    if len(nodes) == 1:
        return flat("one node: there is no second level")
    size = min(max(sizes), intra_size)
    if size == 1:
        return flat("one rank per node: there is no inner level")
    if ragged := next((each for each in sizes if each > size and each % size), 0):
        return flat(f"LIGHT_INTRA_SIZE={size} does not divide the {ragged} ranks of a node")
    blocks = [node[i : i + size] for node in nodes for i in range(0, len(node), size)]
    shards = min(map(len, blocks))
    if shards < size and not uneven:
        return flat(f"nodes have unequal numbers of ranks {sizes}: two levels need equal ones here")
    mine = next(block for block in blocks if rank in block)
    place = mine.index(rank)
    outer = tuple(block[place] for block in blocks) if place < shards else (rank,)
    found = tuple(map(len, blocks))
    reason = f"{len(nodes)} nodes, inner groups of {size}"
    if shards < size:
        reason = (
            f"{len(nodes)} nodes, inner groups of {list(found)}, {shards} of each in the exchange"
        )
    if size < intra_size:
        reason += f" (detected; LIGHT_INTRA_SIZE allows {intra_size})"
    return Levels(tuple(mine), outer, len(nodes), reason, found)
