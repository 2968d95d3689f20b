"""The staged transport on GPUs: copy engines, streams that wait, and what training sees."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from evener.comm import staged
from evener.comm.errors import CommError
from tests import gpus, worlds
from tests.comm import test_overlap
from tests.gpu.test_overlap import ENV as SOCKETS
from tests.gpu.test_overlap import every_script

pytestmark = [
    pytest.mark.gpu,
    gpus.needs(1, 1),
]
ENV = {**SOCKETS, "EVENER_OUTER": "staged", "EVENER_NET_IFNAME": "lo"}


def transport(rank: int, size: int, timeout: float = 60.0) -> staged.StagedTransport:
    meeting = dist.new_group(backend="gloo")
    device = torch.device("cuda", torch.cuda.current_device())
    return staged.connect(rank, size, meeting, device, timeout)


def against_nccl(rank: int, size: int) -> tuple[int, float]:
    made, calls = transport(rank, size), 0
    device = made.device
    work = torch.randn(4096, 4096, device=device)
    for dtype in (torch.float32, torch.float16, torch.uint8):
        for n in (1, 1000, 3_000_001, 40 << 20):
            streams = [torch.cuda.Stream(device) for _ in range(3)]
            results = []
            for turn in range(6):
                # Training's kernels go on beside it.
                work = work @ work / 64.0
                streams[turn % 3].wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(streams[turn % 3]):
                    payload = (torch.arange(n, device=device) * (rank + turn + 1) % 97).to(dtype)
                    got, want = torch.empty(2, size * n, dtype=dtype, device=device).unbind()
                    made.all_gather(got, payload)
                    parts = (torch.arange(n * size, device=device) * (rank + 3) % 89).to(dtype)
                    mine = torch.empty_like(got)
                    made.all_to_all(mine, parts)
                    # What was sent may be written again.
                    sent, sent_parts = payload.clone(), parts.clone()
                    payload.zero_()
                    parts.zero_()
                    results.append((got, want, sent, mine, sent_parts))
            torch.cuda.synchronize()
            for got, want, sent, mine, sent_parts in results:
                dist.all_gather_into_tensor(want, sent)
                assert torch.equal(got, want), (dtype, n)
                dist.all_to_all_single(want, sent_parts)
                assert torch.equal(mine, want), (dtype, n)
                calls += 2
    made.check()
    made.close()
    return calls, float(work.abs().max())


def test_the_same_bytes_as_nccl_beside_other_kernels() -> None:
    for calls, _ in worlds.run([1, 1], against_nccl, gpu=True, env=ENV, timeout=150):
        assert calls == 3 * 4 * 6 * 2


def test_overlap_has_the_same_bits_as_without() -> None:
    names = list(test_overlap.CASES)
    for deferred in worlds.run([1, 1], every_script, names, gpu=True, env=ENV, timeout=150):
        for name, steps in deferred.items():
            assert (steps >= 2) == test_overlap.CASES[name][2], (name, steps)


def captured(rank: int, size: int) -> None:
    made = transport(rank, size)
    payload, got = torch.ones(8, device="cuda"), torch.empty(16, device="cuda")
    made.all_gather(got, payload)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(CommError, match="CUDA graph"):
        made.all_gather(got, payload)
    made.close()


def test_a_graph_is_refused() -> None:
    worlds.run([1, 1], captured, gpu=True, env=ENV)


def one_dies(rank: int, size: int) -> float:
    made = transport(rank, size, timeout=3.0)
    payload = torch.full((100_000,), float(rank), device="cuda")
    got = torch.empty(200_000, device="cuda")
    made.all_gather(got, payload)
    torch.cuda.synchronize()
    dist.barrier()  # what it has sent has arrived
    if rank:
        os._exit(0)
    began = time.monotonic()
    made.all_gather(got, payload)
    # Streams that waited for the dead run on; what they left is garbage, and `check` says so.
    torch.cuda.synchronize()
    with pytest.raises(CommError, match="staged transport"):
        made.check()
    made.close()
    return time.monotonic() - began


def test_a_device_does_not_wait_for_the_dead() -> None:
    first, second = worlds.outcomes([1, 1], one_dies, gpu=True, env=ENV, timeout=60)
    assert not first.error, first.error
    assert first.value < 40
    assert "died" in second.error
