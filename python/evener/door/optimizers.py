"""Which optimizers step a model's parameters, seen by torch's own hooks of every optimizer's step.

Whatever wraps an optimizer (Accelerate, Lightning, a GradScaler, a framework's class) in the end
calls the one that torch knows, and that is the one that Evener can defer. The hooks are there only
while the door listens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from evener.comm.overlap.optimizers import OBSERVES

Stepped = Callable[[torch.optim.Optimizer], None]

_listeners: list[Stepped] = []
_handle: Any = None


def listen(stepped: Stepped) -> None:
    """Call `stepped(optimizer)` after every step that any optimizer took."""
    global _handle
    _listeners.append(stepped)
    if _handle is None:
        _handle = register_optimizer_step_post_hook(_stepped)


def leave(stepped: Stepped) -> None:
    """Do not call it any more. May be called twice."""
    global _handle
    if stepped in _listeners:
        _listeners.remove(stepped)
    if not _listeners and _handle is not None:
        _handle.remove()
        _handle = None


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for stepped in list(_listeners):
        stepped(optimizer)


# Overlap takes a step hook of the user's as a reason to step at once; this one only counts.
setattr(_stepped, OBSERVES, True)


def parameters(optimizer: torch.optim.Optimizer) -> set[int]:
    """Ids of what it steps."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}
