"""The ranks that share a model's states, and what their communicators take.

There are two communicators because two threads issue collectives: the loader gathers weights, the
training thread reduces gradients. Each thread's order is the same on every rank; how the two
interleave is not, and one communicator would need that too (ranks would wait for each other for
ever).

NCCL's buffers lie beside torch's allocator and grow with channels, peers and algorithms. So that a
budget can hold: channels are bounded, all collectives here are of the ring's kind (an all-reduce
would connect trees as well), and connections are made when the communicators are, before anything
is planned: what the driver's figure grew by is in the plan.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

CHANNELS = 8
"""Of each NCCL communicator, and so the multiprocessors that it takes from the model: well above
100 GB/s over NVLink, where a block's weights are needed at some tens of GB/s."""

WARM = 16 << 20
"""Elements of the first collectives: large enough for what NCCL chooses for a chunk."""


@dataclass(frozen=True)
class Ranks:
    """This rank's place. Without groups: it is alone, and no collective may be called."""

    rank: int = 0
    world: int = 1
    weights: dist.ProcessGroup | None = None
    gradients: dist.ProcessGroup | None = None
    bytes: int = 0
    """Accelerator memory of the communicators."""
    network: float = 0.0
    """Bytes/s that a rank receives in a gather (0: not measured)."""

    def gather(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        """`whole` [world * n] from every rank's `mine` [n]; on the loader's thread, or while it
        has nothing to do."""
        dist.all_gather_into_tensor(whole, mine, group=self.weights)

    def broadcast(self, values: torch.Tensor) -> None:
        """Rank 0's values to all; before training."""
        dist.broadcast(values, group_src=0, group=self.weights)

    def reduce(self, share: torch.Tensor, whole: torch.Tensor) -> None:
        """`share` [n] of the mean of every rank's `whole` [world * n]; on the training thread."""
        dist.reduce_scatter_tensor(share, whole, group=self.gradients)
        share /= self.world

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's scalar, the same bits on all; on the training thread."""
        every = torch.empty(self.world, dtype=value.dtype, device=value.device)
        dist.all_gather_into_tensor(every, value.reshape(1), group=self.gradients)
        return every.sum()

    def any(self, mine: torch.Tensor) -> torch.Tensor:
        """Where any rank's uint8 [n] is not zero; on the training thread."""
        every = torch.empty(self.world, mine.numel(), dtype=mine.dtype, device=mine.device)
        dist.all_gather_into_tensor(every.view(-1), mine, group=self.gradients)
        return every.amax(0)

    def agree(self, given: Any) -> Any:
        """Rank 0's object on all ranks."""
        held = [given]
        dist.broadcast_object_list(held, group=self.weights, group_src=0)
        return held[0]

    def largest(self, number: int, device: torch.device) -> int:
        """The largest of every rank's numbers."""
        every = torch.empty(self.world, dtype=torch.int64, device=device)
        mine = torch.tensor([number], dtype=torch.int64, device=device)
        self.gather(every, mine)
        return int(every.max())


def world_size() -> int:
    """Ranks of the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def meet() -> None:
    """All ranks of the default process group wait for each other."""
    if world_size() > 1:
        dist.barrier()


def join(device: torch.device) -> Ranks:
    """The ranks of the default process group, in communicators of their own; alone without one."""
    world = world_size()
    if world == 1:
        return Ranks()
    rank = dist.get_rank()
    if device.type != "cuda":
        return Ranks(rank, world, dist.new_group(), dist.new_group())
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    ranks = Ranks(rank, world, _bounded("weights"), _bounded("gradients"))
    for numel in (world, WARM // world * world):
        whole = torch.zeros(numel, dtype=torch.bfloat16, device=device)
        share = whole[: numel // world].clone()
        ranks.gather(whole, share)
        ranks.broadcast(whole)
        ranks.reduce(share, whole)
        ranks.total(share[:1])
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(4):
        ranks.gather(whole, share)
    torch.cuda.synchronize(device)
    rate = 4 * (whole.nbytes - share.nbytes) / (time.perf_counter() - start)
    del whole, share
    torch.cuda.empty_cache()
    after = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return replace(ranks, bytes=max(0, before - after), network=rate)


def _bounded(name: str) -> dist.ProcessGroup:
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = CHANNELS
    group: dist.ProcessGroup = dist.new_group(
        backend="nccl", pg_options=options, group_desc=f"evener {name}"
    )
    return group
