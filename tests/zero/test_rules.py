"""Optimizers of `evener.zero`: which of the user's are taken, and that a rule is one class."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from evener import zero
from evener.base import optimizers as _optimizers
from evener.errors import UsageError
from evener.zero import rules
from evener.zero.states import Noise, States

from .engines import configuration, weights
from .models import Model, batches, loss_of


class Lion(torch.optim.Optimizer):
    """Lion as users have it: its own class, which no library of ours knows."""

    __module__ = "lion_pytorch.lion_pytorch"

    def __init__(self, params: Any, lr: float = 1e-4, **other: Any) -> None:
        options = {"betas": (0.9, 0.99), "weight_decay": 0.0, "decoupled_weight_decay": False}
        super().__init__(params, {"lr": lr, **options, **other})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - lr * group["weight_decay"])
                p.sub_(torch.sign(m * beta1 + p.grad * (1 - beta1)) * lr)
                m.mul_(beta2).add_(p.grad * (1 - beta2))


@pytest.mark.parametrize("resident", [set(), {"layers.1/0", "head/0"}])
def test_a_users_lion_trains_as_in_a_plain_loop(resident: set[str]) -> None:
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    theirs = Lion(plain.parameters(), 1e-3, weight_decay=0.1)
    engine, optimizer, *_ = zero.initialize(
        model=model,
        optimizer=Lion(model.parameters(), 1e-3, weight_decay=0.1),
        config={**configuration(), "gradient_clipping": 0.0},
        resident=resident,
    )
    for tokens in batches(6):
        engine.backward(loss_of(engine, tokens))
        engine.step()
        loss_of(plain, tokens).backward()
        theirs.step()
        theirs.zero_grad()
    found = weights(engine)
    for name, parameter in plain.named_parameters():
        assert torch.equal(found[name], parameter.detach()), name
    moment = optimizer.state_dict()["state"][0]
    assert set(moment) == {"step", "exp_avg"}
    assert torch.equal(moment["exp_avg"], theirs.state_dict()["state"][0]["exp_avg"])
    engine.close()


def test_options_that_change_the_arithmetic_are_refused() -> None:
    parameters = [nn.Parameter(torch.zeros(3))]
    for made, named in (
        (torch.optim.AdamW(parameters, amsgrad=True), r"AdamW\(amsgrad=True\)"),
        (torch.optim.SGD(parameters, maximize=True), r"SGD\(maximize=True\)"),
        (Lion(parameters, decoupled_weight_decay=True), r"Lion\(decoupled_weight_decay=True\)"),
        (torch.optim.NAdam(parameters), "NAdam has no fused kernel\n.*AdamW, Adam, SGD or Lion"),
    ):
        with pytest.raises(UsageError, match=named):
            rules.of(made)
    assert rules.of(torch.optim.Adam(parameters, lr=0.5)).values["lr"] == 0.5


def test_a_rule_of_a_formula_alone_steps_on_host_and_device_alike() -> None:
    class Signs(rules.Rule):
        name, title = "signs", "Signs"
        defaults = {"lr": 0.1}  # noqa: RUF012
        moments = {"last": "first"}  # noqa: RUF012

        def formula(
            self,
            w: torch.Tensor,
            g: torch.Tensor,
            moments: list[torch.Tensor],
            hyper: Mapping[str, Any],
            step: int,
        ) -> None:
            moments[0].copy_(g)
            w.sub_(g.sign() * hyper["lr"])

    rule = Signs(lr=0.5)
    w = torch.randn(100)
    upper, lower = _optimizers.split(w)
    here, there = (
        States(upper.clone(), lower.clone(), None, torch.zeros(100).bfloat16(), None)
        for _ in range(2)
    )
    gradient = torch.randn(100).bfloat16()
    rule.on_host(here, gradient, rule.values, 1, 1.0, _optimizers.Run(seed=3, stream=4))
    rule.on_device(there, gradient, rule.values, 1, 1.0, Noise(3, 4))
    assert torch.equal(here.full(), w - gradient.float().sign() * 0.5)
    assert all(torch.equal(a, there.tensors()[name]) for name, a in here.tensors().items())
    assert here.first is not None and torch.equal(here.first, gradient)


def test_what_is_not_elementwise_is_refused_with_the_reason() -> None:
    from evener.zero import rules

    with pytest.raises(UsageError, match="Adafactor has one number for each row and column"):
        rules.configured("Adafactor", {})
    parameter = torch.nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(UsageError, match="updated in slices") as found:
        rules.of(torch.optim.Adafactor([parameter]))
    assert "AdamW" in found.value.fix and "int8" in found.value.fix
