"""How many ranks the GPUs of this machine take in a test.

One each. With NVIDIA's MPS (`nvidia-cuda-mps-control -d`) several, as long as ranks that share a
GPU pretend to be on hosts of their own: NCCL refuses two ranks of one host on one GPU. So one GPU
does for tests of 1 + 1 or 1 + 1 + 1 + 1 ranks, and two do for 2 + 2.
"""

from __future__ import annotations

import pytest
import torch

from evener.lab.environment import mps


def of(rank: int) -> int:
    """The number of the GPU that `rank` has: its own, or one that ranks of other hosts share."""
    return rank % torch.cuda.device_count()


def pair() -> list[int]:
    """Ranks per host of two ranks: one host where each has a GPU, else two that share one."""
    return [2] if torch.cuda.device_count() >= 2 else [1, 1]


def needs(*hosts: int) -> pytest.MarkDecorator:
    """Skips a test of these numbers of ranks per host where the GPUs do not do for it."""
    ranks, largest, found = sum(hosts), max(hosts), torch.cuda.device_count()
    reason = f"needs {ranks} GPUs, or {largest} and NVIDIA's MPS"
    enough = found >= ranks or (found >= largest and ranks % found == 0 and mps() is not None)
    return pytest.mark.skipif(not enough, reason=reason)
