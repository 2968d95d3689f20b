"""Samplers of a job whose nodes come and go: each rank's share among the ranks of all nodes.

A sampler asks torch.distributed, which knows this node alone, so all nodes would train on the same
samples. What shuffles is for training, and gets this rank's share of all (`evener.ddp.data_shard`).
What does not shuffle is left as it is: it evaluates, and each node then has the figures of all
samples. Where a script divides data by another number of ranks than its own, it has its reasons.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

logger = logging.getLogger("evener.door")
_said: set[str] = set()

SAMPLER = "torch.utils.data.distributed"
ACCELERATE = "accelerate.data_loader"


def divide_sampler(module: Any) -> None:
    """Stand around DistributedSampler's constructor. Never raises."""
    kind = module.DistributedSampler
    inner = kind.__init__

    @functools.wraps(inner)
    def begin(
        self: Any,
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if _is_own(rank, num_replicas) and _divides("DistributedSampler", shuffle):
            rank, num_replicas = _share()
        inner(self, dataset, num_replicas, rank, shuffle, *args, **kwargs)

    kind.__init__ = begin


def divide_accelerate(module: Any) -> None:
    """The same for Accelerate, which Trainer stands on. Never raises."""
    kind = getattr(module, "BatchSamplerShard", None)
    if kind is None:
        logger.warning("EVENER_HUB_SLOT: Accelerate's samplers are not divided among nodes")
        return
    inner = kind.__init__

    @functools.wraps(inner)
    def begin(
        self: Any,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        from torch.utils.data import SequentialSampler

        shuffles = not isinstance(getattr(batch_sampler, "sampler", None), SequentialSampler)
        if _is_own(process_index, num_processes) and _divides("Accelerate's sampler", shuffles):
            process_index, num_processes = _share()
        inner(self, batch_sampler, num_processes, process_index, *args, **kwargs)

    kind.__init__ = begin


def _is_own(rank: int | None, size: int | None) -> bool:
    """Whether these are this process's place among the ranks that torch.distributed knows."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return False
    return rank in (None, dist.get_rank()) and size in (None, dist.get_world_size())


def _share() -> tuple[int, int]:
    from evener.ddp import data_shard

    return data_shard()


def _divides(what: str, shuffles: bool) -> bool:
    if (said := f"{what}{shuffles}") not in _said:
        _said.add(said)
        if shuffles:
            logger.info("%s: this rank reads share %d of %d, of all nodes' data", what, *_share())
        else:
            logger.info(
                "%s without shuffling: each node reads all of it, as evaluation does; for training "
                "divide by evener.ddp.data_shard()",
                what,
            )
    return shuffles
