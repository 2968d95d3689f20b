"""A sampler whose samples are shared out anew when ranks come or go."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data

from evener.horovod.torch.mpi_ops import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """The indices of a data set, in an order that all ranks know, dealt out to the ranks.

    What was done of an epoch (`record_batch`) is not done again after a change: put the sampler
    into a TorchState, and call `set_epoch` at the end of each epoch. As torch's DistributedSampler,
    it repeats some samples where their number cannot be divided by the ranks'.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        """seed: the same on all ranks; with the epoch's number it decides the order."""
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = 0
        self.processed_num = 0  # samples of this epoch that are done, by all ranks together
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin epoch `epoch`: nothing of it is done."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """All ranks have done a batch of `batch_size` samples each."""
        del batch_idx
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Deal out what is left of the epoch to the ranks that there are now."""
        self.num_replicas, self.rank = size(), rank()
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        left = self.remaining_indices
        rounds = -(-self.total_size // max(len(left), 1))
        padded = (left * rounds)[: self.total_size]
        self.indices = padded[self.rank :: self.num_replicas]
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
