"""How many ranks the GPUs of this machine take in a test.

One each; or any number of ranks per GPU, with NVIDIA's MPS (`nvidia-cuda-mps-control -d`). NCCL
refuses two ranks of one host on one GPU. Where a test would have such ranks, every rank is an NCCL
host of its own (`worlds.run`), while Evener sees the test's hosts. So one GPU does for 2 + 2 and
3 + 1 ranks.

Such a run shows that results are right: streams, kernels, groups, the order of collectives. It
shows nothing of NVLink, of copies between GPUs, of GPUs with other numbers than 0, nor of speed:
ranks of a node talk through NCCL's sockets, as those of different nodes do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from evener.tools.lab.environment import mps

if TYPE_CHECKING:
    import pytest


def of(rank: int) -> int:
    """The number of the GPU that `rank` has: its own, or one that ranks share."""
    return rank % torch.cuda.device_count()


def pair() -> list[int]:
    """Ranks per host of two ranks: one host where each has a GPU, else two that share one."""
    return [2] if torch.cuda.device_count() >= 2 else [1, 1]


def doubled(hosts: list[str], gpus: int) -> bool:
    """Whether two ranks of one host share a GPU, where rank r is on `hosts[r]`."""
    places = [(host, rank % gpus) for rank, host in enumerate(hosts)]
    return len(set(places)) < len(places)


def needs(*hosts: int) -> pytest.MarkDecorator:
    """Skips a test of these numbers of ranks per host where the GPUs do not do for it."""
    ranks, found = sum(hosts), torch.cuda.device_count()
    reason = f"needs {ranks} GPUs, or one and NVIDIA's MPS (nvidia-cuda-mps-control -d)"
    enough = found >= ranks or (found > 0 and mps() is not None)
    import pytest  # not in the environments of tests/wild, which use the worlds too

    return pytest.mark.skipif(not enough, reason=reason)
