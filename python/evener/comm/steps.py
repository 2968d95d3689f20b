"""The course of training steps, as a front door sees it: what is observed when, and what follows.

step 0   the reducer measures the order of gradients and lays out its buckets
step 1   one step is profiled: when each bucket is complete, when forward needs it, what its
         stages take; then rank 0 decides (order of issue, and a planner's choices) for all
after    steps as decided, overlapped where there is an optimizer to defer
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from evener import settings
from evener.comm.overlap import StepOverlap
from evener.comm.planner.live import Planner
from evener.comm.planner.sequence import best_sequence
from evener.comm.profile import Recorder, StepProfile
from evener.comm.reducer import Reducer

logger = logging.getLogger("evener.comm")

_PROFILED = 1


class Steps:
    """Conducts one reducer's steps. `profile` is the latest one, once there is one."""

    def __init__(
        self, reducer: Reducer, overlap: StepOverlap | None = None, planner: Planner | None = None
    ) -> None:
        self.reducer, self.overlap, self.planner = reducer, overlap, planner
        self.profile: StepProfile | None = None
        self._count = self._begun = 0
        self._profile_at = _PROFILED
        self._recorder: Recorder | None = None
        self._path = settings.EVENER_PROFILE.get()
        self._wanted = overlap is not None or planner is not None or bool(self._path)

    @_disable_dynamo
    def forward_began(self, compiled: bool) -> None:
        """Before a forward of the model. `compiled`: torch.compile looks through it."""
        if compiled and self.overlap is not None and not self.overlap.off:
            self.overlap.off = "the model is compiled"
            self.finish("the model is compiled, there will be no overlap")
        if not torch.is_grad_enabled():
            self.finish("evaluation")
            return
        if not self.reducer.active:
            return
        if self._recorder is not None and "landed" in self._recorder.marks:
            self._recorder.mark("end")
            self._settle(self._recorder)
        if self.planner is not None and self._begun < self._count:
            self._begun = self._count
            if self.planner.step_begins():
                self._profile_at = self._count
        if self._wanted and self._count == self._profile_at:
            if self._recorder is None:
                self._recorder = self.reducer.recorder = Recorder(self.reducer.device)
            if self.overlap is not None:
                self.overlap.trace(self._recorder)
            self._recorder.mark("begin")
        elif self.overlap is not None:
            self.overlap.forward_begins()

    @_disable_dynamo
    def forward_ended(self) -> None:
        """After it."""
        if not torch.is_grad_enabled():
            return
        if self.overlap is not None:
            self.overlap.forward_ended()
        if self._recorder is not None:
            self._recorder.mark("forward_ended")

    def backward_ended(self) -> None:
        """A backward that brought gradients has ended: reduce what is missing, bring it in."""
        self.reducer.flush()
        recorder = self._recorder
        if recorder is not None:
            recorder.mark("backward_ended")
        if self.overlap is None:
            self.reducer.apply()
        else:
            self.overlap.backward_ended(at_once=recorder is not None)
        if recorder is not None:
            recorder.mark("landed")
        self._count += 1

    def finish(self, reason: str) -> None:
        """Bring in what is on its way across the step; see `StepOverlap.finish`."""
        if self.overlap is not None:
            self.overlap.finish(reason)

    def _settle(self, recorder: Recorder) -> None:
        """The profiled step is over: agree on what follows."""
        self._recorder = self.reducer.recorder = None
        profile = None
        if recorder.whole:  # it is not where the script went round the model's forward
            profile = self.profile = recorder.profile(self._describe())
            if self._path and self.reducer.communicators.rank == 0:
                profile.save(Path(self._path))
        if self.planner is not None:
            self.planner.decide(profile)
        elif self.overlap is not None:
            order = None if profile is None else _order(profile)
            control = self.reducer.communicators.control.handle
            box: list[Any] = [order]
            dist.broadcast_object_list(box, group=control, group_src=0)
            if box[0] is not None:
                self.reducer.resequence(box[0])
                if self.reducer.communicators.rank == 0:
                    logger.info("buckets leave in the order %s", " ".join(map(str, box[0])))

    def _describe(self) -> list[tuple[str, int, int]]:
        return [
            (
                self.reducer.names[bucket.slots[0].index] + bucket.part,
                sum(slot.numel for slot in bucket.slots),
                bucket.buffer.element_size(),
            )
            for bucket in self.reducer.buckets
        ]


def _order(profile: StepProfile) -> tuple[int, ...]:
    return best_sequence(profile, [bucket.stages_ms for bucket in profile.buckets], overlap=True)
