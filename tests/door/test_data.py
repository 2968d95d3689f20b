"""Samplers where nodes come and go: `evener.door.data`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from evener.door import data


@pytest.fixture
def second_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of a node of two ranks, which has slot 1 of 3."""
    monkeypatch.setenv("EVENER_HUB_SLOT", "1/3")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "is_available", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)


@pytest.mark.usefixtures("second_of_three")
def test_a_sampler_that_shuffles_reads_its_share_of_all_nodes_data() -> None:
    class Sampler(DistributedSampler[Any]):
        pass

    data.divide_sampler(SimpleNamespace(DistributedSampler=Sampler))
    samples: Any = torch.arange(60)

    def of(*given: Any, **named: Any) -> tuple[int, int]:
        made = Sampler(samples, *given, **named)
        return made.rank, made.num_replicas

    assert of() == of(2, 1) == of(num_replicas=2, rank=1, shuffle=True) == (4, 6)
    assert len(set(Sampler(samples))) == 10
    assert of(shuffle=False) == of(2, 1, False) == (1, 2)  # it evaluates
    assert of(8, 5) == (5, 8)  # it has its reasons


@pytest.mark.usefixtures("second_of_three")
def test_so_does_accelerates() -> None:
    class Shard:
        def __init__(
            self, batch_sampler: Any, num_processes: int = 1, process_index: int = 0, more: int = 0
        ) -> None:
            self.found = process_index, num_processes, more

    data.divide_accelerate(SimpleNamespace(BatchSamplerShard=Shard))
    shuffled = BatchSampler(RandomSampler(range(9)), 2, False)
    plain = BatchSampler(SequentialSampler(range(9)), 2, False)
    assert Shard(shuffled, 2, 1, 7).found == (4, 6, 7)
    assert Shard(plain, num_processes=2, process_index=1).found == (1, 2, 0)
    data.divide_accelerate(SimpleNamespace())  # another version: said, and left
