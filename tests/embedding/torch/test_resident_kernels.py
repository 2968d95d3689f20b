"""Resident tables through the kernels of GPUs, in Triton's interpreter, beside torch's operations.

Each kernel has its own test (`test_kernels`); here they are what a collection trains by.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch

from evener.embedding.torch import DynamicOptimizer, kernels, routes
from tests import worlds
from tests.embedding.torch.test_kernels import run
from tests.embedding.torch.test_resident import collection, draw, loss_of, rows_of

Trained = tuple[list[torch.Tensor], dict[str, dict[int, np.ndarray]]]


def _train(fast: bool, rank: int) -> Trained:
    """Values of each step, and all rows; batches of one size and of another, which sends tables."""
    with mock.patch.object(kernels, "on", lambda _: fast):
        model = collection(True)
        optimizer = DynamicOptimizer(model)
        seen = []
        for i, batch in enumerate((7, 30, 7)):
            given = draw(10 * i + rank, batch)
            pooled = model(given)
            whole = pooled.values()
            seen.append(whole.detach().clone())
            # The whole, the whole and a feature, and a feature alone.
            part = pooled[pooled.keys()[i]]
            loss = loss_of(whole) if i < 2 else part.square().sum()
            (loss + part.sum() if i == 1 else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        return seen, rows_of(model)


def both(rank: int, _size: int) -> None:
    torch.set_num_threads(1)
    (values, rows), (wanted, right) = (_train(fast, rank) for fast in (True, False))
    device = torch.device("cpu")
    tried = (kernels._pools(8, device), kernels._adds(8, device), kernels._numbers(device))
    assert all(tried) and routes._routes(device), tried
    assert torch.equal(values[0], wanted[0])
    for mine, other in zip(values, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    for table, own in right.items():
        assert rows[table].keys() == own.keys()
        for key, row in own.items():
            np.testing.assert_allclose(rows[table][key], row, rtol=1e-5, atol=1e-5)


def everywhere() -> None:
    """On one rank, and on three of two hosts; Triton takes its interpreter when it is imported."""
    for shape in ([1], [1, 2]):
        worlds.run(shape, both, timeout=160)


@pytest.mark.timeout(180)
def test_a_collection_trains_by_kernels_as_by_torch() -> None:
    run(
        "from tests.embedding.torch import test_resident_kernels as t; t.everywhere()",
        TRITON_INTERPRET="1",
    )
