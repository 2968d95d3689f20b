"""What compression remembers of a shard from step to step, and what happens to it.

- `residual`: what was not sent yet, added to the next step's gradient (error feedback; Stich et
  al., arXiv 1809.07599). In units of the gradients that the ranks put in.
- `velocity`: momentum, where the reducer and not the optimizer applies it (`Options.momentum`).
  Under a sparse form it is this rank's own (`velocity_local`), else the same on all. What is not
  finite in a gradient reaches the optimizer, or the loss scaler, but not the velocity.

Both belong to parameters, not to buckets: checkpoints hold one tensor of the parameter's shape for
each, summed over all ranks, so they can be loaded in a world of another size. The sum over all
ranks is what matters to the model; which rank had which part is not kept.

Loss scaling. Residuals are in units of the scaled loss. When the scale changes from s to t they are
multiplied by t / s. A step that the scaler skipped was reduced but not applied: what top-k sent in
it goes back into the residual. The finite rest of that step's gradients stays there too, which is
right: they are gradients of real data, and will be applied later. What is not finite is never kept.
INT8 sends all of a gradient, so a skipped step loses that step's gradient only, as without it.
A velocity that is everybody's is put back to what it was before that step, as an optimizer's is.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler

from evener.comm.scalers import Watcher

logger = logging.getLogger("evener.comm")


@dataclass(frozen=True)
class Matrix:
    """Rows of a parameter in a shard: they begin at its entry `offset` and follow each other."""

    offset: int
    rows: int
    columns: int


class Sent(Protocol):
    """What a step took out of the residual, while it may be skipped."""

    def give_back(self, residual: torch.Tensor, skipped: torch.Tensor | float) -> None:
        """Add what is finite of it to `residual` where `skipped` is 1; nothing where it is 0."""

    def let_go(self) -> None:
        """Let go of its tensors, as the function of that name does."""


@dataclass
class SentEntries:
    """Entries of a shard: [k] float32, [k] int64. With 0 a place may come twice."""

    values: torch.Tensor
    places: torch.Tensor

    def give_back(self, residual: torch.Tensor, skipped: torch.Tensor | float) -> None:
        """See `Sent`."""
        returned = torch.where(self.values.isfinite(), self.values, 0.0) * skipped
        residual.index_add_(0, self.places, returned)

    def let_go(self) -> None:
        """See `Sent`."""
        let_go(self.values)
        let_go(self.places)


@dataclass
class ShardState:
    """State of a bucket's shard on this rank. `steps`: compressed exchanges it went through.

    `matrices`: which of its entries are rows of matrices; None: nobody said. `memory`: what a form
    remembers besides, which is no gradient, can be made anew, and is equal on all peers.
    """

    bucket: int
    steps: int = 0
    residual: torch.Tensor | None = None
    velocity: torch.Tensor | None = None
    velocity_local: bool = False
    velocity_before: torch.Tensor | None = None  # while the step may be skipped
    keep_sent: bool = False
    sent: Sent | None = None
    matrices: tuple[Matrix, ...] | None = None
    memory: object = None

    def residual_for(self, shard: torch.Tensor) -> torch.Tensor:
        """The residual, float32, of `shard`'s length; zeros at first."""
        if self.residual is None:
            self.residual = torch.zeros(shard.numel(), dtype=torch.float32, device=shard.device)
        return self.residual

    @contextlib.contextmanager
    def aside(self, places: Sequence[tuple[int, int]], numel: int) -> Iterator[None]:
        """Take what is remembered of these entries, of `numel`, out for a step without them."""
        taken = [
            (name, low, high, tensor[low:high].clone())
            for name in ("residual", "velocity")
            for low, high in places
            if low < high and (tensor := getattr(self, name)) is not None
        ]
        for name, low, high, _ in taken:
            getattr(self, name)[low:high] = 0
        yield
        for name, low, high, values in taken:
            if getattr(self, name) is None:  # handed over to a milder form
                setattr(self, name, values.new_zeros(numel))
            getattr(self, name)[low:high] += values

    def with_momentum(self, gradient: torch.Tensor, momentum: float) -> torch.Tensor:
        """The velocity with this step's `gradient` [n] in it: float32 [n], to be read only.

        Where the gradient is not finite, what is returned is neither; the velocity itself is.
        """
        if self.velocity is None:
            self.velocity = torch.zeros_like(gradient, dtype=torch.float32)
        if self.keep_sent and not self.velocity_local:
            spare, self.velocity_before = self.velocity_before, self.velocity
            self.velocity = torch.empty_like(self.velocity) if spare is None else spare
            torch.mul(self.velocity_before, momentum, out=self.velocity)
        else:
            self.velocity.mul_(momentum)
        finite = gradient.isfinite()
        self.velocity.add_(torch.where(finite, gradient, 0.0))
        return torch.where(finite, self.velocity, gradient)

    def rescale(self, change: ScaleChange) -> None:
        """The loss scale has changed since the last exchange; see the module."""
        if self.sent is not None and self.residual is not None:
            skipped = _on(change.skipped, self.residual.device)
            self.sent.give_back(self.residual, skipped * 1.0)
            self.sent.let_go()
            self.sent = None
        if self.velocity is not None and self.velocity_before is not None:
            before = self.velocity_before
            keep = _on(change.skipped, before.device)
            if not isinstance(keep, torch.Tensor):
                keep = torch.tensor(keep, device=before.device)
            torch.where(keep, before, self.velocity, out=self.velocity)
        for tensor in (self.residual, self.velocity):
            if tensor is not None:
                tensor.mul_(_on(change.factor, tensor.device))


