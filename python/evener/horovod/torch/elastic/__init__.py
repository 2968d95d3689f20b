"""`hvd.elastic`: training that goes on while ranks come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evener.horovod.common.elastic import State, run_fn
from evener.horovod.state import STATE
from evener.horovod.torch.elastic.sampler import ElasticSampler
from evener.horovod.torch.elastic.state import TorchState
from evener.horovod.torch.mpi_ops import init, shutdown


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: `func(state, ...)` is called again, on all ranks, whenever these have changed.

    The state is synchronised before. Outside `func` a script may not call collectives once the job
    runs: a newcomer would wait in them for ranks that are elsewhere.
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    STATE.leave()  # where an earlier init came only half of its way
    init()


__all__ = ["ElasticSampler", "State", "TorchState", "run"]
