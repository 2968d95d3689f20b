"""The step waits for optimizer.step(): accumulation, clipping, scaling and skipping are right."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from evener.embedding import (
    Adagrad,
    Adam,
    AdamW,
    Lamb,
    LazyAdam,
    Options,
    PartialRowWiseAdam,
    RowWiseAdagrad,
    Sgd,
    Zeros,
)
from evener.embedding.torch import (
    DynamicEmbedding,
    DynamicEmbeddingBag,
    DynamicOptimizer,
    clip_grad_norm_,
)
from evener.embedding.torch.lookups import _BACKWARD
from evener.errors import UsageError
from tests.embedding import formulas

DIM = 4
KEYS = torch.arange(40)


class Click(nn.Module):
    """A bag, and a dense layer on it."""

    def __init__(self, **how: object) -> None:
        super().__init__()
        torch.manual_seed(1)
        options = Options(DIM, optimizer=Adagrad(lr=0.1))
        self.bag = DynamicEmbeddingBag(options, mode="sum", **how)
        self.top = nn.Linear(DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.top(self.bag(ids)).square().mean()


def rows(model: Click) -> torch.Tensor:
    return torch.cat((model.bag.store.lookup_infer(KEYS), model.top.weight.detach()))


def batches(n: int, size: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 40, (size, 3), generator=generator) for _ in range(n)]


def made(model: Click) -> DynamicOptimizer:
    return DynamicOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_micro_batches_add_up_to_the_batch() -> None:
    whole, parts = Click(), Click()
    for model, cuts in ((whole, 1), (parts, 3)):
        optimizer = made(model)
        for ids in batches(4):
            for part in ids.chunk(cuts):
                (model(part) / cuts).backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(rows(whole), rows(parts))
    assert whole.bag.store.stats()["steps"] == parts.bag.store.stats()["steps"] == 4


def test_one_batch_looked_up_twice_is_one_step() -> None:
    once, twice = Click(), Click()
    for model in (once, twice):
        optimizer = made(model)
        for ids in batches(3):
            loss = 2 * model(ids) if model is once else model(ids) + model(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(rows(once), rows(twice))


def test_fused_steps_with_backward() -> None:
    fused, waits = Click(fused=True), Click()
    optimizers = (torch.optim.SGD(fused.parameters(), lr=0.1), made(waits))
    for ids in batches(3):
        for model, optimizer in zip((fused, waits), optimizers, strict=True):
            (model(ids) + model(ids)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(rows(fused), rows(waits))
    with pytest.raises(UsageError, match="not fused"):
        DynamicOptimizer(fused)


def test_a_forgotten_optimizer_is_named() -> None:
    model = Click()
    (ids,) = batches(1)
    model(ids).backward()
    with pytest.raises(UsageError, match="no optimizer takes them") as raised:
        model(ids)
    assert "DynamicOptimizer(model)" in raised.value.fix
    optimizer = DynamicOptimizer(model)
    model(ids).backward()
    optimizer.step()
    with pytest.raises(UsageError, match="has a DynamicOptimizer already"):
        DynamicOptimizer(model)


@pytest.mark.parametrize("ours", [True, False])
def test_clipping_is_over_embeddings_and_dense_parameters(ours: bool) -> None:
    model = Click()
    plain = nn.EmbeddingBag(40, DIM, mode="sum")
    plain.weight.data = model.bag.store.lookup_infer(KEYS)
    top = nn.Linear(DIM, 1)
    top.load_state_dict(model.top.state_dict())
    optimizer = made(model)
    (ids,) = batches(1)
    model(ids).backward()
    top(plain(ids)).square().mean().backward()
    dense = [*plain.parameters(), *top.parameters()]
    wanted = nn.utils.clip_grad_norm_(dense, 0.01)
    if ours:
        norm = clip_grad_norm_(model, 0.01)
    else:
        norm = nn.utils.clip_grad_norm_([*model.parameters(), *optimizer.waiting()], 0.01)
    torch.testing.assert_close(norm, wanted)
    (waiting,) = optimizer.waiting()
    assert waiting.grad is not None and plain.weight.grad is not None
    torch.testing.assert_close(waiting.grad, plain.weight.grad[torch.unique(ids)])


def test_a_scaler_unscales_and_skips() -> None:
    """A step that overflows leaves nothing: not the rows, not the slots, not the count."""
    scaled, plain = Click(), Click()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    first, second = made(scaled), made(plain)
    for number, ids in enumerate(batches(4)):
        loss = scaled(ids)
        if number == 1:
            before = rows(scaled)
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(first)
        scaler.update()
        first.zero_grad()
        if number == 1:
            assert torch.equal(rows(scaled), before)
            continue
        plain(ids).backward()
        second.step()
        second.zero_grad()
    torch.testing.assert_close(rows(scaled), rows(plain))
    assert scaled.bag.store.stats()["steps"] == plain.bag.store.stats()["steps"] == 3
    assert scaler.get_scale() == 128.0


def test_a_gradient_that_is_not_finite_is_refused_before_anything_changes() -> None:
    model = Click()
    optimizer = made(model)
    first, second = batches(2)
    model(first).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = rows(model)
    (model(second) * float("nan")).backward()
    with pytest.raises(UsageError, match="is not finite: nothing was changed"):
        optimizer.step()
    assert torch.equal(rows(model), before)
    optimizer.zero_grad()
    model(second).backward()
    optimizer.step()
    assert not torch.equal(rows(model), before)


def test_a_scheduler_changes_the_rate_and_state_comes_back() -> None:
    model = Click()
    optimizer = made(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for ids in batches(2):
        model(ids).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert [group["lr"] for group in optimizer.param_groups] == [0.025, 0.025]
    other = Click()
    again = made(other)
    with pytest.raises(UsageError, match="the state is of embeddings"):
        again.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[-1]["lr"] = 1.0
    optimizer.load_state_dict({**optimizer.state_dict(), "dense": None})
    assert optimizer.param_groups[-1]["lr"] == 1.0


def test_a_rate_of_zero_changes_no_values() -> None:
    model = Click()
    optimizer = DynamicOptimizer(model, lr=0.0)
    before = rows(model)
    for ids in batches(2):
        model(ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(rows(model), before)


def test_torch_sees_no_parameter_to_step_or_reduce() -> None:
    model = Click()
    assert {name for name, _ in model.named_parameters()} == {"top.weight", "top.bias"}
    assert not list(model.named_buffers())


def test_compiled_models_break_at_the_lookup_and_are_right() -> None:
    model, plain = Click(), Click()
    compiled = torch.compile(model, backend="eager")
    for ids in batches(2):
        torch.testing.assert_close(compiled(ids), plain(ids))


def test_sgd_with_one_row_is_what_one_computes_by_hand() -> None:
    bag = DynamicEmbeddingBag(Options(2, optimizer=Sgd(lr=0.5)), mode="sum")
    optimizer = DynamicOptimizer(bag)
    start = bag(torch.tensor([[9]])).detach()
    bag(torch.tensor([[9, 9], [9, 9]])).sum().backward()  # four times
    optimizer.step()
    torch.testing.assert_close(bag(torch.tensor([[9]])).detach(), start - 0.5 * 4)


class Fails(torch.autograd.Function):
    """A layer whose backward pass fails."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, _gradient: torch.Tensor) -> Any:
        raise RuntimeError("out of memory")


