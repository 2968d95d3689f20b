"""What `evener launch` and `evener why` saw of each rank from outside: a JSON document a rank."""

from __future__ import annotations

from typing import Any

from evener.tools.analyze.evidence.records import NO_OOM, Evidence, Exit, Seen, Sign
from evener.tools.analyze.words import ranges

_FRAMES = 60


def is_seen(document: Any) -> bool:
    """Whether a value is such a document."""
    return isinstance(document, dict) and document.get("evener_seen") == 1


def is_watch(document: Any) -> bool:
    """Whether a value says how a job was watched."""
    return isinstance(document, dict) and document.get("evener_watch") == 1


def watch(document: dict[str, Any], where: int, evidence: Evidence) -> None:
    """Take what the watch said."""
    evidence.read["watch"] += 1
    evidence.moving = document.get("moving") is True
    evidence.world = max(evidence.world, min(_whole(document.get("ranks")), 1_000_000))
    by_memory = False
    for one in _list(document.get("exits"))[:10_000]:
        if isinstance(one, dict):
            status = one.get("status")
            status = status if isinstance(status, int) else 1
            killed = max(-status, 0)
            oom, rank = _whole(one.get("oom")), _whole(one.get("rank"))
            host = str(one.get("host", ""))[:80]
            by_memory = by_memory or (oom > 0 and killed == 9)
            if oom > 0 and killed == 9:
                text = f"the memory cgroup of rank {rank} counted a kill for memory"
                evidence.add(Sign("oom-kill", text, where, host, rank=rank))
            evidence.add(
                Exit(
                    rank, -1, _whole(one.get("pid")), host, killed, 0 if killed else status, where,
                    first=True, text=NO_OOM if oom == 0 else "",
                )
            )  # fmt: skip
    counted = sorted({_whole(rank) for rank in _list(document.get("oom"))[:1_000_000]} - {-1})
    if counted and not by_memory:
        # The exit that was noticed first is another rank's. One cgroup may hold several ranks.
        text = f"the memory cgroup of {'rank' if len(counted) == 1 else 'ranks'} {ranges(counted)} "
        rank = counted[0] if len(counted) == 1 else -1
        evidence.add(Sign("oom-kill", f"{text}counted a kill for memory", where, rank=rank))


def seen(document: dict[str, Any], where: int, evidence: Evidence) -> None:
    """Take one rank."""
    process = document.get("process")
    process = process if isinstance(process, dict) else {}
    main: tuple[str, ...] = ()
    threads: dict[str, tuple[str, ...]] = {}
    for thread in _list(document.get("threads"))[:1000]:
        if isinstance(thread, dict):
            frames = tuple(str(f)[:300] for f in _list(thread.get("frames"))[:_FRAMES])
            threads[str(thread.get("name", "?"))[:60]] = frames
            if thread.get("main") is True and not main:
                main = frames
    pending = document.get("pending")
    waits = tuple(
        str(name)[:120]
        for names in (pending.values() if isinstance(pending, dict) else ())
        for name in _list(names)[:1000]
    )
    rank = _whole(document.get("rank"))
    connections = tuple(
        (str(one.get("local"))[:60], str(one.get("remote"))[:60], _whole(one.get("unacked")),
         _whole(one.get("again")))
        for one in _list(document.get("sockets"))[:2000]
        if isinstance(one, dict)
    )  # fmt: skip
    cards = document.get("cards")
    down = tuple(
        str(name)[:40]
        for name, running in (list(cards.items())[:1000] if isinstance(cards, dict) else ())
        if running is False
    )
    memory = document.get("memory")
    memory = memory if isinstance(memory, dict) else {}
    submitted = {
        str(mark.get("what"))[:40]: _whole(mark.get("elements"))
        for mark in _list(document.get("marks"))[:1000]
        if isinstance(mark, dict) and mark.get("group") == "horovod"
    }
    evidence.add(
        Seen(
            rank, where, _whole(document.get("world")), str(document.get("host", ""))[:80],
            _whole(document.get("pid")), str(process.get("state", ""))[:1],
            str(process.get("wchan", ""))[:60], _whole(process.get("swap")),
            _whole(process.get("tracer")), str(document.get("place", ""))[:40],
            _real(document.get("place_s")), _whole(document.get("step")),
            _real(document.get("up_s")), _real(document.get("loader_s")),
            _real(document.get("clock_off_s")), main, threads, waits,
            str(document.get("stacks_from", ""))[:60], connections, down,
            _whole(document.get("looks")), _whole(document.get("waiting")),
            (_whole(memory.get("used")), _whole(memory.get("limit"))), submitted,
        )
    )  # fmt: skip
    if rank >= 0:
        evidence.ranks.setdefault(rank, where)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def _real(value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and abs(value) < 1e15 else -1.0
