"""All operations of `horovod.torch`: values, gradients, process sets, join."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import evener.horovod.torch as hvd
from evener.horovod.adasum import combine
from tests import worlds

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


def grouped(rank: int, size: int) -> None:
    for dtype in DTYPES:
        mine = [torch.full((2, 3), rank + i, dtype=dtype) for i in range(4)]
        want = [sum(r + i for r in range(size)) for i in range(4)]
        for got, expected in zip(hvd.grouped_allreduce(mine, op=hvd.Sum), want, strict=True):
            assert got.dtype == dtype
            assert got.eq(expected).all()
        handle = hvd.grouped_allreduce_async_(mine, op=hvd.Sum, name="group")
        assert hvd.synchronize(handle) == mine
        assert [t[0, 0].item() for t in mine] == want
        rows = [torch.full((rank + i, 2), rank, dtype=dtype) for i in range(2)]
        for i, got in enumerate(hvd.grouped_allgather(rows)):
            assert got[:, 0].tolist() == [r for r in range(size) for _ in range(r + i)]
        parts = hvd.grouped_reducescatter(
            [torch.full((size + 1, 2), 2, dtype=dtype), torch.ones(1, dtype=dtype)], op=hvd.Sum
        )
        assert parts[0].shape == (2 if rank == 0 else 1, 2)
        assert parts[0].eq(2 * size).all()
        assert parts[1].tolist() == ([size] if rank == 0 else [])
    mixed = hvd.grouped_allreduce([torch.ones(2), torch.ones(3, dtype=torch.int64)], op=hvd.Sum)
    assert [t.dtype for t in mixed] == [torch.float32, torch.int64]
    assert mixed[1].tolist() == [size] * 3
    with pytest.raises(ValueError, match="one tensor at least"):
        hvd.grouped_allreduce([])


def scattered(rank: int, size: int) -> None:
    whole = torch.arange(2.0 * size + 1)
    start = [0, *[r * 2 + 1 for r in range(1, size)], 2 * size + 1]
    want = whole[start[rank] : start[rank + 1]]
    assert torch.equal(hvd.reducescatter(whole), want)
    scaled = hvd.reducescatter(whole, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    assert torch.equal(scaled, want * size * 1.5)
    numbers = hvd.reducescatter(torch.full((size,), -3, dtype=torch.int32) * (rank == 0))
    assert numbers.tolist() == [int(-3 / size)]
    assert torch.equal(hvd.reducescatter(whole * (rank + 1), op=hvd.Max), want * size)
    with pytest.raises(hvd.HorovodInternalError, match="rank-zero tensor"):
        hvd.reducescatter(torch.tensor(1.0))
    with pytest.raises(hvd.HorovodInternalError, match="Adasum"):
        hvd.reducescatter(whole, op=hvd.Adasum)
    x = torch.ones(size * 2, requires_grad=True)
    (hvd.reducescatter(x, op=hvd.Sum) * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [(r + 1.0) * size for r in range(size) for _ in range(2)]


def exchanged(rank: int, size: int) -> None:
    for dtype in [*DTYPES, torch.bool]:
        # Rank r sends r + 1 rows to rank 0 and none to the others.
        splits = [rank + 1] + [0] * (size - 1)
        source = torch.full((rank + 1, 2), rank, dtype=torch.int64).to(dtype)
        got, received = hvd.alltoall(source, splits)
        mine = [r + 1 for r in range(size)] if rank == 0 else [0] * size
        assert received.tolist() == mine
        assert received.dtype == torch.int32
        want = [r for r, count in enumerate(mine) for _ in range(count)]
        assert torch.equal(got[:, 0], torch.tensor(want, dtype=torch.int64).to(dtype))
    equal = hvd.alltoall(torch.arange(size * 2) + 100 * rank)
    assert equal.tolist() == [100 * r + 2 * rank + i for r in range(size) for i in range(2)]
    x = torch.ones(size, requires_grad=True)
    (hvd.alltoall(x) * torch.arange(1.0, size + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [rank + 1.0] * size
    for splits, match in (
        ([size] * size, "sum to"),
        ([1] * (size + 1), "one number for each"),
        (torch.ones(size), "32-bit"),
        ([-1] * size, "sum to"),
    ):
        with pytest.raises(ValueError, match=match):
            hvd.alltoall(torch.ones(size), splits)
    with pytest.raises(ValueError, match="divides"):
        hvd.alltoall(torch.ones(size + 1))


def sparse(rank: int, size: int) -> None:
    indices = torch.tensor([[rank, 2], [0, 1]])
    mine = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (3, 2))
    got = hvd.sparse_allreduce_async(mine, name="sparse", op=hvd.Average)()
    dense = [torch.zeros(3, 2) for _ in range(size)]
    for r in range(size):
        dense[r][r, 0] += 1
        dense[r][2, 1] += 2
    assert torch.equal(got.to_dense(), torch.stack(dense).mean(0))
    with pytest.raises(ValueError, match="sparse tensors"):
        hvd.sparse_allreduce_async(torch.ones(1), name="dense")


def adasum(rank: int, size: int) -> None:
    vectors = [torch.randn(33, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    want = combine(vectors[0], vectors[1])
    got = hvd.allreduce(vectors[rank], op=hvd.Adasum)
    torch.testing.assert_close(got, want)
    parallel = hvd.allreduce(torch.ones(5) * 4, op=hvd.Adasum)
    torch.testing.assert_close(parallel, torch.ones(5) * 4)
    apart = hvd.allreduce(torch.eye(2)[rank], op=hvd.Adasum)
    assert apart.tolist() == [1.0, 1.0]
    assert hvd.allreduce(torch.zeros(2, dtype=torch.float16), op=hvd.Adasum).tolist() == [0, 0]
    with pytest.raises(ValueError, match="floating-point"):
        hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Adasum)


def joined(rank: int, size: int) -> None:
    for first in range(size):
        if rank != first:
            for i in range(3):  # the joined rank contributes zeros; an average divides by all
                got = hvd.allreduce(torch.full((2,), 4.0), name=f"left {i}")
                assert got.tolist() == pytest.approx([4.0 * (size - 1) / size] * 2)
            assert hvd.grouped_allreduce([torch.ones(1)] * 2, op=hvd.Sum)[1].item() == size - 1
            for refused in (
                lambda: hvd.allgather(torch.ones(1)),
                lambda: hvd.broadcast(torch.ones(1), rank),
                lambda: hvd.alltoall(torch.ones(size)),
                lambda: hvd.reducescatter(torch.ones(size)),
            ):
                with pytest.raises(hvd.HorovodInternalError, match="not supported with Join"):
                    refused()
            time.sleep(0.05)
        last = hvd.join()
        assert last != first
        assert set(hvd.allgather(torch.tensor([last])).tolist()) == {last}


def everything(rank: int, size: int) -> None:
    hvd.init()
    for part in (grouped, scattered, exchanged, sparse, adasum, joined):
        part(rank, size)
    hvd.shutdown()


def test_every_operation_on_two_ranks() -> None:
    worlds.run([2], everything)


def uneven(rank: int, size: int) -> None:
    hvd.init()
    for part in (grouped, scattered, exchanged, joined):
        part(rank, size)
    with pytest.raises(NotImplementedError, match="power of 2"):
        hvd.allreduce(torch.ones(1), op=hvd.Adasum)


def test_every_operation_on_three_ranks() -> None:
    worlds.run([3], uneven)


def parts(rank: int, size: int) -> dict[int, list[int]]:
    pair, last, again = hvd.ProcessSet([0, 1]), hvd.ProcessSet([2]), hvd.ProcessSet([1, 0])
    assert pair.size() is None
    hvd.init(process_sets=[pair, last, again])
    assert (pair.process_set_id, last.process_set_id, again.process_set_id) == (1, 2, None)
    assert hvd.global_process_set.ranks == [0, 1, 2]
    mine = pair if pair.included() else last
    assert mine.rank() == (rank if rank < 2 else 0)
    members = mine.ranks or []
    # More calls in one set than in the other: what has no name is counted by set.
    for _ in range(1 + 2 * (rank == 2)):
        got = hvd.allreduce(torch.tensor([float(rank)]), op=hvd.Sum, process_set=mine)
        assert got.item() == sum(members)
    assert hvd.allgather(torch.tensor([rank]), process_set=mine).tolist() == members
    root = members[-1]
    assert hvd.broadcast(torch.tensor(rank), root, process_set=mine).item() == root
    assert hvd.alltoall(torch.full((len(members),), rank), process_set=mine).tolist() == members
    hvd.barrier(process_set=mine)
    assert hvd.broadcast_object(rank, root, process_set=mine) == root
    if rank == 2:
        with pytest.raises(ValueError, match="rank 2 is not in process set 1"):
            hvd.allreduce(torch.ones(1), process_set=pair)
    with pytest.raises(ValueError, match="root_rank"):
        hvd.broadcast(torch.ones(1), 3 - root, process_set=mine)
    with pytest.raises(ValueError, match="does not exist"):
        hvd.allreduce(torch.ones(1), process_set=again)
    x = torch.ones(2, requires_grad=True)
    (hvd.allgather(x, process_set=mine) * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [sum(r + 1 for r in members) / len(members)] * 2

    outer = hvd.add_process_set([2, 0])
    assert outer.ranks == [0, 2]
    if rank != 1:
        assert hvd.allgather(torch.tensor([rank]), process_set=outer).tolist() == [0, 2]
    with pytest.raises(ValueError, match="exists already"):
        hvd.add_process_set([0, 2])
    with pytest.raises(ValueError, match="cannot be in a job of 3"):
        hvd.add_process_set([0, 7])
    with pytest.raises(hvd.HorovodInternalError, match="Mismatched process sets"):
        hvd.add_process_set([rank])
    # A barrier of one set does not hold up the other.
    if rank == 2:
        hvd.barrier(process_set=last)
    hvd.barrier()
    listed = hvd.get_process_set_ids_and_ranks()
    assert hvd.remove_process_set(outer)
    assert outer.process_set_id is None
    assert not hvd.remove_process_set(outer)
    assert not hvd.remove_process_set(hvd.global_process_set)
    again = hvd.add_process_set([0, 2])
    if rank != 1:
        got = hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=again)
        assert got.tolist() == [2]

    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=pair)
    model(torch.full((1, 2), float(rank))).sum().backward()
    optimizer.step()
    assert model.weight.tolist() == [[0.5, 0.5] if rank < 2 else [-1.0, -1.0]]
    return listed


def test_process_sets() -> None:
    found = worlds.run([3], parts)
    assert found == [{0: [0, 1, 2], 1: [0, 1], 2: [2], 3: [0, 2]}] * 3
