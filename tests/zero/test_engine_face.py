"""What a program does with the engine, its optimizer and its model beside the loop: groups,
schedules and optimizers of torch, methods beside forward, gradients of inputs, state_dicts; and
what is refused, and when."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from evener import zero
from evener.errors import UsageError

from .engines import configuration, start, weights
from .models import Model, batches, loss_of


def test_groups_schedules_and_optimizers_of_torch() -> None:
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model)

    def groups(module: nn.Module) -> list[dict[str, Any]]:
        flat = [p for p in module.parameters() if p.dim() < 2]
        deep = [p for p in module.parameters() if p.dim() >= 2]
        return [{"params": deep, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]

    def halve(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    theirs = torch.optim.AdamW(groups(reference), lr=1e-2)
    schedule = halve(theirs)
    engine, _, _, mine = zero.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups(model), lr=1e-2),
        lr_scheduler=halve,
        config=configuration(gradient_clipping=0.0),
        resident=set(),
    )
    for tokens in batches(5):
        engine.backward(loss_of(engine, tokens))
        engine.step()
        loss_of(reference, tokens).backward()
        theirs.step()
        theirs.zero_grad()
        schedule.step()
    assert mine.get_last_lr() == schedule.get_last_lr()
    got = weights(engine)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(got[name], parameter.detach(), rtol=1e-4, atol=1e-5)
    engine.close()


def test_what_cannot_be_is_refused_before_anything_is_moved() -> None:
    model = Model()
    with pytest.raises(zero.NoFitError, match=r"the budget is 0\.00 GB"):
        zero.initialize(
            model=model,
            config=configuration(evener={"budget": {"gpu": 1000}}),
            machine=zero.Machine(1e12, 1e10, 1e10, 1e9, 1e9),
        )
    with pytest.raises(UsageError, match=r"parameter embed\.weight is trained and in no"):
        zero.initialize(
            model=model, config=configuration(), model_parameters=list(model.parameters())[1:]
        )
    with pytest.raises(UsageError, match="Adagrad has no fused kernel"):
        zero.initialize(
            model=model,
            config=configuration(),
            optimizer=torch.optim.Adagrad(model.parameters()),
        )
    assert not model.embed.weight.isnan().any()


def test_a_gradient_of_the_inputs_leaves_the_weights_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    plain = copy.deepcopy(model)
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    engine = start(model, optimizer=sgd, gradient_clipping=0.0)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, 8)
        attacked = []
        for net in (engine, plain):
            given = x.clone().requires_grad_()
            (found,) = torch.autograd.grad(net(given).square().mean(), given)
            attacked.append((x + 0.1 * found.sign()).detach())
        assert torch.equal(*attacked)
        engine.backward(engine(attacked[0]).square().mean())
        engine.step()
        plain(attacked[1]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = weights(engine)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(values[name], parameter.detach(), rtol=0, atol=1e-7)
    given = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(UsageError, match="gradient of a gradient"):
        torch.autograd.grad(engine(given).sum(), given, create_graph=True)
    engine.close()


def test_the_given_optimizer_and_its_scheduler_go_on() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    plain = copy.deepcopy(model)
    pairs: list[Any] = []
    for net in (model, plain):
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, s / 3))
        for _ in range(2):
            net(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        pairs.append((optimizer, scheduler))
    engine, *_ = zero.initialize(
        model=model, optimizer=pairs[0][0], config={"evener": {"device": "cpu"}}, resident=set()
    )
    for net, (optimizer, scheduler) in zip((engine, plain), pairs, strict=True):
        for _ in range(4):
            net(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    values = weights(engine)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(values[name], parameter.detach(), rtol=0, atol=1e-6)
    with pytest.raises(UsageError, match="takes no more"):
        pairs[0][0].add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    engine.close()


@pytest.mark.parametrize(
    "model",
    [nn.Linear(4, 4).double(), nn.Linear(4, 4).to(torch.complex64),
     nn.Embedding(4, 4, sparse=True)],
)  # fmt: skip
def test_parameters_that_a_chunk_cannot_hold_are_refused(model: nn.Module) -> None:
    with pytest.raises(UsageError):
        start(model)


def test_an_optimizer_of_another_class_is_refused_by_more_than_its_name() -> None:
    class AdamW(torch.optim.AdamW):
        pass

    model = nn.Linear(4, 4)
    with pytest.raises(UsageError, match="no fused kernel"):
        zero.initialize(
            model=model,
            optimizer=AdamW(model.parameters()),
            config={"evener": {"device": "cpu"}},
            resident=set(),
        )


class Parts(nn.Module):
    """A model with more methods than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.first = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.second = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.first:
            x = torch.tanh(layer(x))
        return x * self.scale

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.second:
            x = torch.tanh(layer(x * self.scale))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


