"""What NCCL chose, read from its own log.

NCCL says which algorithm, protocol and channels it took only in its debug log, whose lines are
undocumented and change with every version. This module knows the lines that matter here in the
forms of 2.10 to 2.29, ignores the rest, and counts the tuning lines it cannot read, so that a
newer NCCL is noticed rather than misread.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# The numbers of NCCL's NCCL_ALGO_* and NCCL_PROTO_* constants, which 2.20 to 2.22 print bare.
_ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
_PROTOCOLS = ("LL", "LL128", "SIMPLE")

_VERSION = re.compile(r"NCCL version (\d[\w.+-]*)")
_NETWORK = re.compile(r"Using network (.+?)\s*$")
_PLUGIN = re.compile(r"Initialized NET plugin (.+?)\s*$")
_INTERFACES = re.compile(r"NET/(Socket|IB) : Using (.+?)\s*$")
_INTERFACE = re.compile(r"\[\d+\]([^:\s]+):")
_CHANNELS = re.compile(r"(\d+) coll channels")
_VIA = re.compile(r" via (NET/[^/(]+?(?=/\d)|P2P|SHM|direct shared memory)")
_TUNED = re.compile(
    r"(\w+): (\d+) Bytes -> Algo (\w+) proto (\w+)(?: channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\})?"
)
_TUNED_BY_NUMBER = re.compile(r"(\d+) Bytes -> Algo (-?\d+) proto (-?\d+) time")
_INTERRUPTED = re.compile(r"Bytes -> Algo")


@dataclass
class Choices:
    """NCCL's choices in one process."""

    version: str = ""
    network: str = ""
    interfaces: list[str] = field(default_factory=list)
    transports: list[str] = field(default_factory=list)
    channels: int = 0
    tuned: Counter[tuple[str, int, str, str, int]] = field(default_factory=Counter)
    unread: int = 0

    def to_json(self) -> dict[str, Any]:
        """As it stands in the results: the largest buffers first."""
        ordered = sorted(self.tuned.items(), key=lambda item: (-item[0][1], item[0]))
        return {
            "version": self.version,
            "network": self.network,
            "interfaces": self.interfaces,
            "transports": self.transports,
            "channels": self.channels,
            "tuned": [
                {
                    "collective": collective,
                    "bytes": size,
                    "algorithm": algorithm,
                    "protocol": protocol,
                    "channels": channels,
                    "count": count,
                }
                for (collective, size, algorithm, protocol, channels), count in ordered
            ],
            "unread_lines": self.unread,
        }


def parse(lines: Iterable[str]) -> Choices:
    """Read the log of one process (NCCL_DEBUG=INFO, subsystems INIT, NET, TUNING, P2P)."""
    found = Choices()
    for line in lines:
        if match := _VERSION.search(line):
            found.version = match[1]
        elif match := _TUNED.search(line):
            collective, size, algorithm, protocol, low, high = match.groups()
            channels = int(high) - int(low) + 1 if high else 0
            found.tuned[
                collective,
                int(size),
                _named(algorithm, _ALGORITHMS),
                _named(protocol, _PROTOCOLS),
                channels,
            ] += 1
        elif match := _TUNED_BY_NUMBER.search(line):
            size, algorithm, protocol = match.groups()
            found.tuned[
                "", int(size), _named(algorithm, _ALGORITHMS), _named(protocol, _PROTOCOLS), 0
            ] += 1
        elif _INTERRUPTED.search(line):
            found.unread += 1
        elif match := _INTERFACES.search(line):
            for name in _INTERFACE.findall(match[2]):
                _once(found.interfaces, name)
        elif match := _NETWORK.search(line) or _PLUGIN.search(line):
            found.network = match[1]
        elif match := _CHANNELS.search(line):
            found.channels = max(found.channels, int(match[1]))
        elif match := _VIA.search(line):
            _once(found.transports, "SHM" if match[1].startswith("direct") else match[1])
    return found


def _named(value: str, names: tuple[str, ...]) -> str:
    if not value.lstrip("-").isdigit():
        return value
    number = int(value)
    return names[number] if 0 <= number < len(names) else value


def _once(names: list[str], name: str) -> None:
    if name not in names:
        names.append(name)


def in_words(choices: dict[str, Any]) -> str:
    """One line: algorithms of the large buffers, channels, network; empty where nothing is known.

    Small buffers (barriers, parameter checks) are left out where large ones were logged.
    """
    tuned = choices.get("tuned") or []
    largest = max((entry["bytes"] for entry in tuned), default=0)
    shown: list[str] = []
    for entry in tuned:
        if entry["bytes"] * 64 < largest:
            continue
        channels = f" x{entry['channels']}" if entry["channels"] else ""
        name = f"{entry['collective']} " if entry["collective"] else ""
        _once(shown, f"{name}{entry['algorithm']}/{entry['protocol']}{channels}")
    network = choices.get("network", "")
    parts = [", ".join(shown)] if shown else []
    if network:
        interfaces = ",".join(choices.get("interfaces") or [])
        parts.append(f"over {network}" + (f" ({interfaces})" if interfaces else ""))
    return " ".join(parts)
