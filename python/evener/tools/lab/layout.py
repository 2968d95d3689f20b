"""From a Spec to every namespace, cable, address and rate: pure arithmetic, nothing is built here.

    node0                                                        node1
      eth0 ---- leaf0.0 ==== path0 (spine) ==== leaf1.0 ---- eth0
                        ==== path1 (spine) ====
                        ==== ...           ====

A node sees its NICs and one gateway behind each. Behind every NIC stands a leaf, a router namespace
of its own, joined by one cable to each of the P spines; a spine is a path, and it is shared by all
leaves as in a leaf-and-spine fabric. The leaf spreads flows over the spines by a hash of addresses,
protocol and ports. Rates are kept where a node cannot see or by-pass them: on the leaf's cable up
(the node's sending direction) and on the spine's cable down (its receiving direction).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from evener.tools.lab.spec import Spec

# sch_tbf drops packets larger than its queue, and segments those larger than its burst. A queue
# that holds two of the largest GSO packets is used as it is; a shallower one gets packets of MTU
# size, because a queue of 20 KB cannot hold a packet of 64.
_GSO_QUEUE = 2 * 65536
SEGMENTING_BURST = 15000


@dataclass(frozen=True)
class Shape:
    """What one end of a cable lets out: tbf's three numbers. Bits per second and bytes."""

    rate: int
    burst: int
    limit: int

    @classmethod
    def of(cls, rate: int, queue_ns: int) -> Shape:
        """A queue that takes `queue_ns` to empty at `rate`, and 100 us of burst."""
        limit = max(rate * queue_ns // 8 // 10**9, 2 * 1600)
        burst = max(rate // 8 // 10_000, 2 * 65536) if limit >= _GSO_QUEUE else SEGMENTING_BURST
        return cls(rate, burst, limit)


@dataclass(frozen=True)
class Uplink:
    """The cable between one leaf and one spine, `index` its number in the whole lab."""

    path: int
    index: int

    @property
    def leaf_device(self) -> str:
        """Its name in the leaf."""
        return f"path{self.path}"

    @property
    def spine_device(self) -> str:
        """Its name in the spine."""
        return f"down{self.index}"

    @property
    def line(self) -> tuple[str, str]:
        """The devices at the leaf's and at the spine's end of its delay line."""
        return f"leaf{self.index}", f"spine{self.index}"

    @property
    def leaf_address(self) -> str:
        """The leaf's address in a network of four."""
        return _dotted((172 << 24) + (16 << 16) + 4 * self.index + 1)

    @property
    def spine_address(self) -> str:
        """The spine's address in a network of four."""
        return _dotted((172 << 24) + (16 << 16) + 4 * self.index + 2)


@dataclass(frozen=True)
class Nic:
    """One NIC of one node, with the leaf behind it."""

    node: int
    index: int
    uplinks: tuple[Uplink, ...]

    @property
    def device(self) -> str:
        """Its name in the node."""
        return f"eth{self.index}"

    @property
    def address(self) -> str:
        """IPv4 address, in a network of 256 that it shares with its gateway alone."""
        return f"10.{self.index + 1}.{self.node}.2"

    @property
    def gateway(self) -> str:
        """The leaf's address."""
        return f"10.{self.index + 1}.{self.node}.1"

    @property
    def network(self) -> str:
        """With prefix length."""
        return f"10.{self.index + 1}.{self.node}.0/24"

    @property
    def rail(self) -> str:
        """The networks of this NIC's fellows on the other nodes."""
        return f"10.{self.index + 1}.0.0/16"

    @property
    def leaf(self) -> str:
        """Name of the router namespace behind it."""
        return f"leaf{self.node}.{self.index}"


@dataclass(frozen=True)
class NodeLayout:
    """One node: host name and NICs."""

    index: int
    nics: tuple[Nic, ...]

    @property
    def name(self) -> str:
        """Host name."""
        return f"node{self.index}"

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of its NICs, eth0 first."""
        return tuple(nic.address for nic in self.nics)


@dataclass(frozen=True)
class Layout:
    """All of a lab."""

    spec: Spec

    @cached_property
    def nodes(self) -> tuple[NodeLayout, ...]:
        """In order, node0 first."""
        spec = self.spec
        return tuple(
            NodeLayout(
                i,
                tuple(
                    Nic(
                        i,
                        k,
                        tuple(
                            Uplink(p, (i * spec.nics + k) * spec.paths + p)
                            for p in range(spec.paths)
                        ),
                    )
                    for k in range(spec.nics)
                ),
            )
            for i in range(spec.nodes)
        )

    @cached_property
    def nics(self) -> tuple[Nic, ...]:
        """NICs of all nodes."""
        return tuple(nic for node in self.nodes for nic in node.nics)

    @cached_property
    def spines(self) -> tuple[str, ...]:
        """Names of the paths."""
        return tuple(f"path{p}" for p in range(self.spec.paths))

    @cached_property
    def shape(self) -> Shape | None:
        """The shape of every path's ends; None where unshaped."""
        rate = self.spec.path_rate
        return None if rate is None else Shape.of(rate, self.spec.queue_ns)

    def hosts(self) -> str:
        """Text of /etc/hosts: node0 is its eth0; node0-eth1 and so on are its NICs."""
        lines = ["127.0.0.1 localhost", "::1 localhost ip6-localhost ip6-loopback"]
        for node in self.nodes:
            lines += [f"{node.addresses[0]} {node.name}"]
            # As a socket of IPv6 sees a peer of IPv4: c10d asks for its name, and warns where there
            # is none. Under a name of its own: who asks for node0 must not get this address.
            lines += [f"::ffff:{address} {node.name}-mapped" for address in node.addresses]
            lines += [f"{nic.address} {node.name}-{nic.device}" for nic in node.nics]
        return "\n".join(lines) + "\n"


def _dotted(number: int) -> str:
    return ".".join(str(number >> shift & 255) for shift in (24, 16, 8, 0))
