"""A dead rank, no memory, a bug: each rank says which, in time."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from evener import moe
from evener.moe import core
from tests import worlds


def fail(rank: int, size: int, how: str, when: str) -> Any:
    torch.manual_seed(0)
    layer = moe.spread(moe.MoE(8, 16, 8, 2), size)
    x = torch.randn(12, 8)
    layer(x).sum().backward()
    plain = getattr(core, when)

    def broken(*given: Any) -> Any:
        if how == "dead":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "memory":
            torch.empty(1 << 60, dtype=torch.uint8)  # more than a process can address
        raise ValueError("the data is of the wrong kind")

    if rank == 1:
        setattr(core, when, broken)
    try:
        layer(x).sum().backward()
    except moe.MoEError as error:
        setattr(core, when, plain)
        with pytest.raises(moe.MoEError):
            layer(x)
        return str(error), error.rank
    return "no error", -1


@pytest.mark.parametrize(
    ("how", "when", "said"),
    [
        ("dead", "run", "rank 1 of the experts is gone"),
        ("memory", "back", "on rank 1 is out of memory"),
        ("bug", "run", "on rank 1 failed: ValueError: the data is of the wrong kind"),
    ],
)
def test_every_rank_says_what_failed(how: str, when: str, said: str) -> None:
    found = worlds.outcomes([1, 1], fail, how, when, timeout=60)
    for rank, outcome in enumerate(found):
        if how == "dead" and rank == 1:
            assert outcome.error == "the process died"
            continue
        assert not outcome.error, outcome.error
        text, where = outcome.value
        assert said in text and "fix:" in text and where == 1, text
