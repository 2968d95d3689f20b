"""The step waits for optimizer.step(): accumulation, clipping, scaling and skipping are right."""

import pytest
import torch
from torch import nn

from evener.embedding import Adagrad, Options, Sgd
from evener.embedding.torch import DynamicEmbeddingBag, DynamicOptimizer, clip_grad_norm_
from evener.errors import UsageError

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
    """Of a step that overflows nothing is left: not the rows, not the slots, not the count."""
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
