"""`evener net setup`: what a host wants to carry much traffic, done and undone.

A *change* is a file of the kernel (or a card's number of channels), the value it has and the value
it is to have. `plan` finds the changes without making any; `apply` makes them and writes down each
old value before it is changed; `undo` puts the old ones back, the last first, and leaves alone what
another program has changed since.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from evener.errors import EvenerError, UsageError

STATE = Path("/var/lib/evener/net-setup.json")
VERSION = 1
# What a socket may ask for: the UDP engine asks for 4 MiB, and the kernel counts its own share too.
_BUFFER = 16 << 20
_SIOCETHTOOL = 0x8946
_GET_CHANNELS, _SET_CHANNELS = 0x3C, 0x3D
# Names that carry no traffic between hosts: NCCL leaves the first two out as well.
_NOT_MEANT = ("lo", "docker", "veth", "virbr", "br-")
# How a bond deals packets out (the kernel's Documentation/networking/bonding.rst): modes that go by
# a hash, and hashes that see no port numbers. By these all connections to a host take one port of
# the bond, however many source ports they have.
_BY_HASH = ("balance-xor", "802.3ad")
_WITHOUT_PORTS = ("layer2", "layer2+3", "encap2+3")


class SetupError(EvenerError):
    """A host cannot be prepared, or not be put back."""


@dataclass(frozen=True)
class Change:
    """One value of the kernel. `where` is a file, or `channels:INTERFACE`."""

    where: str
    old: str
    new: str
    why: str

    def line(self) -> str:
        """For people."""
        return f"{self.where}: {self.old} -> {self.new}  ({self.why})"


def channels(interface: str, wanted: int | None = None) -> tuple[int, int] | None:
    """A card's combined channels: (now, at most). `wanted`: sets them first.

    None where the card has no such thing. Raises OSError where it refuses `wanted`.
    """
    data = ctypes.create_string_buffer(struct.pack("9I", _GET_CHANNELS, *[0] * 8))
    request = struct.pack("16sP", interface.encode(), ctypes.addressof(data))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            fcntl.ioctl(probe.fileno(), _SIOCETHTOOL, request)
        except OSError:
            return None
        now = list(struct.unpack("9I", data.raw[:36]))
        if wanted is not None:
            now[0], now[8] = _SET_CHANNELS, wanted
            ctypes.memmove(data, struct.pack("9I", *now), 36)
            fcntl.ioctl(probe.fileno(), _SIOCETHTOOL, request)
    return (now[8], now[4]) if now[4] else None


def interfaces(root: Path = Path("/")) -> list[str]:
    """Interfaces that are up and carry traffic between hosts, by name."""
    found = []
    for path in sorted((root / "sys/class/net").glob("*")):
        if path.name.startswith(_NOT_MEANT):
            continue
        flags = _read(path / "flags")
        if flags is not None and int(flags, 16) & 1:
            found.append(path.name)
    return found


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _atleast(path: Path, wanted: int, why: str) -> Iterable[Change]:
    now = _read(path)
    if now is not None and now.isdecimal() and int(now) < wanted:
        yield Change(str(path), now, str(wanted), why)


def _mask(processors: int) -> str:
    """All of these processors, as the kernel writes a set: groups of 32 bits, the highest first."""
    whole = [f"{(1 << min(32, processors - at)) - 1:x}" for at in range(0, processors, 32)]
    return ",".join(reversed(whole))


def _of_interface(name: str, root: Path, mtu: int | None, processors: int) -> Iterable[Change]:
    here = root / "sys/class/net" / name
    if mtu is not None:
        now = _read(here / "mtu")
        if now is not None and int(now) != mtu:
            yield Change(str(here / "mtu"), now, str(mtu), "asked for; all hosts need the same")
    yield from _of_bond(here / "bonding")
    known = channels(name)
    queues = sorted((here / "queues").glob("rx-*"))
    count = len(queues)
    if known is not None:
        now_channels, most = known
        wanted = min(most, processors)
        if now_channels < wanted:
            why = "a queue of the card per processor"
            yield Change(f"channels:{name}", str(now_channels), str(wanted), why)
            count = wanted
    if count < processors:
        for queue in queues:
            now = _read(queue / "rps_cpus")
            if now is not None and not now.strip("0,"):
                why = "fewer queues than processors: all processors take what they bring"
                yield Change(str(queue / "rps_cpus"), now, _mask(processors), why)


def _of_bond(here: Path) -> Iterable[Change]:
    mode, policy = _read(here / "mode"), _read(here / "xmit_hash_policy")
    if mode is None or policy is None or mode.split()[0] not in _BY_HASH:
        return
    # Name and number; the name is what is written.
    now = policy.split()[0]
    if now in _WITHOUT_PORTS:
        wanted = "encap3+4" if now == "encap2+3" else "layer3+4"
        why = f"by {now} all connections to a host take one port of the bond"
        yield Change(str(here / "xmit_hash_policy"), now, wanted, why)


def plan(
    names: list[str],
    mtu: int | None = None,
    huge_pages: int | None = None,
    root: Path = Path("/"),
    processors: int | None = None,
) -> list[Change]:
    """What is to be changed on this host for these interfaces; nothing is changed.

    Raises UsageError for an interface that does not exist.
    """
    processors = processors or os.cpu_count() or 1
    missing = [name for name in names if not (root / "sys/class/net" / name).exists()]
    if missing:
        there = ", ".join(path.name for path in sorted((root / "sys/class/net").glob("*")))
        raise UsageError(f"no interface {missing[0]!r} here", f"one of these: {there or 'none'}")
    core = root / "proc/sys/net/core"
    changes: list[Change] = []
    for side, word in (("rmem", "receiving"), ("wmem", "sending")):
        why = f"room for bursts in a socket that is {word}"
        changes += _atleast(core / f"{side}_max", _BUFFER, why)
    for name in names:
        changes += _of_interface(name, root, mtu, processors)
    if huge_pages is not None:
        path = root / "proc/sys/vm/nr_hugepages"
        changes += _atleast(
            path, huge_pages, "asked for; EVENER_NET_ENGINE=xdp takes 4 or 8 for each card"
        )
    return changes


def _now(where: str) -> str | None:
    if where.startswith("channels:"):
        known = channels(where.removeprefix("channels:"))
        return str(known[0]) if known else None
    return _read(Path(where))


def _same(where: str, one: str | None, other: str) -> bool:
    if one is None:
        return False
    if where.endswith("xmit_hash_policy"):
        return one.split()[0] == other
    if not where.endswith("rps_cpus"):
        return one == other
    # The kernel writes a set with leading zeros.
    return int(one.replace(",", ""), 16) == int(other.replace(",", ""), 16)


def _set(where: str, value: str) -> None:
    try:
        if where.startswith("channels:"):
            channels(where.removeprefix("channels:"), int(value))
        else:
            Path(where).write_text(value)
    except OSError as error:
        raise SetupError(
            f"{where} cannot be set to {value}: {error.strerror}",
            "run as root"
            if isinstance(error, PermissionError)
            else "leave it out, or set it by hand",
        ) from None


def _write(state: Path, done: list[Change]) -> None:
    record = {"version": VERSION, "changes": [asdict(change) for change in done]}
    part = state.with_name(f".{state.name}.{os.getpid()}")
    try:
        state.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(record, indent=1) + "\n")
        part.replace(state)
    except OSError as error:
        raise SetupError(
            f"{state} cannot be written: {error.strerror}; nothing more is changed",
            "run as root, or choose another file by --state",
        ) from None


def recorded(state: Path) -> list[Change]:
    """What was changed by `apply` and not undone, the first first.

    Raises SetupError where the file is not one of this version.
    """
    try:
        record = json.loads(state.read_text())
        if record["version"] != VERSION:
            raise ValueError(f"version {record['version']}")
        return [Change(**change) for change in record["changes"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise SetupError(
            f"{state} is not a record of `evener net setup`: {error}", "remove it, or name another"
        ) from None


def apply(changes: list[Change], state: Path, said: Callable[[str], None]) -> None:
    """Make the changes, one after the other. Each old value is written down first.

    Raises SetupError at the first that fails; what was done before stays, and can be undone.
    """
    done = recorded(state)
    for change in changes:
        # For a value that was changed before, undo wants the oldest.
        known = next((one for one in done if one.where == change.where), None)
        if known is None:
            _write(state, [*done, change])
            done.append(change)
        else:
            done[done.index(known)] = Change(change.where, known.old, change.new, change.why)
            _write(state, done)
        _set(change.where, change.new)
        said(change.line())


def undo(state: Path, said: Callable[[str], None], dry: bool = False) -> int:
    """Put the old values back, the last first; how many. Raises SetupError as `apply` does."""
    done, count = recorded(state), 0
    while done:
        change = done.pop()
        now = _now(change.where)
        if now is None:
            said(f"{change.where}: is not there any more")
        elif not _same(change.where, now, change.new):
            said(f"{change.where}: is {now}, not the {change.new} that was set: left as it is")
        else:
            if not dry:
                _set(change.where, change.old)
            said(f"{change.where}: {change.new} -> {change.old}")
            count += 1
        if not dry:
            _write(state, done)
    if not dry:
        state.unlink(missing_ok=True)
    return count
