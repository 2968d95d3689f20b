"""`horovod.torch` on GPUs: operations on the caller's stream order, the optimizer, broadcasts."""

from __future__ import annotations

import pytest
import torch

import evener.horovod.torch as hvd
from tests import worlds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]
ENV = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}


def operations(rank: int, size: int) -> None:
    torch.cuda.set_device(rank)
    hvd.init()
    device = torch.device("cuda", rank)
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
    with pytest.raises(hvd.HorovodInternalError, match="mismatched device"):
        hvd.allreduce(flat if rank else flat.cpu(), name="where")
    assert hvd.nccl_built() > 20000
    assert size == 2


def test_operations_and_optimizer_on_two_gpus() -> None:
    worlds.run([2], operations, timeout=150, gpu=True, env=ENV)
