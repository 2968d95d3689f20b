"""Builds a Layout's cables, addresses, routes and queues, and changes them afterwards.

Runs in the keeper, which has one thread and may therefore walk from one network namespace to the
next. A netlink socket belongs for good to the namespace in which it was opened, so one visit is
enough; sysctls are written during that visit, because /proc/sys/net shows the visitor's namespace.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from socket import AF_INET
from typing import Any

from evener.tools.lab import linux
from evener.tools.lab._pyroute2 import IPRoute, NetlinkError
from evener.tools.lab.delay import Delays
from evener.tools.lab.errors import LabError
from evener.tools.lab.faults import Action, Target
from evener.tools.lab.layout import SEGMENTING_BURST, Layout, Nic, Shape, Uplink
from evener.tools.lab.tc import TrafficControl

# Path by header fields alone (addresses, protocol, ports). Policy 1 would hash local TCP by a
# value of the socket that is rolled again at each retransmission: flows would walk off a black
# hole by themselves, and no path would repeat.
_HASH_POLICY, _HASH_FIELDS = 3, 0x37


@dataclass
class Realm:
    """One network namespace, with the sockets that configure it."""

    name: str
    fd: int
    routes: Any
    tc: TrafficControl
    devices: dict[str, int] = field(default_factory=dict)

    @classmethod
    def visit(cls, name: str, fd: int) -> Realm:
        """Enter the namespace of `fd`, and open sockets that stay in it."""
        linux.setns(fd, linux.CLONE_NEWNET)
        return cls(name, fd, IPRoute(), TrafficControl())

    def find(self, device: str) -> int:
        """Index of `device`."""
        if device not in self.devices:
            self.devices[device] = self.routes.link_lookup(ifname=device)[0]
        return self.devices[device]

    def up(self, device: str) -> None:
        """Switch on."""
        self.routes.link("set", index=self.find(device), state="up")

    def down(self, device: str) -> None:
        """Switch off: the other end loses its carrier."""
        self.routes.link("set", index=self.find(device), state="down")

    def address(self, device: str, address: str, prefix: int) -> None:
        """Add an IPv4 address."""
        self.routes.addr("add", index=self.find(device), address=address, prefixlen=prefix)


def _sysctl(name: str, value: int) -> None:
    Path("/proc/sys/net", name).write_text(str(value), encoding="ascii")


class Network:
    """The cables of a lab, up and running."""

    def __init__(self, layout: Layout, nodes: list[int]) -> None:
        """`nodes`: descriptors of the nodes' network namespaces, in order. Raises OSError."""
        self.layout = layout
        self.notes: list[str] = []
        self._shapes: dict[tuple[str, str], Shape | None] = {}
        self._dead: set[Uplink] = set()
        self._detours: set[tuple[Nic, Nic]] = set()  # (who has one, to whom)
        self.leaves = {nic.leaf: self._router(nic.leaf, leaf=True) for nic in layout.nics}
        self.spines = [self._router(name, leaf=False) for name in layout.spines]
        self.between = None
        if layout.spec.delay is not None:
            self.between = self._router("between", leaf=False)
            _sysctl("ipv4/ip_forward", 0)
        self.delays: Delays | None = None
        # Of each uplink, from the leaf and to it: nanoseconds, and the share that is not delayed.
        self._late: dict[tuple[Uplink, bool], tuple[int, float]] = {}
        self.nodes = []
        for node, fd in zip(layout.nodes, nodes, strict=True):
            realm = Realm.visit(node.name, fd)
            _sysctl("ipv6/conf/default/disable_ipv6", 1)
            _sysctl("ipv4/ip_unprivileged_port_start", 0)
            _sysctl("ipv4/conf/all/rp_filter", 0)
            _sysctl("ipv4/conf/default/rp_filter", 0)
            self.nodes.append(realm)
        try:
            self._wire()
            self._begin()
        except NetlinkError as error:
            self.close()
            raise OSError(error.code, str(error)) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the delays; the rest ends with the namespaces."""
        if self.delays is not None:
            self.delays.close()
            self.delays = None

    def _router(self, name: str, *, leaf: bool) -> Realm:
        linux.unshare(linux.CLONE_NEWNET, "net")
        realm = Realm.visit(name, os.open("/proc/self/ns/net", os.O_RDONLY))
        _sysctl("ipv4/ip_forward", 1)
        for interface in ("all", "default"):
            _sysctl(f"ipv6/conf/{interface}/disable_ipv6", 1)
            _sysctl(f"ipv4/conf/{interface}/rp_filter", 0)
            _sysctl(f"ipv4/conf/{interface}/send_redirects", 0)
            _sysctl(f"ipv4/conf/{interface}/ignore_routes_with_linkdown", 1)
        if leaf and self.layout.spec.paths > 1:
            self._hash_headers()
        realm.up("lo")
        return realm

    def _hash_headers(self) -> None:
        try:
            _sysctl("ipv4/fib_multipath_hash_policy", _HASH_POLICY)
            _sysctl("ipv4/fib_multipath_hash_fields", _HASH_FIELDS)
        except OSError:
            _sysctl("ipv4/fib_multipath_hash_policy", 1)
            self._note("old kernel (Linux 5.14 is not): flows may leave a black hole by themselves")
        try:
            _sysctl("ipv4/fib_multipath_hash_seed", self.layout.spec.hash_seed)
        except FileNotFoundError:
            self._note("this kernel has no fixed hash seed (Linux 6.11 has): paths will not repeat")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _wire(self) -> None:
        for node, realm in zip(self.layout.nodes, self.nodes, strict=True):
            realm.up("lo")
            for nic in node.nics:
                leaf = self.leaves[nic.leaf]
                self._cable(realm, nic.device, leaf, "node")
                realm.address(nic.device, nic.address, 24)
                leaf.address("node", nic.gateway, 24)
                # While the node is unplugged, what comes for it must not go round in circles.
                leaf.routes.route("add", dst=nic.network, type="blackhole", priority=1000)
                for uplink in nic.uplinks:
                    self._uplink(leaf, uplink)
                self._spread(leaf, nic.uplinks, "default")
                for uplink in nic.uplinks:
                    self.spines[uplink.path].routes.route(
                        "add", dst=nic.network, gateway=uplink.leaf_address
                    )
                self._node_routes(realm, nic)

    def _begin(self) -> None:
        """Delay and loss as the Spec wants them."""
        uplinks = [uplink for nic in self.layout.nics for uplink in nic.uplinks]
        if self.between is not None:
            linux.setns(self.between.fd, linux.CLONE_NEWNET)
            lines = [uplink.line for uplink in uplinks]
            self.delays = Delays(lines, self.layout.spec.hash_seed)
        for nic in self.layout.nics:
            for uplink in nic.uplinks:
                self._as_built(nic, uplink)

    def _as_built(self, nic: Nic, uplink: Uplink) -> None:
        spec = self.layout.spec
        if spec.delay_ns is not None:
            # Half of it on each of the two cables that a packet crosses.
            self._delay(uplink, [True, False], (spec.delay_ns // 2, 0.0))
        if spec.loss_share:
            lossy = Action("loss", spec.loss_share)
            self._fault_one(nic, uplink, Target(path=uplink.path), lossy)

    def _delay(self, uplink: Uplink, from_leaf: Sequence[bool], late: tuple[int, float]) -> None:
        assert self.delays is not None
        for first in from_leaf:
            self._late[uplink, first] = late
            self.delays.set(uplink.index, first=first, delay_ns=late[0], ahead=late[1])

    def _cable(self, one: Realm, here: str, two: Realm, there: str) -> None:
        mtu = self.layout.spec.mtu
        one.routes.link(
            "add",
            ifname=here,
            kind="veth",
            mtu=mtu,
            peer={"ifname": there, "net_ns_fd": two.fd, "mtu": mtu},
        )
        one.up(here)
        two.up(there)

    def _uplink(self, leaf: Realm, uplink: Uplink) -> None:
        spine = self.spines[uplink.path]
        if self.between is None:
            self._cable(leaf, uplink.leaf_device, spine, uplink.spine_device)
        else:
            here, there = uplink.line
            self._cable(leaf, uplink.leaf_device, self.between, here)
            self._cable(spine, uplink.spine_device, self.between, there)
        leaf.address(uplink.leaf_device, uplink.leaf_address, 30)
        spine.address(uplink.spine_device, uplink.spine_address, 30)
        self._let_out(leaf, uplink.leaf_device, self.layout.shape)
        self._let_out(spine, uplink.spine_device, self.layout.shape)

    def _spread(self, leaf: Realm, uplinks: Sequence[Uplink], destination: str) -> None:
        """The leaf's route to `destination`: over all of `uplinks`, evenly."""
        hops = [
            {"gateway": uplink.spine_address, "oif": leaf.find(uplink.leaf_device), "hops": 0}
            for uplink in uplinks
        ]
        if len(hops) == 1:
            leaf.routes.route("replace", dst=destination, gateway=hops[0]["gateway"])
        else:
            # Without a family, pyroute2 0.9.7 fails on several hops.
            leaf.routes.route("replace", dst=destination, family=AF_INET, multipath=hops)

    def _node_routes(self, realm: Realm, nic: Nic) -> None:
        """A node reaches a rail through its own NIC on it, and answers where it was asked."""
        device = realm.find(nic.device)
        route = {
            "gateway": nic.gateway,
            "oif": device,
            "metrics": {"cc_algo": self.layout.spec.congestion},
        }
        try:
            realm.routes.route("add", dst=nic.rail, **route)
        except NetlinkError as error:
            name = self.layout.spec.congestion
            have = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
            if name in have:
                raise
            raise LabError(
                f"this kernel has no congestion control {name!r} ({error})",
                f"take one of {', '.join(have)}, or load the module tcp_{name}",
            ) from None
        if nic.index == 0:
            realm.routes.route("add", dst="default", **route)
        if self.layout.spec.nics > 1:
            table = 100 + nic.index
            realm.routes.route("add", dst="default", table=table, **route)
            realm.routes.rule("add", src=nic.address, src_len=32, table=table, priority=table)

    def _let_out(
        self, realm: Realm, device: str, shape: Shape | None, *, lossy: bool = False
    ) -> None:
        """Set what `device` lets out; the flow cap sits on the leaf's side of a path only."""
        index, spec = realm.find(device), self.layout.spec
        self._shapes[realm.name, device] = shape
        if shape is not None and lossy:
            # Packets of MTU size: a share of them is lost, not a share of 64 KB trains.
            shape = replace(shape, burst=SEGMENTING_BURST)
        if spec.flow_rate is not None and realm.name in self.leaves and not lossy:
            realm.tc.cap_flows(index, shape, spec.flow_rate, spec.queue_ns)
        elif shape is not None:
            if spec.flow_rate is not None:
                realm.tc.clear(index)
            realm.tc.shape(index, shape)
        else:
            realm.tc.clear(index)

    def fault(self, target: Target, action: Action) -> None:
        """Do `action` to every cable that `target` names. Raises OSError."""
        touched = [
            (nic, uplink)
            for nic in self.layout.nics
            for uplink in nic.uplinks
            if target.includes(nic.node, nic.index, uplink.path)
        ]
        try:
            if target.node is not None and target.path is None:
                self._plug({nic for nic, _ in touched}, action)
            for nic, uplink in touched:
                self._fault_one(nic, uplink, target, action)
            if action.kind in ("down", "up", "heal"):
                self._route_around({nic for nic, _ in touched})
        except NetlinkError as error:
            raise OSError(error.code, str(error)) from error

    def _fault_one(self, nic: Nic, uplink: Uplink, target: Target, action: Action) -> None:
        leaf, spine = self.leaves[nic.leaf], self.spines[uplink.path]
        up, down = (leaf, uplink.leaf_device), (spine, uplink.spine_device)
        kind = action.kind
        if kind in ("blackhole", "loss"):
            # A packet crosses two cables of a path, one into the spine and one out of it: what
            # happens to a path happens once, what happens to a node in both directions.
            for realm, device in [down] if target.node is None else [up, down]:
                realm.tc.drop(realm.find(device), action.value if kind == "loss" else 1.0)
            if kind == "loss":
                for realm, device in (up, down):
                    self._let_out(realm, device, self._shapes[realm.name, device], lossy=True)
        elif kind == "delay":
            half = 2 if target.node is None else 1
            for first in (True, False):
                ahead = self._late[uplink, first][1]
                self._delay(uplink, [first], (int(action.value) // half, ahead))
        elif kind == "reorder":
            for first in [False] if target.node is None else [True, False]:
                self._delay(uplink, [first], (self._late[uplink, first][0], action.value))
        elif kind == "rate":
            shares = self.layout.spec.paths if target.path is None else 1
            shape = Shape.of(int(action.value) // shares, self.layout.spec.queue_ns)
            for realm, device in (up, down):
                self._let_out(realm, device, shape)
        elif kind == "down":
            spine.down(uplink.spine_device)
            if self.between is not None:
                self.between.down(uplink.line[0])
            self._dead.add(uplink)
        if kind in ("up", "heal") and uplink in self._dead:
            if self.between is not None:
                self.between.up(uplink.line[0])
            spine.up(uplink.spine_device)
            # A device that is switched off loses its routes.
            spine.routes.route("replace", dst=nic.network, gateway=uplink.leaf_address)
            self._dead.discard(uplink)
        if kind == "heal":
            for realm, device in (up, down):
                realm.tc.undrop(realm.find(device))
                self._let_out(realm, device, self.layout.shape)
            self._as_built(nic, uplink)

    def _plug(self, nics: set[Nic], action: Action) -> None:
        """What happens to all of a NIC's paths happens to its own cable, as the node sees."""
        for nic in nics:
            leaf = self.leaves[nic.leaf]
            if action.kind == "down":
                leaf.down("node")
            elif action.kind in ("up", "heal"):
                leaf.up("node")

    def _route_around(self, nics: set[Nic]) -> None:
        """Tell the other leaves which paths still lead to `nics`, as a routing protocol would.

        A leaf sees the carrier of its own cables; that another leaf lost one, it has to be told.
        """
        whole = [
            path
            for path in range(self.layout.spec.paths)
            if not all(nic.uplinks[path] in self._dead for nic in self.layout.nics)
        ]
        for nic in nics:
            alive = [path for path in whole if nic.uplinks[path] not in self._dead]
            special = bool(alive) and alive != whole
            for other in self.layout.nics:
                leaf = self.leaves[other.leaf]
                if other == nic or (not special and (other, nic) not in self._detours):
                    continue
                if special:
                    self._spread(leaf, [other.uplinks[path] for path in alive], nic.network)
                    self._detours.add((other, nic))
                else:
                    leaf.routes.route("del", dst=nic.network)
                    self._detours.discard((other, nic))

    def traffic(self) -> dict[str, int]:
        """Bytes that each NIC has sent into each path, `node0.eth0.path1` by name."""
        sent = {}
        for nic in self.layout.nics:
            leaf = self.leaves[nic.leaf]
            for uplink in nic.uplinks:
                (link,) = leaf.routes.get_links(leaf.find(uplink.leaf_device))
                name = f"node{nic.node}.{nic.device}.path{uplink.path}"
                sent[name] = link.get_attr("IFLA_STATS64")["tx_bytes"]
        return sent