def _pair(lr: float = 0.1) -> tuple[zero.Engine, Parts, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Parts()
    plain = copy.deepcopy(model)
    engine = start(model, optimizer={"type": "SGD", "params": {"lr": lr}}, gradient_clipping=0.0)
    return engine, plain, torch.optim.SGD(plain.parameters(), lr)


def test_methods_beside_forward_use_the_weights_of_now() -> None:
    engine, plain, optimizer = _pair()
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(4, 8)
        for net in (engine.module, plain):
            middle = net.encode(x)
            loss = net.decode(middle).square().mean() + middle.square().mean()
            if net is plain:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                engine.backward(loss)
                engine.step()
        with torch.no_grad():
            torch.testing.assert_close(engine.module.encode(x), plain.encode(x))
    engine.close()


def test_state_dicts_are_real_and_copies_are_refused() -> None:
    engine, plain, optimizer = _pair()
    averaged = {name: p.detach().clone() for name, p in plain.named_parameters()}
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(4, 8)
        engine.backward(engine(x).square().mean())
        engine.step()
        plain(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state = engine.module.state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-8)
            averaged[name].lerp_(state[name], 0.1)
    for name, part in engine.module.named_modules():  # as peft asks for a part that it saves whole
        for own, value in part.state_dict().items():
            assert torch.equal(value, state[f"{name}.{own}".lstrip(".")])
    assert all(value.isfinite().all() for value in averaged.values())
    with pytest.raises(UsageError, match="is away"):
        torch.stack([p.detach().sum() for p in engine.module.parameters()])
    with pytest.raises(UsageError, match="a copy of a model"):
        torch.optim.swa_utils.AveragedModel(engine.module)
    with pytest.raises(UsageError, match="belongs to an engine"):
        start(engine.module)
    model = zero.give_back(engine)
    for name, value in plain.state_dict().items():
        found = dict(model.named_parameters())[name].detach()
        torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-8)
    again = start(copy.deepcopy(model))
    again.close()


def test_clipping_gradients_that_have_left_is_refused() -> None:
    engine, _, _ = _pair()
    engine(torch.randn(4, 8)).square().mean().backward()
    with pytest.raises(UsageError, match="gradient_clipping"):
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
    with pytest.raises(UsageError, match="cannot be set"):
        engine.module.scale.grad = None
    assert engine.norm() > 0
    engine.update()
    engine.module.zero_grad()
    engine.close()


def test_what_would_not_train_is_refused() -> None:
    engine, _, _ = _pair()
    engine.module.first[0].add_module("adapter", nn.Linear(8, 8))
    engine.backward(engine(torch.randn(4, 8)).square().mean())
    with pytest.raises(UsageError, match=r"first\.0\.adapter\.weight came, or was unfrozen"):
        engine.step()
    engine.close()
    model = Parts()
    model.first.requires_grad_(False)
    engine = start(model)
    model.first.requires_grad_(True)
    engine.backward(engine(torch.randn(4, 8)).square().mean())
    with pytest.raises(UsageError, match="was unfrozen"):
        engine.step()
    engine.close()
    engine = start(Parts(), fp16={"enabled": True})
    engine(torch.randn(4, 8)).float().square().mean().backward()
    with pytest.raises(UsageError, match="loss was not scaled"):
        engine.update()
    engine.close()
