"""Lines that say which rank of which communicator a thread is setting up.

2.2    comm P rank r nranks n
2.4    comm P rank r nranks n cudaDev c nvmlDev d - Init COMPLETE
2.7    comm P rank r nranks n cudaDev c busId b - Init COMPLETE
2.16   ... commId 0x... - Init COMPLETE
2.18   ... nvmlDev d ..., and `Init START` before it
2.21   ncclCommInitRank comm P ...;  ncclCommSplit ... parent P color c key k ...
2.29   [Rank r] ncclCommInitRankConfig comm P ...
2.20   comm P rank r nRanks n nNodes k localRanks l localRank i MNNVL m   (in between)
RCCL   ... localSize 224 used 16777216 bytes on core 5 - Init COMPLETE
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(
    rb"comm (\S+) rank (\d{1,7}) n[rR]anks (\d{1,7}) cudaDev (\d{1,4})(?: nvmlDev (\d{1,4}))?"
    rb"(?: busId ([0-9a-fA-F]+))?(?: parent (\S+))?(?: splitCount (\d+))?"
    rb"(?: color (-?\d+) key (-?\d+))?(?: ?commId (0x[0-9a-fA-F]+))?"
    rb"(?: localSize \d+ used \d+ bytes(?: on core -?\d+)?)? ?- Init (START|COMPLETE)"
)
_BARE = re.compile(rb"comm (0x\w+) rank (\d{1,7}) nranks (\d{1,7})$")
_LAYOUT = re.compile(
    rb"comm (\S+) rank (\d{1,7}) nRanks (\d{1,7}) nNodes (\d{1,7})"
    rb" localRanks (\d{1,6}) localRank (\d{1,6})"
)
_VERSION = re.compile(rb"NCCL version (\d+\.\d+\.\d+[^\s+]*)|RCCL version ?:? ?(\d+\.\d+\.\d+)")


@dataclass(frozen=True, slots=True)
class CommInit:
    """One end of a communicator's set-up on one rank."""

    pointer: str
    rank: int
    ranks: int
    cuda_device: int
    nvml_device: int | None
    bus: str
    parent: str
    split: str
    comm_id: str
    done: bool


@dataclass(frozen=True, slots=True)
class CommLayout:
    """How a communicator's ranks lie on nodes, as NCCL counted them."""

    pointer: str
    rank: int
    ranks: int
    nodes: int
    local_ranks: int
    local_rank: int


def init(message: bytes) -> CommInit | CommLayout | None:
    """The record in an init line, None where it is none."""
    if found := _LINE.search(message):
        (pointer, rank, ranks, cuda, nvml, bus, parent, count, color, _key, comm_id, word) = (
            found.groups()
        )
        return CommInit(
            pointer=pointer.decode("ascii", "replace"),
            rank=int(rank),
            ranks=int(ranks),
            cuda_device=int(cuda),
            nvml_device=int(nvml) if nvml is not None else None,
            bus=bus_id(bus.decode("ascii")) if bus else "",
            parent=parent.decode("ascii", "replace") if parent else "",
            split=f"{(count or b'').decode()}/{(color or b'').decode()}" if parent else "",
            comm_id=comm_id.decode("ascii") if comm_id else "",
            done=word == b"COMPLETE",
        )
    if found := _LAYOUT.search(message):
        pointer, *numbers = found.groups()
        return CommLayout(pointer.decode("ascii", "replace"), *(int(n) for n in numbers))
    if found := _BARE.match(message):
        return CommLayout(found[1].decode(), int(found[2]), int(found[3]), 0, 0, 0)
    return None


def bus_id(text: str) -> str:
    """NCCL's packed bus id (`1b000`, `0xf`) as `domain:bus:device.function` without guessing.

    The packed form is domain(16) bus(8) device(8) function(4), hexadecimal (ncclTopoXml's
    int64ToBusId).
    """
    value = int(text, 16)
    domain, bus, device = value >> 20 & 0xFFFF, value >> 12 & 0xFF, value >> 4 & 0xFF
    return f"{domain:04x}:{bus:02x}:{device:02x}.{value & 15:x}"


def version(line: bytes) -> str | None:
    """`2.28.9` of `NCCL version 2.28.9+cuda13.0`, `RCCL 2.22.3` of `RCCL version : 2.22.3-HEAD`."""
    found = _VERSION.search(line)
    if not found:
        return None
    if found[2]:
        return f"RCCL {found[2].decode('ascii')}"
    return found[1].decode("ascii", "replace")
