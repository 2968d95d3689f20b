"""The optimizer in the backward pass: a chunk is updated when its gradient is whole, and none is
kept until `step()`.

A gradient comes home into one of a few buffers that chunks have in common, which is free again
when the lanes have updated its chunk. Where all are in use, the backward pass waits. A chunk
that lives on the accelerator is updated there when its unit is through: before that the backward
pass may still read its weights, which the update would overwrite. Those of no unit, and those that
others read, are updated at the end of the pass. What has its states on the host computes with a
copy of the weights, and is updated at once.

The bits are those of an update after the pass: it multiplies gradients by 1, and random bits
depend on the step and the element alone.

# What cannot be
The factor of clipping, and what a second micro-batch adds, would come after the update. Nor can a
pass run again, or a second one come before `step()`: they would compute with weights of the next
step. Each is refused, before anything was updated where that can be known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from evener.errors import EvenerError, UsageError
from evener.zero.chunk import Chunk
from evener.zero.config import Config
from evener.zero.device import Device, Event
from evener.zero.lanes import Lanes
from evener.zero.spans import Spans
from evener.zero.updates import Updates, now

OPTION = "evener.optimizer_in_backward"
_RESUME = "resume from the last checkpoint"


def refuse(config: Config, ranks: int) -> None:
    """Raise UsageError for what cannot be with the optimizer in the backward pass."""
    if not config.optimizer_in_backward:
        return
    if config.clipping > 0:
        refuse_clipping(config.clipping)
    found = [
        (config.accumulation > 1,
         f"gradient_accumulation_steps = {config.accumulation}", "each backward pass is a step",
         "set it to 1 (a larger micro-batch does the same)"),
        (config.dtype == torch.float16,
         "fp16", "its loss scale skips a step when all gradients are known",
         "set bf16.enabled = true instead"),
        (config.stale_updates,
         "evener.stale_updates", "a pass has to wait for the update of each chunk", "leave it out"),
        (ranks > 1,
         f"{ranks} ranks", "gradients are shared between ranks before they are used",
         "train with one rank"),
    ]  # fmt: skip
    for wrong, what, why, fix in found:
        if wrong:
            raise UsageError(f"{OPTION} with {what}: {why}", f"{fix}, or leave {OPTION} out")


def refuse_clipping(norm: float) -> None:
    """Raise UsageError: gradients are to be clipped to this norm."""
    raise UsageError(
        f"{OPTION} with gradient_clipping = {norm:g}: the norm of all gradients is known only when "
        "the weights have been updated",
        f"set gradient_clipping (max_grad_norm) to 0, or leave {OPTION} out",
    )


class Buffers:
    """Host memory that the gradients of chunks have in common; of the training thread and the
    lanes."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._free: list[tuple[torch.Tensor, Event | None]] = [(each, None) for each in tensors]
        self._state = threading.Condition()
        self.largest = max((each.numel() for each in tensors), default=0)
        """Elements."""

    def add(self, tensor: torch.Tensor) -> None:
        """One more."""
        self.largest = max(self.largest, tensor.numel())
        self.give(tensor, None)

    def give(self, tensor: torch.Tensor, event: Event | None) -> None:
        """It is free, on the accelerator from `event` on."""
        with self._state:
            self._free.append((tensor, event))
            self._state.notify_all()

    def take(
        self, numel: int, failed: Callable[[], bool]
    ) -> tuple[torch.Tensor, Event | None] | None:
        """The smallest with room for `numel` elements, when it is free; None: something has failed
        before that."""

        def able() -> list[tuple[torch.Tensor, Event | None]]:
            return [entry for entry in self._free if entry[0].numel() >= numel]

        with self._state:
            while not self._state.wait_for(lambda: able() or failed(), timeout=1.0):
                pass
            if failed():
                return None
            found = min(able(), key=lambda entry: entry[0].numel())
            self._free = [entry for entry in self._free if entry is not found]
            return found


