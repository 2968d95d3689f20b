"""What a loss and its gradients are multiplied by: for accumulation, for fp16, and to clip."""

from __future__ import annotations

import logging

import torch

from evener.errors import UsageError
from evener.zero.scaler import LossScaler
from evener.zero.spans import Spans

logger = logging.getLogger("evener.zero")


class Scaling:
    """`clipping`: the largest norm of all gradients; 0: they are not clipped."""

    def __init__(self, accumulation: int, clipping: float, scaler: LossScaler | None) -> None:
        self.clipping = clipping
        self.scaler = scaler
        self.norm: torch.Tensor | None = None
        """The norm of all gradients in the last step, unscaled, before clipping."""
        self._accumulation = accumulation
        self._used = False  # since the last step

    @property
    def scale(self) -> float:
        """The loss scale."""
        return self.scaler.scale if self.scaler else 1.0

    def loss(self, loss: torch.Tensor) -> torch.Tensor:
        """What to call `backward()` on."""
        self._used = True
        if self.scale == 1.0 and self._accumulation == 1:
            return loss
        return loss * (self.scale / self._accumulation)

    def refuse_unscaled(self, filled: bool) -> None:
        """At the end of a step. Raises UsageError where there are gradients (`filled`), and no loss
        was scaled that should have been."""
        used, self._used = self._used, False
        if self.scaler is not None and not used and filled:
            raise UsageError(
                "the loss was not scaled, and fp16 divides its gradients by the loss scale",
                "call engine.backward(loss), or engine.scale(loss).backward()",
            )

    def factor(self, norm: torch.Tensor, spans: Spans, step: int) -> float | None:
        """What gradients with this norm are multiplied by: unscaled and clipped. None: it is not
        finite, and step `step` is skipped."""
        unscale = 1.0 / self.scale
        self.norm = norm * unscale
        with spans.host("wait", "training for the backward pass", "norm"):
            finite = bool(torch.isfinite(self.norm))
        if self.scaler is not None:
            self.scaler.update(finite)
        if not finite:
            logger.warning(
                "step %d skipped: the gradient is not finite%s",
                step,
                f"; loss scale is now {self.scaler.scale:g}" if self.scaler else "",
            )
            return None
        if self.clipping <= 0:
            return unscale
        return float((self.clipping / (self.norm + 1e-6)).clamp(max=1.0)) * unscale
