"""A DistributedDataParallel whose node averages weights with others, which come and go.

Inside the node it stays what it is: DDP's own reducer averages gradients in every step. After every
N-th step the node's first rank exchanges the change of the weights through a hub
(`evener.comm.hub`), and all its ranks go on from the shared ones.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel.distributed import DistributedDataParallel

from evener.comm.hub.rounds import NodeRounds
from evener.comm.options import Options
from evener.comm.overlap import innermost
from evener.ddp.local import LocalDataParallel, LocalSteps, refusal
from evener.ddp.model import become, replace_older, take_kept, taken
from evener.errors import UsageError

_LIVE: weakref.WeakSet[NodeRounds] = weakref.WeakSet()


class NodeDataParallel(LocalDataParallel):
    """See the module. Made by `evener.ddp.accelerate(every=N)` where EVENER_HUB is set."""

    evener: NodeRounds  # type: ignore[assignment]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """DDP's own."""
        if self._evener_ended:
            return self._forward_as_before(*inputs, **kwargs)
        self.evener_steps.forward_began()
        return DistributedDataParallel.forward(self, *inputs, **kwargs)

    def _leaves(self) -> None:
        """It is plain again within its node, and the other nodes go on without it."""


def start(
    model: DistributedDataParallel,
    optimizers: Sequence[torch.optim.Optimizer],
    options: Options,
) -> NodeDataParallel:
    """Make `model` one of a node that has a hub. Collective over the node, between steps.

    `optimizers`: all that step it. Raises UsageError for what cannot be or what the hub refuses,
    CommError where the hub does not answer.
    """
    if options.auto:
        raise UsageError("every='auto' and a hub: nodes do not time exchanges", "give every=N")
    optimizers = [innermost(optimizer) for optimizer in optimizers]
    named = taken(model)
    if why := refusal(named, optimizers):
        raise UsageError(f"every={options.every}: {why}", "leave every= out, or change that")
    replace_older([parameter for _, parameter in named])
    if any(not rounds.ended for rounds in _LIVE):
        raise UsageError(
            "a second model of this process: a hub averages one",
            "put both into one module, and wrap that",
        )
    buffers = model.will_sync_module_buffers() or bool(model.broadcast_buffers)
    rounds = NodeRounds(named, model.module, options, model.process_group, buffers)
    try:
        rounds.begin()
    except BaseException:
        rounds.drop()
        raise
    steps = LocalSteps(rounds, optimizers)  # type: ignore[arg-type]
    own = {name: model.__dict__[name] for name in ("reducer", "logger")}
    made = become(
        model,
        NodeDataParallel,
        functools.partial(_release, rounds, steps),
        evener=rounds,
        evener_steps=steps,
    )
    assert isinstance(made, NodeDataParallel)
    made.__dict__.update(own)  # gradients are still DDP's to reduce
    if not _LIVE:
        atexit.register(_at_end, os.getpid())
    _LIVE.add(rounds)
    take_kept(made)
    return made


def _release(rounds: NodeRounds, steps: LocalSteps) -> None:
    """The model is gone, or reduced by another reducer."""
    steps.close()
    rounds.drop()


def _at_end(process: int) -> None:
    """A program that ends well leaves; one that failed is missed, as one that was killed."""
    if os.getpid() != process:
        return
    for rounds in list(_LIVE):
        rounds.leave(well=not hasattr(sys, "last_value"))
