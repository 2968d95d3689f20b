"""From what a line has (a process, a bus, a device) to the rank that it is about."""

from __future__ import annotations

from collections.abc import Iterable

from evener.tools.analyze.picture import Picture
from evener.tools.analyze.words import ranges


def world_size(picture: Picture) -> int:
    """Ranks of the job, as far as any line says: 0 where none does."""
    run = picture.run
    sizes = [comm.size for comm in run.communicators]
    sizes += [len(table.devices) for table in run.tables]
    sizes += [exit_.rank + 1 for exit_ in run.evidence.exits]
    sizes += [
        max(members, default=-1) + 1
        for dump in run.evidence.dumps
        for _, members in dump.groups.values()
    ]
    return max([run.evidence.world, *sizes], default=0)


def silent(picture: Picture) -> list[int]:
    """The ranks that left no error where others did, if they are half of the job at most."""
    evidence = picture.run.evidence
    spoke = {one.rank for one in evidence.raised if one.rank >= 0}
    sizes = [world_size(picture), *(one.world for one in evidence.seen)]
    size = max([*sizes, *(rank + 1 for rank in {*spoke, *evidence.ranks})])
    found = sorted(set(range(size)) - spoke) if spoke else []
    return found if len(found) * 2 <= size else []


def of_process(picture: Picture, host: str, pid: int) -> int:
    """The rank of a process, -1 where nothing tells. A host that is not named fits any."""
    found = set()
    for comm in picture.run.communicators:
        if comm is not picture.world and picture.world is not None:
            continue
        found |= {m.rank for m in comm.members.values() if m.pid == pid and host in ("", m.host)}
    found |= {e.rank for e in picture.run.evidence.exits if e.pid == pid >= 0 and e.rank >= 0}
    return found.pop() if len(found) == 1 else -1


def of_bus(picture: Picture, bus: str, host: str) -> int:
    """The rank whose GPU is at a bus address such as `dc:00`, -1 where nothing tells."""
    world = picture.world
    if world is None:
        return -1
    found = {
        m.rank
        for m in world.members.values()
        if host in ("", m.host) and m.bus and _short(m.bus) == bus
    }
    return found.pop() if len(found) == 1 else -1


def _short(bus: str) -> str:
    """NCCL's bus id (`81000`: bus, device and function as digits) as `81:00`."""
    if ":" in bus:
        parts = bus.lower().split(":")
        return f"{parts[-2]}:{parts[-1].split('.')[0]}"
    digits = bus.lower().rjust(5, "0")
    return f"{digits[-5:-3]}:{digits[-3:-1]}"


def ranks(numbers: Iterable[int], most: int = 12) -> str:
    """`rank 3`, `ranks 2 and 6`, `ranks 0-3, 7`."""
    known = sorted(set(numbers))
    if len(known) == 1:
        return f"rank {known[0]}"
    if len(known) == 2:
        return f"ranks {known[0]} and {known[1]}"
    text = ranges(known)
    parts = text.split(", ")
    if len(parts) > most:
        text = ", ".join(parts[:most]) + f" and {len(known)} in all"
    return f"ranks {text}"
