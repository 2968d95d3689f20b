"""`horovod.torch` on GPUs: operations on the caller's stream order, the optimizer, broadcasts."""

from __future__ import annotations

import pytest
import torch

import evener.horovod.torch as hvd
from evener.horovod.state import STATE
from tests import gpus, worlds

pytestmark = [
    pytest.mark.gpu,
    gpus.needs(1, 1),
]
# What two ranks on one GPU talk through; Evener's plug-in is tested elsewhere.
ENV = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_NVLS_ENABLE": "0"}


def operations(rank: int, size: int) -> None:
    torch.cuda.set_device(gpus.of(rank))
    hvd.init()
    device = torch.device("cuda", gpus.of(rank))
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int16):
        x = torch.full((1 << 16,), rank + 1, dtype=dtype, device=device)
        for _ in range(20):  # work that is still in the stream when the operation is submitted
            x = x * 1
        assert hvd.allreduce(x, op=hvd.Sum).eq(3).all()
        assert hvd.allreduce(x, op=hvd.Max).eq(2).all()
        gathered = hvd.allgather(x[: rank + 1])
        assert gathered.tolist() == [1, 2, 2]
        assert hvd.broadcast(x, 1).eq(2).all()
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).to(device)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(10 * step + rank)
        model(torch.randn(16, 64, device=device)).square().sum().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])[None]
    both = hvd.allgather(flat)
    assert torch.equal(both[0], both[1])
    with pytest.raises(hvd.HorovodInternalError, match="CPU/GPU device selection"):
        hvd.allreduce(flat if rank else flat.cpu(), name="where")
    assert hvd.nccl_built() > 20000
    assert size == 2


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


def collectives(rank: int, size: int) -> None:
    """Every operation on GPU tensors, in every dtype; order, join, sets, the frozen schedule."""
    torch.cuda.set_device(gpus.of(rank))
    hvd.init()
    device = torch.device("cuda", gpus.of(rank))
    for dtype in DTYPES:
        x = torch.full((5, 2), rank + 1, dtype=dtype, device=device)
        assert hvd.allreduce(x, op=hvd.Product).eq(2).all()
        assert hvd.allreduce(x * 3, op=hvd.Min).eq(3).all()
        group = hvd.grouped_allreduce([x, x * 2], op=hvd.Sum)
        assert group[0].eq(3).all()
        assert group[1].eq(6).all()
        average = hvd.allreduce(x)
        assert average.eq(1.5 if dtype.is_floating_point else 1).all()
        part = hvd.reducescatter(x, op=hvd.Sum)
        assert part.shape == (3 - rank, 2)
        assert part.eq(3).all()
        assert hvd.reducescatter(x[:4], op=hvd.Sum).tolist() == [[3, 3]] * 2
        got, received = hvd.alltoall(x, [2 + rank, 3 - rank])
        assert received.tolist() == ([2, 3] if rank == 0 else [3, 2])
        assert got[:, 0].tolist() == [1] * received[0] + [2] * received[1]
        rows = hvd.grouped_allgather([x[: rank + 1], x])
        assert rows[0][:, 0].tolist() == [1, 2, 2]
        assert rows[1].shape == (10, 2)
        assert hvd.broadcast_(x.clone(), 0).eq(1).all()
        if dtype.is_floating_point:
            apart = torch.zeros(2, dtype=dtype, device=device)
            apart[rank] = 1
            assert hvd.allreduce(apart, op=hvd.Adasum).tolist() == [1, 1]
    splits = torch.tensor([1, 1], dtype=torch.int32, device=device)
    got, received = hvd.alltoall(torch.full((2,), float(rank), device=device), splits)
    assert (got.tolist(), received.device) == ([0.0, 1.0], device)
    flags = hvd.allgather(torch.tensor([rank == 0], device=device))
    assert flags.tolist() == [True, False]
    index = torch.tensor([[rank]], device=device)
    sparse = torch.sparse_coo_tensor(index, torch.ones(1, device=device), (2,))
    assert hvd.sparse_allreduce_async(sparse, "s", op=hvd.Sum)().to_dense().tolist() == [1, 1]

    names = [f"t{i}" for i in range(20)]
    started = {
        name: hvd.allreduce_async(torch.full((64,), rank + 1.0, device=device), name=name)
        for name in (names if rank else reversed(names))
    }
    for name in names:
        assert hvd.synchronize(started[name]).eq(1.5).all()
    small = torch.ones(16, device=device)
    for _ in range(100):
        assert hvd.allreduce(small * (rank + 1), name="small", op=hvd.Sum).eq(3).all()
    assert STATE.engine.frozen()[1] > 0
    # On the stream of the caller, behind what is still in it, and before what follows.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for turn in range(30):
            slow = torch.full((1 << 24,), 1.0, device=device)
            for _ in range(10):
                slow = slow * 1
            late = slow[:16] * (rank + turn)
            assert hvd.allreduce_(late, name="late", op=hvd.Sum).add(0).eq(2 * turn + 1).all()
    half = torch.tensor([33.0], dtype=torch.float16, device=device)
    factor = float(torch.tensor(0.3, dtype=torch.float16))  # rounded first, as upstream's kernel
    scaled = hvd.allreduce(half, op=hvd.Max, prescale_factor=0.3)
    assert torch.equal(scaled, half * factor)
    with pytest.raises(hvd.HorovodInternalError, match="of a group are on cpu, cuda"):
        hvd.grouped_allreduce([half, half.cpu()])
    if rank == 0:
        assert hvd.allreduce(small, name="small", op=hvd.Sum).eq(1).all()
    assert hvd.join(gpus.of(rank)) == 0
    mine = hvd.add_process_set([0]), hvd.add_process_set([1])
    alone = hvd.allreduce(small * rank, op=hvd.Sum, process_set=mine[rank])
    assert alone.eq(rank).all()
    x = torch.ones(4, device=device, requires_grad=True)
    (hvd.reducescatter(x, op=hvd.Sum) * (rank + 1)).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 4, 4]
    hvd.barrier()
    assert size == 2


def test_every_operation_on_gpu_tensors() -> None:
    worlds.run(gpus.pair(), collectives, timeout=150, gpu=True, env=ENV)


def test_operations_and_optimizer_on_two_gpus() -> None:
    worlds.run(gpus.pair(), operations, timeout=150, gpu=True, env=ENV)
