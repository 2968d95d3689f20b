"""What compression has not sent yet, and the state of local steps, for a framework's checkpoints.

A framework saves from one rank, and what is not sent yet lies on all of them: it is collected where
all ranks pass by, in a callback. A framework loads before it trains, and a model may be accelerated
later (`evener.door` after some steps): up to that time it is kept for that model.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from evener.ddp.local import LocalDataParallel
from evener.ddp.model import _KEPT, _LIVE, AcceleratedDataParallel
from evener.errors import UsageError

logger = logging.getLogger("evener.integrations")

NAME = "evener"


def accelerated(module: torch.nn.Module) -> AcceleratedDataParallel | None:
    """The live one that has this module's parameters."""
    mine = {id(parameter) for parameter in module.parameters()}
    for model in list(_LIVE):
        if any(id(parameter) in mine for parameter in model.evener.parameters):
            return model
    return None


def collect(module: torch.nn.Module) -> dict[str, Any] | None:
    """What a checkpoint of `module` needs, tensors on the CPU; None where that is nothing.

    Collective, between steps: every rank calls it, and one saves what it gives.
    """
    model = accelerated(module)
    if model is None:
        return _KEPT.get(module)
    if isinstance(model, LocalDataParallel):
        return model.evener.state_dict()
    found = [(e.wire.feedback, e.state.residual, e.state.velocity) for e in model.evener.exchanges]
    if not any(feedback or one is not None or two is not None for feedback, one, two in found):
        return None
    try:
        return model.evener.state_dict()
    except UsageError as error:  # a framework that saves within a step goes on without
        logger.warning("the checkpoint does not hold what is not sent yet: %s", error.problem)
        return None


def remember(module: torch.nn.Module) -> None:
    """The training ends, and its DistributedDataParallel with it: for what is saved, or trained,
    afterwards. A round that is under way ends, so that all ranks have the same model. Collective.
    """
    model = accelerated(module)
    if isinstance(model, LocalDataParallel):
        model.evener.end_round()
    if (owed := collect(module)) is not None:
        _KEPT[module] = owed


def install(module: torch.nn.Module, state: dict[str, Any]) -> None:
    """Take over what `collect` gave, now or once the model is accelerated. On all ranks alike."""
    model = accelerated(module)
    if model is None:
        _KEPT[module] = state
        return
    try:
        model.evener.load_state_dict(state)
    except UsageError as error:
        logger.warning("what was not sent yet is not taken over: %s", error.problem)
