"""Names of torch's pipelining that are not promised to stay, and where they hold.

A stage here goes into torch's own at many places: its caches of forward and backward, what it
receives and sends, its runtime's actions. They are as this module says in torch 2.9 to 2.11. torch
2.12 infers shapes in another way, and 2.15 has other caches. Planning needs none of them.
"""

from __future__ import annotations

import inspect

import torch
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)
from torch.distributed.pipelining.stage import _RecvInfo

from evener.errors import UsageError

FIRST, LAST, SPLIT = (2, 9), (2, 11), (2, 11)
# Outputs of the last stage, which are losses here, need not be kept; torch 2.9 always keeps them.
_STEP = inspect.signature(_PipelineScheduleRuntime._step_microbatches).parameters
NO_OUTPUTS = {"return_outputs": False} if "return_outputs" in _STEP else {}

__all__ = [
    "NO_OUTPUTS",
    "_Action",
    "_ComputationType",
    "_PipelineScheduleRuntime",
    "_RecvInfo",
    "require",
    "require_split",
    "splits",
]


def _version() -> tuple[str, tuple[int, ...]]:
    version = torch.__version__.partition("+")[0]
    return version, tuple(int(part) for part in version.split(".")[:2])


def splits() -> bool:
    """Whether this torch takes a backward pass in two halves."""
    return _version()[1] >= SPLIT


def require_split(schedule: str) -> None:
    """Raises UsageError for a schedule of such backward passes where torch takes none."""
    if not splits():
        raise UsageError(
            f"schedule {schedule!r} was tried on torch 2.11 alone, and this is {_version()[0]}: "
            "torch 2.9 refuses a backward pass in two halves",
            "take schedule='1F1B', or install torch 2.11",
        )


def require() -> None:
    """Raises UsageError for a torch whose stages are others."""
    version, found = _version()
    if not FIRST <= found <= LAST:
        raise UsageError(
            f"evener.pipeline.auto runs on torch 2.9 to 2.11, and this is {version}: its "
            "torch.distributed.pipelining is another",
            "install torch 2.11, or train with evener.zero or FSDP2; plans can be made here",
        )
