"""What can go wrong in a lab, where, and when: the words and the timeline.

    path1                  a path, for every node           path1 blackhole
    node0                  all cables of a node             node1 down
    node0.eth1             one NIC of a node                node0.eth1 rate 1gbit
    node0.path1            one path of one node             node0.path1 delay 10ms
    12s:path1:blackhole    on the timeline, 12 seconds after its start

`blackhole` drops every packet and says nothing, as a broken switch does; `down` takes the carrier
away, so that routers move flows to other paths; `flap` goes down and up, every second or as given;
`rate`, `loss`, `delay` and `reorder` degrade; `heal` undoes all of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from evener.base.units import parse_rate, parse_share, parse_time, show_time
from evener.errors import UsageError
from evener.tools.lab.spec import Spec, parse_delay

_TARGET = re.compile(r"(?:node(\d+))?(?:(?:^|(?<=.)\.)eth(\d+))?(?:(?:^|(?<=.)\.)path(\d+))?")
# What a fault with a value is like.
_VALUES = {"rate": "1gbit", "loss": "1%", "delay": "10ms", "reorder": "1%"}
_KINDS = ("blackhole", "down", "up", "flap", "rate", "loss", "delay", "reorder", "heal")


@dataclass(frozen=True)
class Target:
    """Which cables: None stands for all."""

    node: int | None = None
    nic: int | None = None
    path: int | None = None

    @classmethod
    def parse(cls, text: str, spec: Spec) -> Target:
        """`path1`, `node0`, `node0.eth1`, `node0.path1`. Raises UsageError."""
        match = _TARGET.fullmatch(text.strip()) if text.strip() else None
        if not match:
            raise UsageError(
                f"{text!r} names no part of the lab", "name path0, node0, node0.eth0 or node0.path0"
            )
        target = cls(*(None if part is None else int(part) for part in match.groups()))
        for what, index, count in (
            ("node", target.node, spec.nodes),
            ("eth", target.nic, spec.nics),
            ("path", target.path, spec.paths),
        ):
            if index is not None and index >= count:
                raise UsageError(
                    f"{text!r}: this lab has no {what}{index}",
                    f"it has {what}0" + (f" to {what}{count - 1}" if count > 1 else " alone"),
                )
        return target

    def includes(self, node: int, nic: int, path: int) -> bool:
        """Whether the cable of NIC `nic` of node `node` to spine `path` is one of them."""
        wanted = ((self.node, node), (self.nic, nic), (self.path, path))
        return all(want is None or want == have for want, have in wanted)


@dataclass(frozen=True)
class Action:
    """What happens. `value`: bits per second for rate, a share for loss and reorder, nanoseconds
    for delay and flap."""

    kind: str
    value: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Action:
        """`blackhole`, `down`, `rate 1gbit`, `loss 1%`, `flap 500ms`, `heal`. Raises UsageError."""
        words = text.replace("=", " ").split()
        kind, values = (words[0].lower(), words[1:]) if words else ("", [])
        if kind not in _KINDS:
            raise UsageError(f"{text!r} is not a fault", f"take one of {', '.join(_KINDS)}")
        if kind == "flap":
            return cls(kind, parse_time(values[0] if values else "1s", "flap's period"))
        needs = kind in _VALUES
        if len(values) != needs:
            raise UsageError(
                f"{text!r}: {kind} takes {'one value' if needs else 'no value'}",
                f"like: {kind} {_VALUES.get(kind, '')}".rstrip(),
            )
        if kind == "rate":
            return cls(kind, parse_rate(values[0]))
        if kind == "delay":
            return cls(kind, parse_delay(values[0]))
        return cls(kind, parse_share(values[0], kind)) if needs else cls(kind)

    def require(self, spec: Spec) -> None:
        """Raise UsageError where `spec`'s lab cannot do it."""
        if self.kind in ("delay", "reorder") and spec.delay is None:
            raise UsageError(
                f"{self.kind}: this lab's cables have no delay lines", "build it with --delay 0ms"
            )

    def to_json(self) -> dict[str, Any]:
        """For the keeper."""
        return {"kind": self.kind, "value": self.value}


@dataclass(frozen=True)
class Event:
    """A fault on the timeline, `at_ns` after its start; `text` is how it was written."""

    at_ns: int
    target: str
    action: str

    @classmethod
    def parse(cls, text: str, spec: Spec) -> Event:
        """`12s:path1:blackhole`, `0s:node0:rate 1gbit`. Raises UsageError."""
        parts = text.split(":")
        if len(parts) not in (3, 4):
            raise UsageError(
                f"{text!r} is not a fault on a timeline", "write it as 12s:path1:blackhole"
            )
        at, target, action = parts[0], parts[1], " ".join(parts[2:])
        Target.parse(target, spec)
        Action.parse(action).require(spec)
        return cls(parse_time(at, "the time of a fault"), target.strip(), action.strip())

    def __str__(self) -> str:
        return f"{show_time(self.at_ns)}:{self.target}:{self.action}"
