"""AdamW and Adam; crates/kernels/src/adam.rs has the formula, `triton_adam.py` the GPU's kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from evener.base import optimizers as _optimizers
from evener.errors import UsageError
from evener.zero.rules.base import Rule
from evener.zero.states import Noise, States, float32, random_key, root


class AdamW(Rule):
    """Loshchilov & Hutter, arXiv 1711.05101: weight decay apart from the gradient."""

    name = "adamw"
    title = "AdamW"
    defaults: ClassVar[Mapping[str, Any]] = {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
    }
    moments = {"exp_avg": "first", "exp_avg_sq": "second"}  # noqa: RUF012
    only = {"amsgrad": False, "maximize": False}  # noqa: RUF012
    kernel = True
    decoupled = True

    @classmethod
    def from_deepspeed(cls, kind: str, params: dict[str, Any]) -> dict[str, Any] | None:
        """See `Rule.from_deepspeed`. DeepSpeed's Adam is AdamW unless `adam_w_mode` is false."""
        if kind in ("adam", "deepspeedcpuadam", "fusedadam", "cpuadam"):
            kind = "adam" if params.get("adam_w_mode") is False else "adamw"
        if params.get("bias_correction", True) is False:
            raise UsageError("optimizer.params.bias_correction = false", "leave it on")
        kept = {k: v for k, v in params.items() if k not in ("adam_w_mode", "bias_correction")}
        return super().from_deepspeed(kind, kept)

    def scalars(self, hyper: Mapping[str, Any], step: int, scale: float) -> dict[str, float]:
        """The scalars of the loop, computed in float64; each is rounded to float32 once."""
        (beta1, beta2), lr, decay = hyper["betas"], hyper["lr"], hyper["weight_decay"]
        return {
            "scale": scale,
            "coupled": 0.0 if self.decoupled else decay,
            "shrink": 1 - lr * decay if self.decoupled else 1.0,
            "beta1": beta1,
            "rest1": 1 - beta1,
            "beta2": beta2,
            "rest2": 1 - beta2,
            "root": 1 / (1 - beta2**step) ** 0.5,
            "epsilon": hyper["eps"],
            "rate": lr / (1 - beta1**step),
        }

    def formula(
        self,
        w: torch.Tensor,
        g: torch.Tensor,
        moments: list[torch.Tensor],
        hyper: Mapping[str, Any],
        step: int,
    ) -> None:
        """See `Rule.formula`."""
        s = self.scalars(hyper, step, 1.0)
        m, v = moments
        if self.decoupled:
            w.mul_(s["shrink"])
        elif hyper["weight_decay"] != 0:
            g += w * hyper["weight_decay"]
        m.mul_(s["beta1"]).add_(g * s["rest1"])
        v.mul_(s["beta2"]).add_((g * g).mul_(s["rest2"]))
        change = m / root(v).mul_(float32(s["root"])).add_(s["epsilon"])
        w.sub_(change.mul_(s["rate"]))

    def on_host(
        self,
        states: States,
        gradient: torch.Tensor,
        hyper: Mapping[str, Any],
        step: int,
        scale: float,
        run: _optimizers.Run,
    ) -> None:
        """See `Rule.on_host`: one fused pass."""
        _optimizers.adam(
            states.master_copy,
            gradient,
            states.moment("first"),
            states.moment("second"),
            states.output,
            step=step,
            scale=scale,
            decoupled=self.decoupled,
            run=run,
            **hyper,
        )

    def on_device(
        self,
        states: States,
        gradient: torch.Tensor,
        hyper: Mapping[str, Any],
        step: int,
        scale: float,
        noise: Noise | None = None,
    ) -> None:
        """See `Rule.on_device`: one kernel on a GPU."""
        if not states.weights.is_cuda:
            super().on_device(states, gradient, hyper, step, scale, noise)
            return
        from evener.zero.rules import triton_adam

        noise = noise or Noise()
        master, other = "float32", None
        if states.lower is not None:
            master, other = "split", states.lower
        elif states.master is not None:
            master, other = "float16", states.master
        elif states.rounded:
            master = "bfloat16"
        triton_adam.adam(
            master,
            states.weights,
            other,
            gradient,
            states.moment("first"),
            states.moment("second"),
            self.scalars(hyper, step, scale),
            coupled=not self.decoupled and hyper["weight_decay"] != 0,
            key=random_key(noise.seed, step, noise.stream),
            offset=noise.offset,
        )


class Adam(AdamW):
    """Kingma & Ba, arXiv 1412.6980: weight decay as an L2 term of the gradient."""

    name = "adam"
    title = "Adam"
    defaults: ClassVar[Mapping[str, Any]] = {**AdamW.defaults, "weight_decay": 0.0}
    only = {**AdamW.only, "decoupled_weight_decay": False}  # noqa: RUF012
    decoupled = False
