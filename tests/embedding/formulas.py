"""Published formulas of optimizers that torch lacks, in plain torch, one dense parameter each.

Row-wise Adagrad and partial row-wise Adam are FBGEMM's (codegen/genscript/optimizers.py there);
LAMB is You et al., 2020, with a row as a layer.
"""

from __future__ import annotations

from typing import Any

import torch


class _Formula(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float, **how: Any) -> None:
        super().__init__(parameters, {"lr": lr, **how})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                self.update(p, p.grad, state, group)

    def slot(self, state: Any, name: str, like: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = state.setdefault(name, torch.zeros_like(like))
        return found

    def update(self, w: torch.Tensor, g: torch.Tensor, state: Any, o: Any) -> None:
        raise NotImplementedError


class RowWiseAdagrad(_Formula):
    """`decay`, and with `decoupled` FBGEMM's mode DECOUPLE, else L2."""

    def update(self, w: torch.Tensor, g: torch.Tensor, state: Any, o: Any) -> None:
        s, decay = self.slot(state, "sum", w[:, :1]), o["weight_decay"]
        with_decay = g if o["decoupled"] else g + decay * w
        s += with_decay.square().mean(1, keepdim=True)
        size = o["lr"] / (s.sqrt() + o["eps"])
        keep = 1 - decay * (o["lr"] if o["decoupled"] else size)
        w.copy_(keep * w - size * g)


class PartialRowWiseAdam(_Formula):
    """Betas as in Adam; one second moment for a row."""

    def update(self, w: torch.Tensor, g: torch.Tensor, state: Any, o: Any) -> None:
        m, v = self.slot(state, "exp_avg", w), self.slot(state, "exp_avg_sq", w[:, :1])
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.999).add_(g.square().mean(1, keepdim=True), alpha=0.001)
        first, second = m / (1 - 0.9 ** state["step"]), v / (1 - 0.999 ** state["step"])
        w -= o["lr"] * (first / (second.sqrt() + o["eps"]) + o["weight_decay"] * w)


class Lamb(_Formula):
    """The step of AdamW, as long as the row, times lr."""

    def update(self, w: torch.Tensor, g: torch.Tensor, state: Any, o: Any) -> None:
        m, v = self.slot(state, "exp_avg", w), self.slot(state, "exp_avg_sq", w)
        m.mul_(0.9).add_(g, alpha=0.1)
        v.mul_(0.999).add_(g.square(), alpha=0.001)
        first, second = m / (1 - 0.9 ** state["step"]), v / (1 - 0.999 ** state["step"])
        r = first / (second.sqrt() + o["eps"]) + o["weight_decay"] * w
        length, way = w.norm(dim=1, keepdim=True), r.norm(dim=1, keepdim=True)
        trust = torch.where((length > 0) & (way > 0), length / way, torch.ones_like(way))
        w -= o["lr"] * trust * r
