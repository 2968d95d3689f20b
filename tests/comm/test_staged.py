"""The staged transport on CPUs: the real exchange over loopback, against Gloo's collectives."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from evener.comm import staged
from evener.comm.errors import CommError
from tests import worlds

ENV = {"EVENER_NET_IFNAME": "lo", "EVENER_NET_FLOWS": "2", "EVENER_NET_WORKERS": "1"}


def transport(rank: int, size: int, timeout: float = 60.0) -> staged.StagedTransport:
    group = dist.group.WORLD
    assert group is not None
    return staged.connect(rank, size, group, torch.device("cpu"), timeout)


def against_gloo(rank: int, size: int) -> int:
    made, calls = transport(rank, size), 0
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for n in (0, 1, 1000, 3_000_001):
            payload = (torch.arange(n) * (rank + 1) % 97).to(dtype)
            got, want = torch.empty(2, size * n, dtype=dtype).unbind()
            made.all_gather(got, payload)
            if n:
                dist.all_gather_into_tensor(want, payload)
                assert torch.equal(got, want)
            payload = (torch.arange(n * size) * (rank + 1) % 89).to(dtype)
            made.all_to_all(got, payload)
            if n:
                dist.all_to_all_single(want, payload)
                assert torch.equal(got, want)
            calls += 2
    made.check()
    with pytest.raises(ValueError, match="do not fit"):
        made.all_gather(torch.empty(5), torch.empty(4))
    made.close()
    made.close()
    return calls


@pytest.mark.parametrize("size", [2, 3])
def test_the_same_bytes_as_gloo(size: int) -> None:
    assert worlds.run([1] * size, against_gloo, env=ENV) == [24] * size


def one_dies(rank: int, size: int) -> str:
    made = transport(rank, size, timeout=6.0)
    payload = torch.full((1000,), float(rank))
    got = torch.empty(2000)
    made.all_gather(got, payload)
    dist.barrier()  # what it has sent has arrived
    if rank:
        os._exit(0)
    with pytest.raises(CommError, match="staged transport") as raised:
        for _ in range(100):
            made.all_gather(got, payload)
    with pytest.raises(CommError):
        made.check()
    made.close()
    return str(raised.value)


def test_a_rank_that_dies_is_an_error_for_the_others() -> None:
    first, second = worlds.outcomes([1, 1], one_dies, env=ENV)
    assert not first.error, first.error
    assert "EVENER_OUTER=nccl" in first.value
    assert "died" in second.error


def nobody_listens(rank: int, size: int) -> str:
    if rank:
        os.environ["EVENER_NET_IFNAME"] = "=none0"
    with pytest.raises(RuntimeError) as raised:
        transport(rank, size)
    return str(raised.value)


def test_all_ranks_hear_why_one_cannot() -> None:
    for why in worlds.run([1, 1], nobody_listens, env=ENV):
        assert why.startswith("rank 1 of the group: no network interface"), why
