"""PyTorch's flight recorder: a dict per rank, as a pickle or as JSON, versions 1 to 2.10.

Older versions name the group by `pg_name` or a pair in `process_group`, call the sequence `seq_id`,
and have no `pg_status`. JSON writes the same keys. The rank is in the file's name.
"""

from __future__ import annotations

import re
from typing import Any

from evener.tools.analyze.evidence.records import Dump, Evidence, Operation

_RANK = re.compile(r"(?:rank|trace)[_-]?(?:rank)?[_-]?(\d{1,6})(?!.*\d)|(\d{1,6})(?:\.\w+)*$")
_LIBRARY = re.compile(
    r"(?:^|/)(?:torch|torchvision|site-packages|dist-packages|lib/python3\.\d+|python/evener)/"
    r"|<frozen|^\?\?"
)


def is_dump(document: Any) -> bool:
    """Whether a value is a flight recorder's dump."""
    return (
        isinstance(document, dict)
        and isinstance(document.get("entries"), list)
        and ("version" in document or "pg_config" in document or "nccl_version" in document)
    )


def rank_of(name: str) -> int:
    """The rank that a file's name ends in, -1 where it has none."""
    base = name.rstrip("/").rsplit("/", 1)[-1]
    base = re.sub(r"\.(?:gz|zst|bz2|xz|json|pickle|pkl|bin|txt)\b", "", base)
    found = _RANK.search(base)
    return int(found[1] or found[2]) if found else -1


def dump(document: dict[str, Any], name: str, where: int, evidence: Evidence) -> None:
    """Take one dump."""
    number = document.get("rank")
    rank = number if isinstance(number, int) else rank_of(name)
    groups: dict[str, tuple[str, tuple[int, ...]]] = {}
    config = document.get("pg_config")
    for key, value in list(config.items())[:10_000] if isinstance(config, dict) else []:
        if isinstance(value, dict):
            members = value.get("ranks", "")
            numbers = (
                tuple(n for n in members if isinstance(n, int))
                if isinstance(members, list | tuple)
                else tuple(int(n) for n in re.findall(r"\d{1,6}", str(members)[:2_000_000]))
            )
            groups[str(key)] = (str(value.get("desc", ""))[:80], numbers)
    operations = [
        _operation(entry) for entry in document["entries"][-200_000:] if isinstance(entry, dict)
    ]
    status: dict[str, tuple[int, int]] = {}
    states = document.get("pg_status")
    for key, value in list(states.items())[:10_000] if isinstance(states, dict) else []:
        if isinstance(value, dict):
            status[str(key)] = (
                _number(value.get("last_enqueued_collective")),
                _number(value.get("last_completed_collective")),
            )
    evidence.add(
        Dump(rank, where, str(document.get("version", ""))[:20], groups, operations, status)
    )
    if rank >= 0:
        evidence.ranks.setdefault(rank, where)


def _operation(entry: dict[str, Any]) -> Operation:
    group = entry.get("process_group")
    if isinstance(group, list | tuple) and group:
        name = str(group[0])
    else:
        name = str(group if group is not None else entry.get("pg_name", entry.get("pg_id", "0")))
    p2p = bool(entry.get("is_p2p"))
    seq = entry.get("p2p_seq_id" if p2p else "collective_seq_id", entry.get("seq_id"))
    frames: list[str] = []
    for frame in _sequence(entry.get("frames")):
        if isinstance(frame, dict) and len(frames) < 100:
            frames.append(f"{frame.get('filename', '?')}:{frame.get('line', '?')}"[:300])
    op = str(entry.get("profiling_name", ""))
    return Operation(
        name[:80],
        _number(seq),
        op.rsplit(":", 1)[-1][:60],
        _sizes(entry.get("input_sizes")),
        _sizes(entry.get("output_sizes")),
        tuple(str(d)[:30] for d in _sequence(entry.get("input_dtypes"))[:64]),
        str(entry.get("state", ""))[:20],
        p2p,
        _number(entry.get("time_created_ns")),
        tuple(frames),
    )


def own_frame(frames: tuple[str, ...]) -> str:
    """The innermost frame outside of libraries, or the innermost."""
    return next((f for f in frames if not _LIBRARY.search(f)), frames[0] if frames else "")


def _sequence(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _sizes(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(n for n in _sequence(one)[:16] if isinstance(n, int)) for one in _sequence(value)[:64]
    )


def _number(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else -1
