"""What `accelerate` takes, gives back, says and refuses."""

from __future__ import annotations

import gc
import logging
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from evener.base import interfaces, log
from evener.comm.overlap.step import State
from evener.ddp import accelerate
from tests import worlds
from tests.comm.scripts import heard


def train(model: Any, optimizer: Any, rank: int, steps: int = 3) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(4, 16, generator=generator)).square().mean().backward()
        optimizer.step()


def taken() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    gc.collect()
    tasks = {task.name for task in Path("/proc/self/task").iterdir()}
    return len(list(Path("/proc/self/fd").iterdir())), len(tasks)


def many(rank: int, size: int) -> list[tuple[int, int]]:
    """Models that come and go, on some ranks later than on others."""
    counts, kept = [], []
    for turn in range(10):
        module = nn.Linear(16, 16)
        model = DistributedDataParallel(module)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        accelerate(model, optimizer)
        train(model, optimizer, rank)
        if turn == 2:
            kept.append(model)  # lives on
        late = model if rank == turn % 2 else None
        del model, optimizer
        gc.collect()
        dist.barrier()
        counts.append(taken())
        del late
    return counts


def test_a_dropped_model_gives_back_what_it_had() -> None:
    for counts in worlds.run([1, 1], many):
        # With one that lives on and one that is dropped late, three sets of groups go round.
        for kind in zip(*counts, strict=True):
            assert max(kind[6:]) <= max(kind[:6]), counts


def resident() -> float:
    """MB of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def planned_again_and_again(rank: int, size: int) -> list[float]:
    found = []
    for _ in range(8):
        module = nn.Linear(64, 64)
        model = DistributedDataParallel(module)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        accelerate(model, optimizer, mode="exact")
        for _ in range(14):
            optimizer.zero_grad()
            model(torch.randn(4, 64)).mean().backward()
            optimizer.step()
        del model, optimizer, module
        gc.collect()
        found.append(resident())
    return found


def test_a_probe_gives_its_memory_back() -> None:
    """Reducers that are planned one after the other need no more memory than one."""
    for found in worlds.run([1, 1], planned_again_and_again):
        assert found[-1] - found[0] < 16, "a probe's two copies are 34 MB"


def made_anew(rank: int, size: int) -> None:
    """What was dropped belongs to a default group that is gone."""
    for turn in range(3):
        model = accelerate(DistributedDataParallel(nn.Linear(16, 16)))
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank)
        dist.destroy_process_group()
        store = dist.FileStore(os.environ["STORE"] + str(turn), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        del model
        gc.collect()


def test_groups_of_another_default_group_are_not_taken(tmp_path: Path) -> None:
    worlds.run([1, 1], made_anew, env={"STORE": str(tmp_path / "store")})


def limits(rank: int, size: int) -> None:
    group = dist.new_group(list(range(size)), timeout=timedelta(seconds=77))
    model = accelerate(DistributedDataParallel(nn.Linear(4, 4), process_group=group))
    control = model.evener.communicators.control.handle
    assert control._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 77
    assert model.evener.communicators.waits == "77 s (its group's)"
    os.environ["EVENER_TIMEOUT"] = "33"
    other = accelerate(DistributedDataParallel(nn.Linear(4, 4), process_group=group))
    assert other.evener.communicators.waits == "33 s (EVENER_TIMEOUT)"


def test_the_process_groups_timeout_holds() -> None:
    worlds.run([1, 1], limits, env={"EVENER_TIMEOUT": ""})


def misled(rank: int, size: int) -> str:
    interfaces.hostname_misleads = lambda: True
    accelerate(DistributedDataParallel(nn.Linear(4, 4)))
    return os.environ["GLOO_SOCKET_IFNAME"]


def test_gloo_listens_where_peers_can_reach_it() -> None:
    """As on Debian, where a host's name is 127.0.1.1. Here the store is reached by loopback."""
    assert worlds.run([1, 1], misled, env={"GLOO_SOCKET_IFNAME": ""}) == ["lo", "lo"]
    # On one host its own name is as good.
    assert worlds.run([2], misled, env={"GLOO_SOCKET_IFNAME": ""}) == ["", ""]


def warned(rank: int, size: int) -> list[str]:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    lines = []
    for may in (False, True):
        model = DistributedDataParallel(Partly(), find_unused_parameters=may)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with heard() as said:
            train(accelerate(model), optimizer, rank)
        lines += [line for line in said.lines if "brought no gradient" in line]
    return lines


def test_unused_parameters_are_told_of_where_ddp_would_stop() -> None:
    for lines in worlds.run([2], warned):
        (line,) = lines
        assert line.startswith("idle.weight and 1 more brought no gradient in step 1")


def beside_topk(rank: int, size: int) -> None:
    """A model that looks for its optimizer leaves another one's steps deferred."""
    one, other = (DistributedDataParallel(nn.Linear(16, 16)) for _ in range(2))
    optimizer = torch.optim.AdamW(one.parameters(), lr=0.1)
    accelerate(one, optimizer)
    accelerate(other, mode="topk")
    both = torch.optim.SGD([*other.parameters(), *one.parameters()], lr=0.1)
    train(one, optimizer, rank, 5)
    assert one.evener_steps.overlap.state is State.DEFERRED
    train(other, both, rank, 2)
    assert str(other.evener.optimizers) == "SGD"


def test_a_topk_model_leaves_the_overlap_of_others() -> None:
    worlds.run([1, 1], beside_topk, env={"LIGHT_TOPK_THRESHOLD": "0"})


class Wrapped(torch.optim.Optimizer):
    """As Accelerate's AcceleratedOptimizer: around another one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def wrapped_optimizer(rank: int, size: int) -> None:
    model = DistributedDataParallel(nn.Linear(16, 16))
    optimizer = Wrapped(Wrapped(torch.optim.AdamW(model.parameters(), lr=0.1)))
    accelerate(model, optimizer)
    train(model, optimizer, rank, 5)
    assert model.evener_steps.overlap.state is State.DEFERRED


def test_the_optimizer_within_wrappers_is_found() -> None:
    worlds.run([1, 1], wrapped_optimizer)


@pytest.mark.parametrize(
    ("handlers", "shown"),
    [
        ([], True),
        ([logging.NullHandler()], True),
        ([logging.FileHandler(os.devnull)], True),
        ([logging.StreamHandler()], False),
    ],
)
def test_what_accelerate_says_is_seen_once(
    handlers: list[logging.Handler],
    shown: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By its own handler, where the application has none, or hides what it has."""
    monkeypatch.setattr(logging.getLogger(), "handlers", handlers)
    monkeypatch.setattr(log, "_rank", None)
    log.begin(3)
    logging.getLogger("evener.comm").info("buckets")
    logging.getLogger("evener.comm").debug("details")
    assert capsys.readouterr().err == ("evener 3: buckets\n" if shown else "")


def said(rank: int, size: int) -> list[str]:
    with heard() as lines:
        accelerate(DistributedDataParallel(nn.Linear(4, 4)), mode="int8")
    return lines.lines


def test_what_no_framework_saves_is_said() -> None:
    first, second = worlds.run([1, 1], said)
    assert any("model.evener.state_dict()" in line for line in first)
    assert not any("state_dict" in line and rank for rank, line in enumerate(second))