@pytest.mark.parametrize("fail", ["a layer", "not finite", "not finite in one of two"])
def test_a_fused_pass_that_fails_leaves_nothing(fail: str) -> None:
    first, second = (
        DynamicEmbedding(Options(3, optimizer=Sgd(lr=1.0), init=Zeros()), f"{fail} {n}", fused=True)
        for n in range(2)
    )
    keys = torch.arange(4)

    def step(factor: float, other: float) -> None:
        (first(keys).sum() * factor + second(keys).sum() * other).backward()

    step(1.0, 1.0)
    for _ in range(2):
        with pytest.raises((RuntimeError, UsageError)):
            if fail == "a layer":
                # Made before the lookup, so its backward pass comes after the lookup's.
                late = Fails.apply(torch.ones(3, requires_grad=True))
                (first(keys) + second(keys) + late).sum().backward()
            else:
                step(float("nan") if fail == "not finite" else 1.0, float("inf"))
    step(2.0, 3.0)
    assert torch.equal(first.store.lookup_infer(keys), torch.full((4, 3), -3.0))
    assert torch.equal(second.store.lookup_infer(keys), torch.full((4, 3), -4.0))
    assert first.table.step == second.table.step == 2
    gc.collect()
    assert not _BACKWARD._passes


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [Sgd, Adagrad, Adam])
def test_modules_of_one_name_are_one_weight(kind: Any, fused: bool) -> None:
    options = Options(3, optimizer=kind(lr=0.1), init=Zeros())
    name = f"one weight {kind.kind} {fused}"
    model = nn.ModuleList([DynamicEmbedding(options, name, fused=fused) for _ in range(2)])
    optimizer = None if fused else DynamicOptimizer(model)
    dense = nn.Embedding(6, 3)
    nn.init.zeros_(dense.weight)
    other = {Sgd: torch.optim.SGD, Adagrad: torch.optim.Adagrad, Adam: torch.optim.Adam}[kind](
        dense.parameters(), lr=0.1
    )
    keys = torch.arange(6)
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        a, b = torch.randn(6, 3, generator=draw), torch.randn(6, 3, generator=draw)
        ((model[0](keys) * a).sum() + (model[1](keys) * b).sum()).backward()
        other.zero_grad()
        ((dense(keys) * a).sum() + (dense(keys) * b).sum()).backward()
        other.step()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model[0].store.lookup_infer(keys), dense.weight.detach())
    with pytest.raises(UsageError, match="other fused="):
        DynamicEmbedding(options, name, fused=not fused)


