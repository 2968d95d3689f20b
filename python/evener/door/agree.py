"""All ranks decide alike, in bounded time, whatever one of them thinks.

    go      the last rank that said yes wrote it
    left    the first rank that said no, or that waited too long, wrote it

The store's compare-and-set makes the first of these the only one. A collective would do it too, but
one that a rank does not join takes the process group with it; a key that nobody writes does not.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

_GO = "go"


def agree(key: str, no: str, group: dist.ProcessGroup | None, seconds: float) -> str:
    """Whether all ranks of `group` go on: empty, or why not, in words; the same on every rank.

    `key`: the same on all, used once. `no`: this rank's own reason against it, or empty. Waits for
    the others for `seconds` at most. Never raises.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    try:
        store: Any = dist.distributed_c10d._get_default_store()
        if no:
            return _settle(store, key, f"{no} (rank {rank})")
        if store.add(f"{key}/yes", 1) == size:
            return _settle(store, key, _GO)
        try:
            store.wait([key], datetime.timedelta(seconds=seconds))
        except dist.DistStoreError:
            return _settle(store, key, f"rank {rank} waited {seconds:g} s for the others")
        return _read(store.get(key))
    except Exception as error:  # noqa: BLE001 - a rank that cannot vote leaves things as they are
        return f"the ranks could not agree: {error}"


def _settle(store: Any, key: str, value: str) -> str:
    return _read(store.compare_set(key, "", value))


def _read(value: bytes) -> str:
    text = value.decode()
    return "" if text == _GO else text
