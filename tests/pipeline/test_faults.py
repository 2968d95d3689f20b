"""A dead rank, values that are not finite, a stage without memory: each rank says which.

What ends no process goes through one world of three ranks, the middle one at fault.
"""

from __future__ import annotations

import functools
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from evener import pipeline
from evener.errors import EvenerError, UsageError
from evener.pipeline import PipelineError
from tests import worlds
from tests.pipeline import models

RATES = pipeline.Rates(1e11, 1e10, 1e-6)


@functools.cache
def gpt() -> models.GPT:
    torch.manual_seed(3)
    return models.GPT(2, tied=False)


def fail(rank: int, size: int, how: str) -> Any:
    inputs = {"tokens": models.tokens(8), "labels": models.tokens(8, 1)}
    given: dict[str, Any] = {}
    if how == "dead replica":
        names = ("data", "pipeline")
        given = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=names), "gradients": "int8"}
        how = "dead"
    with models.trace_once:
        pipe = pipeline.auto(gpt(), inputs, rates=RATES, microbatches=4, timeout=600, **given)
    pipe.step(**inputs)
    stage = next(iter(pipe.modules.values()))
    forward = stage.graph_module.forward

    def broken(*given: Any) -> Any:
        if pipe._draw.microbatch == 2:
            if how == "dead":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "memory":
                # As much as no machine has: the allocator's own error.
                torch.empty(1 << 46, dtype=torch.uint8)
            if how == "bug":
                raise ValueError("the data is of the wrong kind")
        return forward(*given)

    if rank == 1 and how in ("dead", "memory", "bug"):
        stage.graph_module.forward = broken
    if rank == 1 and how == "nan":
        with torch.no_grad():
            next(pipe.parameters()).fill_(float("nan"))
    try:
        pipe.step(**inputs)
    except PipelineError as error:
        if how == "nan":
            # The weights are as they were, and the job may go on.
            with torch.no_grad():
                for p in pipe.parameters():
                    p.nan_to_num_()
            assert pipe.step(**inputs).isfinite()
        else:
            with pytest.raises(PipelineError):
                pipe.step(**inputs)
        linger(how, rank, [r for r in range(size) if how != "dead" or r != 1])
        return str(error), error.rank
    return "no error", -1


def linger(how: str, rank: int, ranks: list[int]) -> None:
    """Stay until all have their error: a process that ends would end the others' waits."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"told/{how}/{rank}", "")
    until = time.monotonic() + 25
    while not store.check([f"told/{how}/{r}" for r in ranks]) and time.monotonic() < until:
        time.sleep(0.1)


@pytest.mark.parametrize(("how", "ranks"), [("dead", 3), ("dead replica", 4)])
def test_every_rank_says_who_is_gone(how: str, ranks: int) -> None:
    found = worlds.outcomes([ranks], fail, how, timeout=60)
    for rank, outcome in enumerate(found):
        if rank == 1:
            assert outcome.error == "the process died"
            continue
        assert not outcome.error, outcome.error
        check(outcome.value, "rank 1 of the pipeline is gone")


@pytest.fixture(scope="module")
def three() -> worlds.Several:
    cases: dict[str, Any] = {how: (fail, how) for how in ("nan", "memory", "bug")}
    return worlds.several(
        [3], cases | {"models": (disagree,), "fit": (no_fit,), "capture": (broken,)}
    )


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("nan", "stage 1 on rank 1 "),
        ("memory", "stage 1 on rank 1 is out of memory"),
        ("bug", "stage 1 on rank 1 failed: ValueError: the data is of the wrong kind"),
    ],
)
def test_every_rank_says_what_failed(how: str, said: str, three: worlds.Several) -> None:
    for value in three[how]:
        check(value, said)
        if how == "nan":
            assert "not finite" in value[0] and "in microbatch" in value[0]


def check(value: tuple[str, int], said: str) -> None:
    text, where = value
    assert said in text and "fix:" in text and where == 1, text


def disagree(rank: int, size: int) -> str:
    inputs = {"tokens": models.tokens(8), "labels": models.tokens(8, 1)}
    try:
        pipeline.auto(models.GPT(layers=1 + rank // 2), inputs, rates=RATES, microbatches=4)
    except UsageError as error:
        return error.problem
    return ""


def test_ranks_with_different_models_are_refused(three: worlds.Several) -> None:
    assert three["models"] == ["the ranks captured different operations"] * 3


class Broken(models.GPT):
    """Cannot be run."""

    def forward(self, *_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("no model")


def broken(rank: int, size: int) -> str:
    inputs = {"tokens": models.tokens(8), "labels": models.tokens(8, 1)}
    with models.trace_once, pytest.raises(EvenerError) as caught:
        kind = Broken if rank == 1 else models.GPT
        pipeline.auto(kind(layers=1), inputs, rates=RATES, microbatches=4)
    return caught.value.problem


def test_a_rank_that_cannot_capture_ends_all(three: worlds.Several) -> None:
    first, *others = three["capture"]
    assert "no model" in first and others == [first] * 2


def no_fit(rank: int, size: int) -> str:
    inputs = {"tokens": models.tokens(8), "labels": models.tokens(8, 1)}
    with models.trace_once, pytest.raises(pipeline.NoFitError) as caught:
        pipeline.auto(gpt(), inputs, rates=RATES, microbatches=4, memory="1kB")
    return caught.value.problem


def test_what_does_not_fit_is_said_by_all(three: worlds.Several) -> None:
    first, *others = three["fit"]
    assert others == [first] * 2 and "no cuts into 3 stages fit" in first