class InBackward:
    """See the head of this file; of the training thread. `groups`: gives the hyperparameters of
    now. `settle`: waits for the lanes, and raises what failed in one."""

    def __init__(
        self,
        device: Device,
        updates: Updates,
        lanes: Lanes,
        spans: Spans,
        buffers: Buffers,
        *,
        groups: Callable[[], list[dict[str, Any]]],
        settle: Callable[[], None],
    ) -> None:
        self.buffers = buffers
        self._device, self._updates, self._lanes, self._spans = device, updates, lanes, spans
        self._groups, self._settle = groups, settle
        self._with: list[dict[str, Any]] | None = None
        """The hyperparameters of this step's updates."""
        self._ahead: list[Chunk] = []
        self._waiting: list[Chunk] = []
        """Chunks on the accelerator whose gradient is whole and whose unit is not through."""
        self._spoiled = False
        """Whether the first gradient of this step was not finite: then all are left out."""
        self._torn: EvenerError | None = None

    @property
    def open(self) -> bool:
        """Whether a backward pass has updated something and no step has ended it."""
        return bool(self._ahead)

    def refuse_open(self, what: str) -> None:
        """Raise where `what` comes between the backward pass and the step."""
        if self._torn is not None:
            raise self._torn
        if self.open:
            raise UsageError(
                f"{what} between backward() and step(): with {OPTION} the backward pass has "
                "updated the weights",
                f"call step() right after backward(), or leave {OPTION} out",
            )

    def refuse_again(self) -> None:
        """Raise where a pass would run again after it has updated something."""
        if self.open:
            self._tear(
                "a pass has to run again (for want of memory, or as another forward pass came "
                f"before its backward pass), and {OPTION} has updated some of its weights",
                "give it more room (a smaller batch, a larger gpu budget), or one forward pass for "
                f"each backward pass; {_RESUME}",
            )

    def refuse_late(self, chunk: Chunk) -> None:
        """Raise where something needs the weights of a chunk, or brings it a gradient, after its
        update was begun."""
        if chunk.ahead:
            self._tear(
                f"{chunk.group.name} is used again in a backward pass after {OPTION} has updated "
                "it: its weights are no longer those of the last step",
                f"leave {OPTION} out for this model; {_RESUME}",
            )

    def _tear(self, problem: str, fix: str) -> None:
        self._torn = EvenerError(problem, fix)
        raise self._torn

    def sound(self, chunk: Chunk) -> bool:
        """Whether a gradient whose norms were taken is to be used. A step is left out as a whole:
        raises where others of it were updated before."""
        assert chunk.norms is not None
        if self._spoiled:
            return False
        with self._spans.host("wait", "training for the backward pass", chunk.group.name):
            finite = bool(torch.isfinite(chunk.norms).all())
        if not finite and self.open:
            self._tear(
                f"the gradient of {chunk.group.name} is not finite, and {OPTION} has updated "
                f"{len(self._ahead)} chunks of this step before it came",
                f"{_RESUME}; without {OPTION} such a step is skipped as a whole",
            )
        self._spoiled = not finite
        return finite

    def room(self, chunk: Chunk) -> torch.Tensor:
        """Where its gradient goes: a view of a buffer, of which the copy stream may write now."""
        chunk.updated.wait()
        numel = chunk.states.weights.numel()
        with self._spans.host("wait", "training for a buffer", chunk.group.name):
            found = self.buffers.take(numel, lambda: self._lanes.failed)
        if found is None:
            self._settle()
            raise EvenerError("an update has failed", _RESUME)
        buffer, event = found
        if event is not None:
            self._device.wait("d2h", event)
        chunk.gradient_buffer = buffer
        return buffer[:numel]

    def begin(self, chunk: Chunk) -> None:
        """Its gradient is on its way to the buffer: update it."""
        self._mark(chunk)
        job = self._updates.start(chunk, set(chunk.given), self._hyper(), 1.0)
        assert job is not None
        job.done = self._given_back
        self._lanes.put([job])

    def _given_back(self, chunk: Chunk) -> None:
        """The lanes call this: the chunk is updated, and its buffer is free."""
        buffer, chunk.gradient_buffer, chunk.gradient = chunk.gradient_buffer, None, None
        assert buffer is not None
        self.buffers.give(buffer, chunk.updated_event)

    def wait(self, chunk: Chunk) -> None:
        """A gradient stays on the accelerator until its chunk can be updated there."""
        self._mark(chunk)
        self._waiting.append(chunk)

    def _mark(self, chunk: Chunk) -> None:
        self._hyper()
        chunk.ahead = True
        self._ahead.append(chunk)

    def _hyper(self) -> list[dict[str, Any]]:
        if self._with is None:
            self._with = [_values(group) for group in self._groups()]
        return self._with

    def through(self, chunks: list[Chunk]) -> None:
        """The backward pass is through a unit with these chunks."""
        mine = {chunk.index for chunk in chunks}
        for chunk in list(self._waiting):
            if chunk.index in mine and not chunk.stays:
                self._update(chunk)

    def end(self) -> None:
        """The backward pass is through."""
        for chunk in list(self._waiting):
            self._update(chunk)

    def _update(self, chunk: Chunk) -> None:
        self._waiting = [each for each in self._waiting if each is not chunk]
        self._updates.start(chunk, set(chunk.given), self._hyper(), 1.0)
        chunk.gradient = None

    def step(self, groups: list[dict[str, Any]], finite: bool) -> None:
        """The step that this pass was: weights on the accelerator are old now. Raises where
        `groups` have other hyperparameters than the updates had."""
        if self._torn is not None:
            raise self._torn
        if self.open and not finite:
            self._tear(
                f"the norm of all gradients is not finite, and {OPTION} has updated the weights",
                _RESUME,
            )
        if self._with is not None and self.open:
            for chunk in self._ahead:
                number = chunk.group.group
                asked, had = _values(groups[number]), self._with[number]
                for name in chunk.group.rule.values:
                    if asked[name] != had[name]:
                        self._tear(
                            f"{name} of group {number} was changed from {had[name]} to "
                            f"{asked[name]} between backward() and step(), and {OPTION} has used "
                            "the first",
                            f"change it before backward(); {_RESUME}",
                        )
        for chunk in self._ahead:
            if not chunk.resident:
                chunk.stale, chunk.loaded = True, False
                chunk.guard()
        self.clear()

    def clear(self) -> None:
        """No step is open: one has ended, or all weights and states were loaded."""
        for chunk in self._waiting:
            chunk.gradient = None
        for chunk in self._ahead:
            chunk.ahead = chunk.filled = False
            chunk.norms = None
            chunk.given.clear()
        self._ahead.clear()
        self._waiting.clear()
        self._with, self._spoiled, self._torn = None, False, None


def _values(group: dict[str, Any]) -> dict[str, Any]:
    return {name: now(value) for name, value in group.items() if name != "params"}
