"""NCCL Inspector's JSON lines: each finished collective of each rank, with its time inside."""

from __future__ import annotations

import json
from typing import Any

from evener.tools.analyze.evidence.records import Evidence, Timing

WORDS = (b'"coll_perf"', b'"coll_exec_time_us"')


def line(text: bytes, where: int, evidence: Evidence) -> bool:
    """Take a JSON line; whether it was one of Inspector's."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return False
    if not isinstance(record, dict):
        return False
    head, what = _dict(record.get("header")), _dict(record.get("coll_perf"))
    meta = _dict(record.get("metadata"))
    if not what:
        what = record
    micros, seq = what.get("coll_exec_time_us"), what.get("coll_sn")
    rank = head.get("rank", record.get("rank"))
    if not isinstance(micros, int | float) or not isinstance(seq, int) or not isinstance(rank, int):
        return False
    ranks = head.get("n_ranks", record.get("n_ranks"))
    size = what.get("coll_msg_size_bytes")
    evidence.add(
        Timing(
            str(head.get("id", record.get("id", "")))[:60],
            rank,
            ranks if isinstance(ranks, int) else 0,
            str(what.get("coll", ""))[:40],
            seq,
            size if isinstance(size, int) else 0,
            float(micros),
            str(meta.get("hostname", ""))[:200],
            where,
        )
    )
    return True


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
