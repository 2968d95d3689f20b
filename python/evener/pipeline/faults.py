"""The errors of a pipeline, which every rank hears of in time: see `comm.watch`."""

from __future__ import annotations

import torch.distributed as dist

from evener.comm import watch


class PipelineError(watch.RankError):
    """A step failed, on this rank or on another. `rank`: where; -1: not known."""


class Watch(watch.Watch):
    """The watch of one pipeline."""

    def __init__(self, name: str, rank: int, ranks: int, groups: list[dist.ProcessGroup]) -> None:
        super().__init__(
            name, rank, ranks, groups, what="pipeline", error=PipelineError,
            memory="plan with a lower memory=, more microbatches, more stages or recompute=True",
        )  # fmt: skip
