"""Names of torch's pipelining that are not promised to stay, and where they hold.

A stage here goes into torch's own at many places: its caches of forward and backward, what it
receives and sends, its runtime's actions. They are as this module says in torch 2.9 to 2.11. torch
2.12 infers shapes in another way, and 2.15 has other caches. Planning needs none of them.
"""

from __future__ import annotations

import torch
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)
from torch.distributed.pipelining.stage import _RecvInfo

from evener.errors import UsageError

FIRST, LAST = (2, 9), (2, 11)

__all__ = ["_Action", "_ComputationType", "_PipelineScheduleRuntime", "_RecvInfo", "require"]


def require() -> None:
    """Raises UsageError for a torch whose stages are others."""
    version = torch.__version__.partition("+")[0]
    found = tuple(int(part) for part in version.split(".")[:2])
    if not FIRST <= found <= LAST:
        raise UsageError(
            f"evener.pipeline.auto runs on torch 2.9 to 2.11, and this is {version}: its "
            "torch.distributed.pipelining is another",
            "install torch 2.11, or train with evener.zero or FSDP2; plans can be made here",
        )