def let_go(tensor: torch.Tensor) -> None:
    """It is dropped now, on a stream that may be another than the one that made it."""
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def _on(value: float | bool | torch.Tensor, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True)
class ScaleChange:
    """`factor`: new scale over old. `skipped`: whether the step before was. Scalars, or tensors of

    one element on the device, so that nobody has to wait for them.
    """

    factor: float | torch.Tensor
    skipped: bool | torch.Tensor


class LossScale:
    """The scale in which gradients come, from a GradScaler or said by the script.

    A scaler shrinks its scale when, and only when, it has skipped a step; that is how a skipped
    step is known here (`GradScaler.update(new_scale)` with a smaller scale of your own looks so
    too).
    """

    def __init__(self, scaler: GradScaler | None = None) -> None:
        self.scaler = scaler
        self.given: float | None = None
        self._last: float | torch.Tensor | None = None
        self._watcher: Watcher | None = None

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Find the scaler of `parameters`' optimizer, unless there is one: see `comm.scalers`."""
        if not self.active:
            self._watcher = Watcher(parameters, self._found)

    def settle(self) -> None:
        """Look for no scaler any more. May be called twice."""
        if self._watcher is not None:
            self._watcher.close()
            self._watcher = None

    def _found(self, scaler: GradScaler) -> None:
        if self.active:
            return
        self.scaler = scaler
        # It is about to step: what residuals there are come from gradients in its scale.
        self._last = self._now()
        logger.info("residuals follow the loss scale of the %s", type(scaler).__name__)

    @property
    def active(self) -> bool:
        """Whether there is a scale to follow."""
        return self.scaler is not None or self.given is not None

    def _now(self) -> float | torch.Tensor:
        if self.scaler is None:
            return 1.0 if self.given is None else self.given
        # `get_scale()` makes the host wait for the device; the tensor behind it does not.
        tensor = getattr(self.scaler, "_scale", None)
        return tensor.clone() if isinstance(tensor, torch.Tensor) else self.scaler.get_scale()

    def change(self) -> ScaleChange | None:
        """What has changed since the last call; None at the first one, or where nothing scales."""
        if not self.active:
            return None
        now, last = self._now(), self._last
        self._last = now
        return None if last is None else ScaleChange(now / last, now < last)

    def value(self) -> float:
        """The scale of what the residuals hold now."""
        return 1.0 if self._last is None else float(self._last)

    def resume(self, scale: float) -> None:
        """Residuals in `scale` were loaded."""
        if self.active:
            self._last = scale
