"""Evener under every model that a program shards with `fully_shard`, without a changed line.

    EVENER_FSDP=exact torchrun --nproc-per-node 8 train.py

`fully_shard` leaves a hook on each module. The first one that runs in a forward pass is the root's:
FSDP2 finds its root the same way. There all ranks vote, by the store, and Evener comes in as by
`evener.fsdp.accelerate(model, mode=)`; what cannot be stays plain FSDP2 on all ranks alike, and
rank 0 says why. Never raises.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from evener.base import settings
from evener.door.agree import agree
from evener.errors import UsageError

logger = logging.getLogger("evener.door")

# Votes that each set of ranks has held: the same number on all of them.
_votes: dict[tuple[int, ...], int] = {}


def around(fully_shard: Any, ran: Callable[[], None]) -> Any:
    """`fully_shard` as it is, and a look at what it was applied to when that runs first.

    `ran` is called then, too.
    """

    @functools.wraps(fully_shard)
    def sharding(module: Any, *args: Any, **kwargs: Any) -> Any:
        found = fully_shard(module, *args, **kwargs)
        for each in module if isinstance(module, list | tuple) else [module]:
            _look_at_first_forward(each, ran)
        return found

    return sharding


def _look_at_first_forward(module: Any, ran: Callable[[], None]) -> None:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def first(root: Any, *_: Any) -> None:
        handle.remove()
        if not getattr(root, "_evener_seen", False):
            for part in root.modules():
                object.__setattr__(part, "_evener_seen", True)
            ran()
            _enter(root)

    handle = module.register_forward_pre_hook(first, prepend=True)


def _enter(root: Any) -> None:
    """Put Evener under `root`, or leave it; all ranks of its mesh alike."""
    name = type(root).__name__.removeprefix("FSDP")
    try:
        why = _try_to_enter(root)
    except Exception as error:  # noqa: BLE001 - a program that never asked must run
        why = _one_line(error)
    if dist.get_rank() == 0:
        if why:
            logger.warning("EVENER_FSDP: %s is left as it is: %s", name, why)
        elif why is not None:
            logger.info("EVENER_FSDP=%s: %s goes on with Evener", settings.EVENER_FSDP.get(), name)


def _try_to_enter(root: Any) -> str | None:
    """Why not, in words; empty where Evener is in, None where there is nobody to talk to."""
    from evener import fsdp

    mesh = fsdp.mesh_of(root)
    if mesh.ndim != 1:
        return "its mesh has replicas; evener.fsdp.accelerate(model) averages them"
    group = mesh.get_group()
    if dist.get_world_size(group) == 1:
        return None
    no, seconds, how, floor = "", 60.0, ("exact", "host"), None
    try:
        seconds = settings.EVENER_TIMEOUT.get()
        how = (settings.EVENER_FSDP.get(), settings.EVENER_FSDP_MIRROR.get())
        if how[0] == "auto":
            floor = settings.EVENER_FLOOR.get() or None
        if getattr(root, "evener", None) is not None:
            no = "the script calls evener.fsdp.accelerate itself"
    except UsageError as error:
        no = _one_line(error)
    ranks = tuple(dist.get_process_group_ranks(group))
    _votes[ranks] = _votes.get(ranks, 0) + 1
    which = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    if why := agree(f"evener/fsdp/{which}/{_votes[ranks]}", no, group, seconds):
        return why
    fsdp.accelerate(root, mode=how[0], floor=floor, mirror=how[1])
    return ""


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, UsageError) else f"{type(error).__name__}: {text}"
