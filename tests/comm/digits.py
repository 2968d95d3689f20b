"""A small CNN on scikit-learn's digits, trained by several ranks: does compression cost accuracy?

Digits ship with scikit-learn: 1,797 pictures of 8 x 8, nothing to download.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from evener.ddp import accelerate

TEST = 360
EPOCHS = 25
BATCH = 32


def data() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target)


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train(rank: int, size: int, wire: str, ratio: float, seeds: list[int]) -> list[float]:
    """Accuracy on the held-out pictures, per cent, one figure a seed; the same on all ranks."""
    images, labels = data()
    found = []
    for seed in seeds:
        split = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
        test, rest = split[:TEST], split[TEST:]
        torch.manual_seed(seed)
        model = accelerate(DistributedDataParallel(cnn()), mode=wire, ratio=ratio)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.15)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(EPOCHS):
            order = rest[torch.randperm(len(rest), generator=generator)]
            for start in range(0, len(order) - BATCH * size + 1, BATCH * size):
                mine = order[start + rank * BATCH : start + (rank + 1) * BATCH]
                optimizer.zero_grad()
                cross_entropy(model(images[mine]), labels[mine]).backward()
                optimizer.step()
        with torch.no_grad():
            right = (model.module(images[test]).argmax(1) == labels[test]).float().mean()
        found.append(100 * right.item())
        model.evener.close()
    return found


def both(rank: int, size: int, seeds: list[int]) -> tuple[list[float], list[float]]:
    """Exact and top-k 1%, on the same seeds."""
    return train(rank, size, "exact", 1.0, seeds), train(rank, size, "topk", 0.01, seeds)
