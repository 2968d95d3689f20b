"""Which rank lives on which node, and who talks to whom: ranks in, two lists of ranks out.

Two levels. The **inner** group is the ranks of one node (or LIGHT_INTRA_SIZE of them); its traffic
stays inside the machine. The **outer** group is the ranks with the same place in their inner
groups, one from each; its traffic crosses the network. Flat is the same picture with inner groups
of one rank, so the rest of `comm` knows one shape only.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evener.comm.options import Algorithm

logger = logging.getLogger("evener.comm")


def host_identity() -> str:
    """A name that two ranks share exactly when they are on one host (container, namespace).

    NCCL_HOSTID where it is set, so that Evener and NCCL see the same hosts; else the host name with
    the kernel's boot id, because cloned machines often share a name.
    """
    if given := os.environ.get("NCCL_HOSTID"):
        return given
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


@dataclass(frozen=True)
class Levels:
    """The groups of one rank. `inner` and `outer` hold positions in the list of hosts, ascending.

    `reason` says in words why it is this shape.
    """

    inner: tuple[int, ...]
    outer: tuple[int, ...]
    nodes: int
    reason: str

    @property
    def two_level(self) -> bool:
        """Whether there is an inner reduction at all."""
        return len(self.inner) > 1


def nodes_of(hosts: Sequence[str]) -> list[list[int]]:
    """Ranks by host, hosts in the order of their first rank."""
    nodes: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        nodes.setdefault(host, []).append(rank)
    return list(nodes.values())


def levels(
    rank: int, hosts: Sequence[str], algorithm: Algorithm = "auto", intra_size: int = 8
) -> Levels:
    """The two groups of `rank`, where `hosts[r]` is the host identity of rank r.

    Never raises for a shape that cannot be two-level: it goes flat, and `reason` says why.
    """
    nodes = nodes_of(hosts)
    everyone = tuple(range(len(hosts)))

    def flat(reason: str) -> Levels:
        return Levels((rank,), everyone, len(nodes), reason)

    sizes = [len(node) for node in nodes]
    if algorithm == "flat":
        return flat("flat was asked for")
    if len(nodes) == 1:
        return flat("one node: there is no second level")
    if len(set(sizes)) > 1:
        return flat(f"nodes have unequal numbers of ranks {sizes}: two levels need equal ones")
    size = min(sizes[0], intra_size)
    if size == 1:
        return flat("one rank per node: there is no inner level")
    if sizes[0] % size:
        return flat(f"LIGHT_INTRA_SIZE={size} does not divide the {sizes[0]} ranks of a node")
    blocks = [node[i : i + size] for node in nodes for i in range(0, len(node), size)]
    mine = next(block for block in blocks if rank in block)
    place = mine.index(rank)
    reason = f"{len(nodes)} nodes, inner groups of {size}"
    if size < intra_size:
        reason += f" (detected; LIGHT_INTRA_SIZE allows {intra_size})"
    return Levels(tuple(mine), tuple(block[place] for block in blocks), len(nodes), reason)