RULES = {
    "SGD": (Sgd(lr=0.1, weight_decay=0.3), lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.3)),
    "Adagrad": (
        Adagrad(lr=0.1, eps=1e-5, weight_decay=0.3),
        lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-5, weight_decay=0.3),
    ),
    "Adam": (
        Adam(lr=0.1, eps=1e-5, weight_decay=0.3),
        lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-5, weight_decay=0.3),
    ),
    "AdamW": (
        AdamW(lr=0.1, eps=1e-5, weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, lr=0.1, eps=1e-5, weight_decay=0.3),
    ),
    "RowWiseAdagrad": (
        RowWiseAdagrad(lr=0.1, eps=1e-5, weight_decay=0.3),
        lambda p: formulas.RowWiseAdagrad(p, 0.1, eps=1e-5, weight_decay=0.3, decoupled=False),
    ),
    "RowWiseAdagrad, decoupled": (
        RowWiseAdagrad(lr=0.1, eps=1e-5, weight_decay=0.3, decoupled=True),
        lambda p: formulas.RowWiseAdagrad(p, 0.1, eps=1e-5, weight_decay=0.3, decoupled=True),
    ),
    "PartialRowWiseAdam": (
        PartialRowWiseAdam(lr=0.1, eps=1e-5, weight_decay=0.3),
        lambda p: formulas.PartialRowWiseAdam(p, 0.1, eps=1e-5, weight_decay=0.3),
    ),
    "LAMB": (
        Lamb(lr=0.1, eps=1e-5, weight_decay=0.3),
        lambda p: formulas.Lamb(p, 0.1, eps=1e-5, weight_decay=0.3),
    ),
    "SparseAdam": (LazyAdam(lr=0.1, eps=1e-5), lambda p: torch.optim.SparseAdam(p, 0.1, eps=1e-5)),
}


@pytest.mark.parametrize("cache_rows", [0, 20])
@pytest.mark.parametrize("name", RULES)
def test_epsilon_and_decay_are_those_of_the_formula(name: str, cache_rows: int) -> None:
    """Gradients are as small as epsilon, so that its place shows."""
    made, plain = RULES[name]
    module = DynamicEmbedding(Options(20, optimizer=made), cache_rows=cache_rows)
    optimizer = DynamicOptimizer(module)
    keys = torch.arange(12)
    dense = nn.Embedding(12, 20, sparse=name == "SparseAdam")
    with torch.no_grad():
        dense.weight.copy_(module(keys))
    other = plain(list(dense.parameters()))
    for seed in range(6):
        gradient = torch.randn(12, 20, generator=torch.Generator().manual_seed(seed)) * 1e-5
        for model, step in ((module, optimizer), (dense, other)):
            step.zero_grad()
            (model(keys) * gradient).sum().backward()
            step.step()
    found = module.store.lookup_infer(keys)
    torch.testing.assert_close(found, dense.weight.detach(), rtol=1e-5, atol=1e-6)
