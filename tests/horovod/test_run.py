"""`horovod.run`: a function as a job."""

from __future__ import annotations

import os
from typing import Any

import pytest

from evener.horovod import run
from evener.horovod.runner.function import RunError


def work(word: str, times: int = 1) -> Any:
    import horovod.torch as hvd
    import torch

    hvd.init()
    total = hvd.allreduce(torch.tensor([hvd.rank() + 1]), op=hvd.Sum).item()
    if word == "fail" and hvd.rank() == 1:
        raise KeyError(word)
    hvd.barrier()
    return hvd.rank(), total, word * times


def test_results_come_in_rank_order() -> None:
    assert run(work, ("ab",), {"times": 2}, num_proc=2) == [(0, 3, "abab"), (1, 3, "abab")]


def test_an_error_comes_back_with_its_rank() -> None:
    with (
        pytest.warns(DeprecationWarning, match="np is deprecated"),
        pytest.raises(RunError, match=r"raised on rank 1:(.|\n)*KeyError: 'fail'") as caught,
    ):
        run(work, ("fail",), np=2)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_rank_that_dies_is_an_error() -> None:
    with pytest.raises(RunError, match="ended with status 9"):
        run(os._exit, (9,))


def test_arguments_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="hosts and hostfile"):
        run(work, hosts="a:1", hostfile="h")
    with pytest.raises(ValueError, match="use_gloo and use_mpi"):
        run(work, use_gloo=True, use_mpi=True)
