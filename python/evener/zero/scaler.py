"""Loss scaling for fp16 (Micikevicius et al., "Mixed precision training", arXiv 1710.03740): halve
on overflow, double after a run of steps without one. DeepSpeed's names for the parameters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossScaler:
    """`window` 0: a static scale."""

    scale: float = 65536.0
    window: int = 1000
    smallest: float = 1.0
    hysteresis: int = 1
    good: int = 0
    bad: int = 0

    def update(self, finite: bool) -> None:
        """After a step."""
        if self.window == 0:
            return
        if not finite:
            self.good = 0
            self.bad += 1
            if self.bad >= self.hysteresis:
                self.bad = 0
                self.scale = max(self.scale / 2, self.smallest)
            return
        self.good += 1
        if self.good >= self.window:
            self.good = self.bad = 0
            self.scale *= 2
