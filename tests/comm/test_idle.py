"""Variables and arguments that have no effect where they are given: each is said, once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import evener.fsdp
import evener.horovod.torch as hvd
from evener.base import log, settings
from evener.ddp import accelerate
from tests import worlds
from tests.comm.scripts import heard
from tests.test_fsdp_sharded import sharded

IDLE = {
    "EVENER_OVERLAP": "4",
    "LIGHT_TOPK_FP16": "1",
    "LIGHT_TOPK_RATIO": "0.5",
    "LIGHT_2D_ALLREDUCE": "1",
    "EVENER_OUTER": "nccl",
}
TOPK = [
    "LIGHT_TOPK_RATIO=0.5 has no effect: it is top-k's",
    "LIGHT_TOPK_FP16=1 has no effect: it is top-k's",
]


def test_a_variable_is_said_once_and_its_default_never(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_rank", None)
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setenv("EVENER_OVERLAP", "4")
    monkeypatch.setenv("EVENER_EVERY", "0")
    with heard() as said:
        for _ in range(2):
            log.say_idle("nobody asks", settings.EVENER_OVERLAP, settings.EVENER_EVERY)
    assert said.lines == ["EVENER_OVERLAP=4 has no effect: nobody asks"]


def ddp(rank: int, size: int) -> list[str]:
    with heard() as said:
        for _ in range(2):
            accelerate(DistributedDataParallel(nn.Linear(4, 4)))
    return [line for line in said.lines if "no effect" in line]


def test_under_ddp() -> None:
    first, second = worlds.run([1, 1], ddp, env=IDLE)
    overlap = "EVENER_OVERLAP=4 has no effect: it is of local steps: set EVENER_EVERY too"
    assert first == [overlap, *TOPK]
    assert second == []


def ddp_topk(rank: int, size: int) -> list[str]:
    with heard() as said:
        accelerate(DistributedDataParallel(nn.Linear(4, 4)), mode="topk")
    return [line for line in said.lines if "top-k's" in line]


def test_where_there_is_top_k_its_variables_are_not_idle() -> None:
    assert worlds.run([1, 1], ddp_topk, env=IDLE) == [[], []]


def fsdp(rank: int, size: int) -> list[str]:
    with heard() as said:
        evener.fsdp.accelerate(sharded(size))
    return [line for line in said.lines if "no effect" in line]


def test_under_fsdp2_without_replicas() -> None:
    first, second = worlds.run([1, 1], fsdp, env={**IDLE, "EVENER_EVERY": "8"})
    of_all = "has no effect: FSDP2 shards this model over all ranks"
    assert first == [
        "EVENER_EVERY=8 has no effect: models of FSDP2 take no local steps",
        f"LIGHT_2D_ALLREDUCE=1 {of_all}",
        f"EVENER_OUTER=nccl {of_all}",
    ]
    assert second == []


def horovod(rank: int, size: int) -> list[str]:
    model = nn.Linear(4, 4)
    with heard() as said:
        for _ in range(2):
            hvd.init()
            hvd.shutdown()
        hvd.init()
        for given in ({"ratio": 0.1}, {"op": hvd.Adasum}):
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            hvd.DistributedOptimizer(inner, model.named_parameters(), **given)
    return [line for line in said.lines if "no effect" in line]


def test_under_horovod() -> None:
    upstream = {"HOROVOD_TORUS_ALLREDUCE": "1", "HOROVOD_HIERARCHICAL_ALLREDUCE": "0"}
    first, second = worlds.run([1, 1], horovod, env={**IDLE, **upstream})
    torus = "HOROVOD_TORUS_ALLREDUCE=1 has no effect: LIGHT_2D_ALLREDUCE=1 asks for two levels"
    adasum = "LIGHT_2D_ALLREDUCE=1 has no effect: Adasum's updates are sent whole, in one level"
    assert first == [torus, "ratio=0.1 has no effect: it is top-k's", *TOPK, adasum]
    assert second == []
