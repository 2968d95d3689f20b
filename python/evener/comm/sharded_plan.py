"""How a model that FSDP2 shards over all ranks is exchanged, chosen by trying.

    learning   8 passes or more, as torch does it: how many passes an optimizer step has
    timing     torch's own way, then Evener's with each form from the mildest to the floor: two
               steps that are not looked at (a first gather sends all weights), four that are
    settled    the quickest stays, or the mildest that is as quick

All ranks count forward passes of the root that will be differentiated, which are the same on all of
them, and take over the slowest rank's times: so they decide alike. What is slower than torch by
more than `HOPELESS` ends the search, and so does a form that gains nothing over the one before.
The times are of whole steps, so nothing is assumed of what hides behind what.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from evener.comm import wires
from evener.comm.groups import Communicators
from evener.comm.shards import FORMS

logger = logging.getLogger("evener.fsdp")

LEARNING = 8
WARMING, TIMED = 2, 4
# Passes after which a model that no optimizer was seen to step is timed by passes.
_MOST = 64
# By so much of torch's step a way must be shorter to be taken.
WORTH = 0.015
HOPELESS = 1.1
PLAIN = "fsdp2"


class Tried(Protocol):
    """What a planner tries ways on: a sharded model (`sharded.Sharded`)."""

    def use(self, way: str) -> None:
        """Exchange in this way from the next pass on."""

    def step_aside(self) -> None:
        """Leave the model to torch, for good."""


class ShardedPlanner:
    """Chooses for one model, which calls `begins`. `times`: ms per step of each way tried."""

    def __init__(
        self,
        sharded: Tried,
        floor: str,
        parameters: Sequence[torch.Tensor],
        communicators: Communicators,
        narrow: bool,
    ) -> None:
        """`narrow`: gradients have 16 bits already, so that BF16 makes nothing smaller."""
        self.sharded, self.communicators = sharded, communicators
        forms = [form for form in wires.candidates(floor) if form in FORMS]
        self.ways = [PLAIN, *(form for form in forms if not (form == "bf16" and narrow))]
        self.times: dict[str, float] = {}
        self.settled = False
        self._steps, self._passes, self._per_step = 0, 0, 0
        self._began = 0.0
        ids = {id(parameter) for parameter in parameters}

        def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            groups = optimizer.param_groups
            self._steps += any(id(p) in ids for group in groups for p in group["params"])

        stepped.evener_observes = True  # type: ignore[attr-defined]
        self._hook = register_optimizer_step_post_hook(stepped)

    def close(self) -> None:
        """Look no longer. May be called twice."""
        self._hook.remove()

    def begins(self) -> None:
        """A forward that will be differentiated. Collective where something is decided."""
        if self.settled:
            return
        self._passes += 1
        if not self._per_step:
            self._learn()
            return
        at, wide = self._passes - 1, self._per_step
        if at == WARMING * wide:
            self._began = self._now()
        elif at == (WARMING + TIMED) * wide:
            self._timed((self._now() - self._began) / TIMED)

    def _learn(self) -> None:
        passes = self._passes - 1
        if passes < LEARNING or passes & (passes - 1):  # at 8, 16, 32, 64
            return
        steps = int(self._most(float(self._steps)))
        if steps == 0 and passes < _MOST:
            return
        self._per_step = max(1, round(passes / steps)) if steps else 1
        # The passes so far have warmed torch's own way.
        self._passes, self._began = 1 + WARMING * self._per_step, self._now()

    def _now(self) -> float:
        if self.communicators.device.type == "cuda":
            torch.cuda.synchronize(self.communicators.device)
        return time.perf_counter()

    def _most(self, value: float) -> float:
        found = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.communicators.control.handle)
        return float(found)

    def _timed(self, seconds: float) -> None:
        """One way has been timed: the next one, or the end."""
        way = self.ways[len(self.times)]
        before = list(self.times.values())
        took = self.times[way] = 1e3 * self._most(seconds)
        last = len(self.times) == len(self.ways)
        if before:
            last |= took > HOPELESS * before[0]
            last |= len(before) > 1 and took > (1 - WORTH) * min(before[1:])
        if not last:
            self.sharded.use(self.ways[len(self.times)])
            self._passes = 1
            return
        self._settle()

    def _settle(self) -> None:
        self.settled = True
        self.close()
        best = min(self.times.values())
        plain = self.times[PLAIN]
        # In the order of `ways`: the mildest that is as quick.
        chosen = next(way for way, took in self.times.items() if took <= best + WORTH * plain)
        if self.communicators.rank == 0:
            tried = ", ".join(
                f"{took:.1f} ms " + ("as torch does it" if way == PLAIN else way)
                for way, took in self.times.items()
            )
            kept = "the model stays plain FSDP2" if chosen == PLAIN else f"{chosen} is kept"
            logger.info("plan: a step takes %s: %s", tried, kept)
        if chosen == PLAIN:
            self.sharded.step_aside()
        elif chosen != self.ways[len(self.times) - 1]:
            self.sharded.use(chosen)
