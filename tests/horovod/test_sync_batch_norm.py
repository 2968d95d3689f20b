"""SyncBatchNorm against torch's BatchNorm of all ranks' batches in one."""

from __future__ import annotations

import pytest
import torch

import evener.horovod.torch as hvd
from tests import worlds


def batches(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """One a rank, of different lengths, far from zero."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn((2 + rank, 3, *shape), generator=generator, dtype=dtype) + 100.0
        for rank in range(size)
    ]


def compare(rank: int, size: int) -> None:
    hvd.init()
    for shape, momentum, affine in (((), 0.1, True), ((4,), None, True), ((2, 3), 0.5, False)):
        for dtype in (torch.float32, torch.float64):
            mine = hvd.SyncBatchNorm(3, momentum=momentum, affine=affine, dtype=dtype)
            kind = torch.nn.BatchNorm2d if len(shape) == 2 else torch.nn.BatchNorm1d
            theirs = kind(3, momentum=momentum, affine=affine, dtype=dtype)
            if affine:
                for module in (mine, theirs):
                    torch.nn.init.constant_(module.weight, 1.5)
                    torch.nn.init.constant_(module.bias, -0.5)
            close = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {}
            for step in range(2):
                parts = [part + step for part in batches(size, shape, dtype)]
                whole = torch.cat(parts).requires_grad_()
                here = parts[rank].clone().requires_grad_()
                start = sum(len(part) for part in parts[:rank])
                out, want = mine(here), theirs(whole)
                torch.testing.assert_close(out, want[start : start + len(here)], **close)
                mine.zero_grad()
                theirs.zero_grad()
                out.square().sin().sum().backward()
                want.square().sin().sum().backward()
                torch.testing.assert_close(
                    here.grad, whole.grad[start : start + len(here)], **close
                )
                if affine:
                    for own, other in zip(mine.parameters(), theirs.parameters(), strict=True):
                        total = hvd.allreduce(own.grad, op=hvd.Sum)
                        torch.testing.assert_close(total, other.grad, rtol=1e-3, atol=1e-3)
                torch.testing.assert_close(mine.running_mean, theirs.running_mean)
                torch.testing.assert_close(mine.running_var, theirs.running_var)
            mine.eval()
            theirs.eval()
            with torch.no_grad():  # no collective: the ranks may do different things
                torch.testing.assert_close(mine(parts[rank]), theirs(parts[rank]), **close)
    with pytest.raises(ValueError, match="at least 2D"):
        hvd.SyncBatchNorm(3)(torch.ones(3))


@pytest.mark.parametrize("ranks", [1, 3])
def test_it_normalises_by_all_batches_together(ranks: int) -> None:
    worlds.run([ranks], compare)


def without_running_values(rank: int, size: int) -> None:
    hvd.init()
    norm = hvd.SyncBatchNorm(3, track_running_stats=False).eval()
    parts = batches(size, (), torch.float32)
    want = torch.nn.BatchNorm1d(3, track_running_stats=False)(torch.cat(parts))
    start = sum(len(part) for part in parts[:rank])
    got = norm(parts[rank])
    torch.testing.assert_close(got, want[start : start + len(got)], rtol=1e-3, atol=1e-4)


def test_without_running_values_eval_is_collective_too() -> None:
    worlds.run([2], without_running_values)
