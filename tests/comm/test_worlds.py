"""The worlds of other tests: which hosts NCCL sees, and which Evener sees."""

from __future__ import annotations

import os

import pytest
from torch.nn.parallel import DistributedDataParallel

from evener.ddp import accelerate
from tests import gpus, worlds
from tests.comm import models


@pytest.mark.parametrize(
    ("shape", "count", "expected"),
    [
        ([2, 2], 4, False),
        ([2, 2], 2, False),  # ranks 0 and 2 share one, and are on different hosts
        ([1, 1, 1, 1], 1, False),
        ([2, 2], 1, True),
        ([3, 1], 2, True),
        ([2, 1], 2, False),
        ([2], 1, True),
    ],
)
def test_whether_ranks_of_a_host_share_a_gpu(shape: list[int], count: int, expected: bool) -> None:
    hosts = [f"h{node}" for node, ranks in enumerate(shape) for _ in range(ranks)]
    assert gpus.doubled(hosts, count) == expected


def on_one_gpu(rank: int, size: int) -> tuple[str, tuple[int, ...]]:
    os.environ.update(worlds.names(os.environ["NCCL_HOSTID"], rank, True))
    model = accelerate(DistributedDataParallel(models.seeded(), find_unused_parameters=True))
    return os.environ["NCCL_HOSTID"], model.evener.communicators.route.levels.sizes


def test_nccl_has_a_host_per_rank_and_evener_has_nodes() -> None:
    """What a rank is told where several of a host share a GPU; without one, on Gloo."""
    found = worlds.run([2, 1], on_one_gpu)
    assert found == [("host0.0", (2, 1)), ("host0.1", (2, 1)), ("host1.2", (2, 1))]
