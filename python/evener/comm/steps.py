"""The course of training steps, as a front door sees it: what is observed when, and what follows.

step 0   the reducer measures the order of gradients and lays out its buckets
1, 2     two steps are profiled, their buckets held back until backward has ended: when each is
         complete, when forward needs it, what its stages take. The shorter one counts: in the
         first, memory is still being allocated
3        with a planner: one with communication beside backward tells how much each costs the other
then     rank 0 decides for all: the order of issue, and with a planner what each bucket does
after    steps as decided, overlapped where there is an optimizer to defer

Where ranks talk of what follows, all of them are: at the end of a backward that was reduced. A
forward may be one rank's own (an evaluation, a sample that is logged), and waits for nobody.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from evener.base import settings
from evener.comm.overlap import StepOverlap
from evener.comm.planner.live import Planner
from evener.comm.planner.sequence import best_sequence
from evener.comm.profile import Recorder, StepProfile, median
from evener.comm.reducer import Reducer

logger = logging.getLogger("evener.comm")

_PROFILED = 1
# Whether buckets are held back in the profiled steps.
_ORDER, _PLAN = (True, True), (True, True, False)


class Steps:
    """Conducts one reducer's steps. `profile` is the latest one, once there is one."""

    def __init__(
        self, reducer: Reducer, overlap: StepOverlap | None = None, planner: Planner | None = None
    ) -> None:
        self.reducer, self.overlap, self.planner = reducer, overlap, planner
        self.profile: StepProfile | None = None
        # Called when a forward begins that will be differentiated; for who counts or times them.
        self.on_forward: Callable[[], None] | None = None
        self._count = 0
        self._profile_at = _PROFILED
        self._recorder: Recorder | None = None
        self._taken: list[Recorder] = []
        self._path = settings.EVENER_PROFILE.get()
        self._wanted = overlap is not None or planner is not None or bool(self._path)

    @property
    def _held(self) -> tuple[bool, ...]:
        return _ORDER if self.planner is None else _PLAN

    @_disable_dynamo
    def forward_began(self, compiled: bool) -> None:
        """Before a forward of the model. `compiled`: torch.compile looks through it."""
        if compiled and self.overlap is not None and not self.overlap.off:
            self.overlap.off = "the model is compiled"
            self.finish("the model is compiled, there will be no overlap")
        if not torch.is_grad_enabled():
            self.finish("evaluation")
            return
        self._tell()
        if not self.reducer.arrivals.active:
            return
        if self._recorder is not None and "landed" in self._recorder.marks:
            self._recorder.mark("end")
            self._taken.append(self._recorder)
            self._recorder = self.reducer.recorder = None
        place = self._count - self._profile_at
        if self._wanted and 0 <= place < len(self._held):
            if self._recorder is None:
                self._recorder = self.reducer.recorder = Recorder(self.reducer.device)
                self.reducer.arrivals.holds = self._held[place]
            if self.overlap is not None:
                self.overlap.trace(self._recorder)
            self._recorder.mark("begin")
        elif self.overlap is not None:
            self.overlap.forward_begins()

    def _tell(self) -> None:
        if self.on_forward is not None:
            self.on_forward()

    def _turn(self) -> None:
        """A step's reductions have been issued, here as on all ranks: what follows?"""
        self._count += 1
        if len(self._taken) == len(self._held):
            taken, self._taken = self._taken, []
            self.finish("")  # what is measured next has the network for itself
            self._settle(taken)
        if self.planner is not None and self.planner.step_begins():
            self._profile_at = self._count

    @_disable_dynamo
    def own_forward_began(self) -> None:
        """Before a forward whose gradients DDP's own reducer takes (`evener.ddp.torch_reducer`)."""
        if torch.is_grad_enabled():
            self._tell()

    def own_backward_ended(self) -> None:
        """DDP's own reducer has reduced."""
        self.reducer.steps += 1
        self._turn()

    @_disable_dynamo
    def forward_ended(self) -> None:
        """After it."""
        if not torch.is_grad_enabled():
            return
        if self.overlap is not None:
            self.overlap.forward_ended()
        if self._recorder is not None:
            self._recorder.mark("forward_ended")

    def shadow(self) -> None:
        """A step of the other ranks, to which this one brings nothing: it has no more inputs.

        Its gradients stay those of its own last step, as DDP leaves them: an optimizer that joins
        too (ZeroRedundancyOptimizer) goes on from these.
        """
        self.finish("join()")
        self.reducer.arrivals.active = True
        with torch.enable_grad():
            self.forward_began(compiled=False)
            self.finish("join()")
            if self.overlap is not None:
                self.overlap.forward_ended()
        self.reducer.keep_apart()
        last = [parameter.grad for parameter in self.reducer.parameters]
        for parameter in self.reducer.parameters:
            parameter.grad = None
        self.reducer.unused.joined = True
        self.reducer.flush()
        self.reducer.unused.joined = False
        self.reducer.arrivals.holds = False
        self.reducer.apply()
        for parameter, gradient in zip(self.reducer.parameters, last, strict=True):
            parameter.grad = gradient
        self.reducer.arrivals.active = False
        if self._recorder is not None:  # without the other marks: it tells nothing
            self._recorder.mark("landed")
        self._turn()

    def backward_ended(self, at_once: bool = False) -> frozenset[int]:
        """A backward that brought gradients has ended: reduce what is missing, bring it in.

        `at_once`: nothing is left on its way. Returns the indices of the parameters that no rank
        used, and whose gradients are as they were.
        """
        recorder = self._recorder
        if recorder is not None:  # what was held back leaves now: that is not backward's
            recorder.mark("backward_ended")
        self.reducer.flush()
        alone = self.reducer.left_alone
        self.reducer.arrivals.holds = False
        if self.overlap is None:
            self.reducer.apply()
        else:
            self.overlap.backward_ended(at_once=at_once or recorder is not None)
        if recorder is not None:
            recorder.mark("landed")
        self._turn()
        return alone

    def finish(self, reason: str) -> None:
        """Bring in what is on its way across the step; see `StepOverlap.finish`."""
        if self.overlap is not None:
            self.overlap.finish(reason)

    def _settle(self, taken: list[Recorder]) -> None:
        """The profiled steps are over: agree on what follows."""
        profile = self._profiled(taken)
        if profile is not None:
            self.profile = profile
            if self._path and self.reducer.communicators.rank == 0:
                try:
                    profile.save(Path(self._path))
                except OSError as error:  # a job does not end for it
                    logger.warning("no profile: %s cannot be written: %s", self._path, error)
        elif self._path and self.reducer.communicators.rank == 0:
            logger.warning(
                "no profile: %s is not written, because backward went round the model's forward",
                self._path,
            )
        if self.planner is not None:
            self.planner.decide(profile, self.overlap)
        elif self.overlap is not None:
            order = None if profile is None else _order(profile)
            control = self.reducer.communicators.control.handle
            box: list[Any] = [order]
            dist.broadcast_object_list(box, group=control, group_src=0)
            if box[0] is not None:
                self.reducer.resequence(box[0])
                if self.reducer.communicators.rank == 0:
                    logger.debug("buckets leave in the order %s", " ".join(map(str, box[0])))

    def _profiled(self, taken: list[Recorder]) -> StepProfile | None:
        """What these steps say together; None where the script went round the model's forward."""
        steps = list(zip(taken, self._held, strict=True))
        alone = [(r.profile(self._describe()), r) for r, held in steps if held and r.whole]
        if not alone:
            return None
        best, recorder = min(alone, key=lambda found: found[0].compute_ms)
        least = []
        for several in zip(*(profile.buckets for profile, _ in alone), strict=True):
            a, b, c = (min(times) for times in zip(*(s.stages_ms for s in several), strict=True))
            least.append((a, b, c))
        buckets = tuple(
            dataclasses.replace(bucket, stages_ms=times)
            for bucket, times in zip(best.buckets, least, strict=True)
        )
        best = dataclasses.replace(best, buckets=buckets)
        for beside, held in steps:
            if not held and beside.whole:
                drag, crowd = beside.drag(best.backward_ms), beside.crowd(recorder)
                best = dataclasses.replace(best, drag=drag, crowd=crowd)
        return best

    def _describe(self) -> list[tuple[str, int, int, bool]]:
        return [
            (
                self.reducer.names[bucket.slots[0].index] + bucket.part,
                0
                if self.reducer.parts.expects_none(bucket)
                else sum(slot.numel for slot in bucket.slots),
                bucket.buffer.element_size(),
                bucket.by_rows,
            )
            for bucket in self.reducer.buckets
        ]


def _order(profile: StepProfile) -> tuple[int, ...]:
    """By the median rate of each stage: the first bucket's own time holds the wait for peers."""
    places = [_evened(profile, place) for place in range(3)]
    stages = [(a, b, c) for a, b, c in zip(*places, strict=True)]
    return best_sequence(profile, stages, overlap=True)


def _evened(profile: StepProfile, place: int) -> list[float]:
    """What the stage should take for each bucket: the least of all, and its bytes at the median of
    what bytes took, by bytes."""
    sizes = [bucket.bytes for bucket in profile.buckets]
    times = [bucket.stages_ms[place] for bucket in profile.buckets]
    taken = [(t / size, float(size)) for t, size in zip(times, sizes, strict=True) if t and size]
    if not taken:
        return times
    rate = median(taken, 0.0)
    least = min(t for t in times if t)
    return [max(least, rate * size) if t else 0.0 for t, size in zip(times, sizes, strict=True)]
