"""What a lab looks like: one frozen value, checked when it is made.

`2x2@25gbit,paths=4` is the short form that command lines take: nodes x slots @ link rate, then
`key=value` pairs; `2+1@25gbit` is a node of two slots and one of one. `str(spec)` writes it back,
with what differs from the defaults.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from evener.base.units import parse_rate, parse_share, parse_time, show_rate, show_time
from evener.errors import UsageError

# Keys of the short form, in the order in which it is written.
_KEYS = {
    "nics": "nics",
    "paths": "paths",
    "cap": "flow_cap",
    "queue": "queue",
    "delay": "delay",
    "loss": "loss",
    "mtu": "mtu",
    "congestion": "congestion",
    "seed": "hash_seed",
}
_NUMBERS = {
    # name: (lowest, highest, why there is a highest)
    "nodes": (1, 48, "each is a set of namespaces with processes of its own"),
    "slots": (1, 64, "a node runs that many processes"),
    "nics": (1, 8, "eth0 to eth7"),
    "paths": (1, 16, "the kernel's hash spreads flows over that many next hops"),
    "mtu": (576, 65535, "what IPv4 needs and what a virtual cable carries"),
    "hash_seed": (1, 2**32 - 1, "0 would mean a random one"),
}
_SHORT = re.compile(r"(?:(\d+)x(\d+)|(\d+(?:\+\d+)+))(?:@([^,]+))?((?:,[^,]+)*)")
_EXAMPLE = "2x2@25gbit,paths=4,nics=1,cap=5gbit,queue=2ms"


@dataclass(frozen=True)
class Spec:
    """A simulated cluster. Raises UsageError for what cannot be built.

    `nodes` hosts with `slots` processes each; or, where `uneven` is given, as many as it says for
    each host, and `nodes` and `slots` (the most) follow from it. `link`: rate of a NIC in each
    direction, None for unshaped. `nics`: NICs per node, eth0 and up, each with `link` of its own.
    `paths`: equal-cost paths behind each NIC; they share its rate evenly, so that one flow reaches
    `link` / `paths`.
    `flow_cap`: rate that one flow cannot pass, None for no cap. `queue`: depth of each queue, as
    the time that the link needs to empty it. `delay`: of a packet from node to node, one way; None
    where cables have no delay lines. `loss`: share of the packets that each path loses. `mtu`:
    bytes of an IP packet. `congestion`: TCP
    congestion control. `hash_seed`: of the header hash that spreads flows over paths; a flow with
    the same addresses and ports takes the same path in every lab with the same seed.
    """

    nodes: int = 2
    slots: int = 1
    link: str | None = "25gbit"
    nics: int = 1
    paths: int = 1
    flow_cap: str | None = None
    queue: str = "2ms"
    delay: str | None = None
    loss: str | None = None
    mtu: int = 1500
    congestion: str = "cubic"
    hash_seed: int = 1
    uneven: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.uneven:
            if not min(self.uneven):
                shown = "+".join(map(str, self.uneven))
                raise UsageError(f"a node of {shown} has no slot", "give each node 1 at least")
            object.__setattr__(self, "nodes", len(self.uneven))
            object.__setattr__(self, "slots", max(self.uneven))
            each = self.uneven if min(self.uneven) < self.slots else ()
            object.__setattr__(self, "uneven", each)
        for name, (low, high, why) in _NUMBERS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or not low <= value <= high:
                raise UsageError(
                    f"{name}={value!r} is not a whole number from {low} to {high} ({why})",
                    f"choose {name} from {low} to {high}",
                )
        for name in ("link", "flow_cap"):
            value = getattr(self, name)
            if value is not None and value.lower() in ("none", "unshaped"):
                value = None
            value = None if value is None else show_rate(parse_rate(value, name))
            object.__setattr__(self, name, value)
        object.__setattr__(self, "queue", show_time(parse_time(self.queue, "queue")))
        if self.delay is not None:
            object.__setattr__(self, "delay", show_time(parse_delay(self.delay)))
        if self.loss is not None:
            parse_share(self.loss, "loss")
        if not re.fullmatch(r"[a-z0-9_]{1,15}", self.congestion):
            raise UsageError(
                f"congestion={self.congestion!r} is not the name of a congestion control",
                "take one of /proc/sys/net/ipv4/tcp_available_congestion_control",
            )
        if self.path_rate is not None and self.path_rate < 10**6:
            raise UsageError(
                f"a path of {self.path_rate} bits per second is too slow to build",
                "give each path 1mbit at least",
            )
        if self.flow_cap is not None and parse_rate(self.flow_cap) < 10**6:
            raise UsageError(f"flow_cap={self.flow_cap} is below 1mbit", "cap flows at 1mbit or up")
        if self.queue_ns < 1000:
            raise UsageError(f"queue={self.queue} is below 1us", "give the queue 1us at least")

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Processes of each node."""
        return self.uneven or (self.slots,) * self.nodes

    def ranks(self, node: int) -> range:
        """Ranks of this node."""
        first = sum(self.sizes[:node])
        return range(first, first + self.sizes[node])

    def place(self, rank: int) -> tuple[int, int]:
        """The node of a rank, and its slot there."""
        node = next(node for node in range(self.nodes) if rank in self.ranks(node))
        return node, rank - self.ranks(node).start

    def cross(self, node: int, slot: int) -> tuple[int, int]:
        """Among the nodes that have this slot: the place of `node`, and how many they are."""
        having = [other for other in range(self.nodes) if self.sizes[other] > slot]
        return having.index(node), len(having)

    @property
    def link_rate(self) -> int | None:
        """Bits per second of a NIC, None where unshaped."""
        return None if self.link is None else parse_rate(self.link)

    @property
    def path_rate(self) -> int | None:
        """Bits per second of one path of one NIC, None where unshaped."""
        return None if self.link_rate is None else self.link_rate // self.paths

    @property
    def flow_rate(self) -> int | None:
        """Bits per second that one flow cannot pass, None where flows are not capped."""
        return None if self.flow_cap is None else parse_rate(self.flow_cap)

    @property
    def queue_ns(self) -> int:
        """Depth of a queue in nanoseconds at its link's rate."""
        return parse_time(self.queue)

    @property
    def delay_ns(self) -> int | None:
        """One way from node to node in nanoseconds, None where there are no delay lines."""
        return None if self.delay is None else parse_delay(self.delay)

    @property
    def loss_share(self) -> float:
        """The share of packets that a path loses."""
        return 0.0 if self.loss is None else parse_share(self.loss, "loss")

    @classmethod
    def parse(cls, text: str) -> Spec:
        """The lab that `2x2@25gbit,paths=4` describes. Raises UsageError.

        `NODESxSLOTS`, or `SLOTS+SLOTS` with the slots of each node; then `@RATE` (left out:
        unshaped), then any of nics, paths, cap, queue, delay, loss, mtu, congestion, seed.
        """
        match = _SHORT.fullmatch(text.strip())
        if not match:
            raise UsageError(f"{text!r} describes no lab", f"write it like {_EXAMPLE}")
        if match[3]:
            values: dict[str, object] = {"uneven": tuple(map(int, match[3].split("+")))}
        else:
            values = {"nodes": int(match[1]), "slots": int(match[2])}
        values["link"] = match[4]
        return cls(**values, **parse_pairs(match[5].split(",")[1:], text))  # type: ignore[arg-type]

    def __str__(self) -> str:
        """The short form, which `parse` reads back to an equal Spec."""
        text = "+".join(map(str, self.uneven)) or f"{self.nodes}x{self.slots}"
        text += f"@{self.link}" if self.link else ""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for key, field in _KEYS.items():
            if (value := getattr(self, field)) != defaults[field]:
                text += f",{key}={value}"
        return text


def parse_pairs(pairs: Sequence[str], text: str) -> dict[str, object]:
    """Fields of a Spec from `paths=4`, `delay=40ms`; they stand in `text`. Raises UsageError."""
    values: dict[str, object] = {}
    for pair in pairs:
        key, equals, value = (part.strip() for part in pair.partition("="))
        if key not in _KEYS or not equals:
            raise UsageError(
                f"{pair!r} in {text!r} is not one of {', '.join(_KEYS)}",
                f"write it like {_EXAMPLE}",
            )
        field = _KEYS[key]
        if field in values:
            raise UsageError(f"{key} stands twice in {text!r}", "give each key once")
        if field in _NUMBERS and not value.isdecimal():
            raise UsageError(f"{key}={value!r} is not a whole number", f"like {_EXAMPLE}")
        values[field] = int(value) if field in _NUMBERS else value
    return values


def parse_delay(text: str) -> int:
    """Nanoseconds, 10 seconds at most. Raises UsageError."""
    delay = parse_time(text, "delay")
    if delay > 10 * 10**9:
        raise UsageError(f"delay={text} is above 10s", "no network is that long: up to 10s")
    return delay
