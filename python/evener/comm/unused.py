"""Parameters that brought no gradient in a step: which no rank used, and a word where one is left.

A parameter that some rank used gets the average over all ranks, in which the others count as zeros.
One that no rank used keeps the gradient that it had, if the front door asks for that, as plain
DDP's `find_unused_parameters` does; else it gets zeros.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from evener.comm.groups import Communicators

logger = logging.getLogger("evener.comm")


class Unused:
    """Finds which of one reducer's parameters are unused. `names` are in order."""

    def __init__(self, names: Sequence[str], communicators: Communicators) -> None:
        # Whether all are expected to bring one, and have: then it is worth a warning, once.
        self.needs_all = False
        # Whether this step is one of the others' alone: this rank has no more inputs (join()).
        self.joined = False
        self._names = names
        self._communicators = communicators
        self._asked: Any = None  # in the last step
        self._last: torch.Tensor | None = None  # its answer

    def ask(self, used: Sequence[bool]) -> frozenset[int]:
        """Those that no rank used; `used`: by parameter, on this one. Collective.

        A rank that used all has its answer: it takes part, and waits for nobody. So the
        question costs a model of which all is used nothing (transformers' Trainer always asks it).
        A rank that has joined gives the last answer again, as DDP's does: what was used in its last
        step, or since, counts as used until the others have joined too.
        """
        if self._asked is not None:
            self._asked.wait()
            self._asked = None
        anywhere = torch.tensor(used, dtype=torch.int32)
        if self.joined and self._last is not None:
            anywhere = torch.maximum(anywhere, self._last)
        self._last = anywhere
        control = self._communicators.control.handle
        work = dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=control, async_op=True)
        if all(used):
            self._asked = work  # with its tensor, until the next one
            return frozenset()
        work.wait()
        return frozenset((anywhere == 0).nonzero().flatten().tolist())

    def look(self, used: Sequence[bool], step: int) -> None:
        """Warn, the first time, of what was not used on this rank and counts as zeros."""
        if self.joined or not self.needs_all or all(used):
            return
        self.needs_all = False
        names = [name for name, was in zip(self._names, used, strict=True) if not was]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        first = self._communicators.rank == 0
        logger.log(
            logging.WARNING if first else logging.INFO,
            "%s%s brought no gradient in step %d, which counts as zeros: weight decay and momentum "
            "change them all the same. Plain DDP raises an error there; "
            "find_unused_parameters=True leaves them alone",
            names[0],
            more,
            step,
        )
