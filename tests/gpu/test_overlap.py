"""Overlap across the step on GPUs: reductions over sockets take milliseconds, so that what is not
waited for would be seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evener.comm.overlap.step import State
from evener.ddp import accelerate
from tests import gpus, worlds
from tests.comm import models, test_overlap, test_planner_live

pytestmark = [
    pytest.mark.gpu,
    gpus.needs(1, 1),
]
ENV = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_NVLS_ENABLE": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def every_script(rank: int, size: int, names: list[str]) -> dict[str, int]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    return test_overlap.run_both(rank, size, names)


def test_the_same_bits_as_without() -> None:
    names = list(test_overlap.CASES)
    for deferred in worlds.run([1, 1], every_script, names, gpu=True, env=ENV, timeout=150):
        for name, steps in deferred.items():
            assert (steps >= 2) == test_overlap.CASES[name][2], (name, steps)


def train(rank: int, overlapped: bool, act: str) -> tuple[list[bytes], int]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(5)
    device = models.device()
    net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(12)]).to(device)
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
    optimizer = torch.optim.AdamW(net.parameters(), **options)
    model = accelerate(
        DistributedDataParallel(net, device_ids=[device]),
        optimizer if overlapped else None,
        bucket_bytes=4 << 20,
    )
    graph, seen = torch.cuda.CUDAGraph(), []
    still = torch.ones(8, 1024, device=device)
    side = torch.cuda.Stream(device)
    captured: torch.Tensor | None = None
    deferred = 0
    for step in range(12):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(256, 1024, generator=generator).to(device)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if act == "side stream, ordered early" and step:
            # Behind the last step, as this stream waited then; the forward has used it already.
            with torch.cuda.stream(side), torch.no_grad():
                seen.append(models.raw(net[3].weight + 0))
        loss.backward()
        optimizer.step()
        if act == "side stream, ordered early":
            side.wait_stream(torch.cuda.current_stream(device))
        if overlapped:
            deferred += model.evener_steps.overlap.state is State.DEFERRED
        if act == "graph" and step == 6:
            net(still)  # what cuBLAS allocates at first must not be allocated in the capture
            torch.cuda.synchronize()
            with torch.no_grad(), torch.cuda.graph(graph):
                captured = net(still)
        if captured is not None:
            graph.replay()
            seen.append(models.raw(captured))
        if act == "side stream":
            # As a script without overlap must: nothing else orders the read behind the step.
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side), torch.no_grad():
                seen.append(models.raw(net[3].weight + 0))
                later = torch.cuda.Stream(device)
                with torch.cuda.stream(later):
                    seen.append(models.raw(net[3].weight + 0))
    model.evener_steps.finish("")
    return [models.raw(p.detach()) for p in net.parameters()] + seen, deferred


def both(rank: int, size: int, act: str) -> tuple[list[int], int]:
    """Which of the parameters, then of what was seen, differ; and how many steps were deferred."""
    expected, _ = train(rank, False, act)
    found, deferred = train(rank, True, act)
    pairs = zip(expected, found, strict=True)
    return [i for i, (one, other) in enumerate(pairs) if one != other], deferred


@pytest.mark.parametrize("act", ["plain", "graph", "side stream", "side stream, ordered early"])
def test_large_buckets_over_sockets(act: str) -> None:
    for different, deferred in worlds.run([1, 1], both, act, gpu=True, env=ENV):
        assert not different and deferred >= 6


def test_the_real_probe_plans_and_ranks_agree() -> None:
    shape = [2, 2] if torch.cuda.device_count() >= 4 else [1, 1]
    found = worlds.run(shape, test_planner_live.planned, [], 12, True, gpu=True, env=ENV)
    assert all(weights == found[0][0] for weights, _, _ in found)
    assert all(decisions[0] == found[0][2][0] for _, _, decisions in found)
