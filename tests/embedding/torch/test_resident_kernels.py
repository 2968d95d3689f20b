"""Resident tables through the kernels of GPUs, in Triton's interpreter, beside torch's operations.

Each kernel has its own test, and the trial before its first use too (`test_kernels`); here they are
what a collection trains by.
"""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest
import torch

from evener.embedding.torch import DynamicOptimizer, kernels
from tests import interpreted, worlds
from tests.embedding.torch.test_kernels import run
from tests.embedding.torch.test_resident import collection, draw, loss_of, rows_of

Trained = tuple[list[torch.Tensor], dict[str, dict[int, np.ndarray]]]


def _train(fast: bool, rank: int) -> Trained:
    """Values of each step, and all rows; batches of one size and of another, which sends tables."""
    from evener.embedding.torch import triton_bags, triton_route, triton_step

    modules = triton_bags, triton_bags, triton_route, triton_step, triton_step
    names = "pool", "take", "fill", "add_rows", "step"
    with ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(kernels, "on", lambda _: fast))
        enter(mock.patch.object(kernels, "tried", lambda *_: True))
        seen_by = [
            enter(mock.patch.object(module, name, wraps=getattr(module, name)))
            for module, name in zip(modules, names, strict=True)
        ]
        model = collection(True)
        optimizer = DynamicOptimizer(model)
        seen = []
        for i, batch in enumerate((3, 25, 4)):
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
        assert all(bool(each.call_count) == fast for each in seen_by)
        return seen, rows_of(model)


def both(rank: int, _size: int) -> None:
    torch.set_num_threads(1)
    interpreted.stay()
    values, rows = _train(True, rank)
    wanted, right = _train(False, rank)
    assert torch.equal(values[0], wanted[0])
    for mine, other in zip(values, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    for table, own in right.items():
        assert rows[table].keys() == own.keys()
        for key, row in own.items():
            np.testing.assert_allclose(rows[table][key], row, rtol=1e-5, atol=1e-5)


def everywhere() -> None:
    """On one rank and on two hosts; Triton takes its interpreter when it is imported."""
    for shape in ([1], [1, 1]):
        worlds.run(shape, both, timeout=160)


@pytest.mark.timeout(180)
def test_a_collection_trains_by_kernels_as_by_torch() -> None:
    run(
        "from tests.embedding.torch import test_resident_kernels as t; t.everywhere()",
        TRITON_INTERPRET="1",
    )
