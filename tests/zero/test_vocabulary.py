"""The last layer and its loss in parts of the vocabulary, against whole logits."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from evener import zero
from evener.errors import UsageError
from evener.zero import tiles
from evener.zero.vocabulary import Head, LazyLogits, linear_cross_entropy

from .engines import start, weights
from .models import Model, batches
from .test_memory import engine_of, train


def gradients(
    lazy: bool, dtype: torch.dtype, bias: bool, reduction: str
) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    linear = nn.Linear(24, 1000, bias=bias).to(dtype)
    hidden = torch.randn(60, 24).to(dtype).requires_grad_()
    targets = torch.randint(0, 1000, (60,))
    targets[5:9] = -100
    if lazy:
        logits = Head(linear).forward(hidden.view(2, 30, 24))
        assert isinstance(logits, LazyLogits) and logits.shape == (2, 30, 1000)
    else:
        logits = linear(hidden.view(2, 30, 24))
    loss = functional.cross_entropy(
        logits.float().view(-1, 1000), targets, ignore_index=-100, reduction=reduction
    )
    (loss * torch.arange(60) / 60).sum().backward() if reduction == "none" else loss.backward()
    assert linear.weight.grad is not None and hidden.grad is not None
    found = [loss.detach(), linear.weight.grad, hidden.grad]
    if bias:
        assert linear.bias.grad is not None
        found.append(linear.bias.grad)
    return tuple(found)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradients_are_those_of_whole_logits(
    dtype: torch.dtype, bias: bool, reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "PART", 60 * 256)  # four parts
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-3}
    for a, b in zip(
        gradients(True, dtype, bias, reduction), gradients(False, dtype, bias, reduction),
        strict=True,
    ):  # fmt: skip
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, **close)


def test_views_stay_lazy_and_all_else_is_whole() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 40)
    head = Head(linear)
    hidden = torch.randn(2, 5, 8, requires_grad=True)
    whole = functional.linear(hidden, linear.weight, linear.bias)
    lazy = head.forward(hidden)
    calls: list[Any] = [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.view(-1, 40),
        lambda x: x.reshape(10, -1),
        lambda x: x.flatten(0, 1),
        lambda x: x[:, :-1],
        lambda x: x[..., :-1, :],
        lambda x: x[..., 1:, :].contiguous().view(-1, x.size(-1)),
    ]
    for number, call in enumerate(calls):
        found = call(head.forward(hidden))
        assert isinstance(found, LazyLogits), number
        assert found.shape == call(whole).shape, number
        torch.testing.assert_close(found.whole(), call(whole))
    others: list[Any] = [
        lambda x: x[..., :3],
        lambda x: x.softmax(-1),
        lambda x: x + 1,
        lambda x: x * torch.tensor(2.0),
        lambda x: x.argmax(1),
        lambda x: x.logsumexp(1),
        lambda x: x.gather(1, torch.zeros(2, 1, 40, dtype=torch.int64)),
        lambda x: x.transpose(0, 1),
        lambda x: x.mT,
        lambda x: x.detach(),
        lambda x: x.view(2, -1),
        lambda x: torch.cat([x, x]),
        lambda x: functional.cross_entropy(x.view(-1, 40), torch.zeros(10, dtype=torch.int64),
                                           weight=torch.ones(40)),
    ]  # fmt: skip
    for number, call in enumerate(others):
        found = call(lazy)
        assert not isinstance(found, LazyLogits), number
        torch.testing.assert_close(found, call(whole), msg=str(number))
    assert lazy.whole() is lazy.whole()  # for good
    # Asked for, they are in the graph.
    lazy.softmax(-1)[..., 0].sum().backward()
    mine = hidden.grad
    hidden.grad = None
    whole.softmax(-1)[..., 0].sum().backward()
    torch.testing.assert_close(mine, hidden.grad)
    head.close()
    assert not isinstance(linear(hidden), LazyLogits)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_under_the_engine(tied: bool, inside: bool) -> None:
    """The head's weights come when the loss needs them, forward and backward, and at no other
    time; the loss may be the model's own or the caller's."""

    class Own(Model):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits = super().forward(tokens)
            if not inside:
                return logits
            return functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())

    def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = model(tokens)
        return out if inside else zero.cross_entropy(out, tokens)

    def run(loss: str, resident: set[str]) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        # Adam would make a step of a gradient's last bit where it is near 0.
        sgd = {"type": "SGD", "params": {"lr": 0.1}}
        engine = start(Own(tied=tied), resident, optimizer=sgd, evener={"loss": loss})
        losses = []
        for tokens in batches(4):
            found = loss_of(engine, tokens)
            engine.backward(found)
            engine.step()
            losses.append(found.item())
        states = {name: value.clone() for name, value in weights(engine).items()}
        engine.close()
        return losses, states

    (want, states), (got, others) = run("plain", set()), run("fused", set())
    assert got == pytest.approx(want, rel=1e-4, abs=1e-6)
    for name, value in states.items():
        torch.testing.assert_close(others[name], value, rtol=1e-3, atol=1e-5)
    again, same = run("fused", {"head/0", "(kept)/0", "layers.1/0"})
    assert again == got and all(torch.equal(same[name], others[name]) for name in same)


def test_logits_that_are_asked_for_later_are_right() -> None:
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    engine = start(model, evener={"loss": "fused"})
    tokens = batches(1)[0]
    logits = engine(tokens)
    assert isinstance(logits, LazyLogits)
    torch.testing.assert_close(logits.sigmoid(), plain(tokens).sigmoid())
    loss = functional.mse_loss(logits, torch.zeros(()).expand(logits.shape))
    engine.backward(loss)
    engine.step()
    assert engine.global_steps == 1 and engine.get_global_grad_norm()
    engine.close()


class Timed(nn.Module):
    """Blocks that are given what a layer outside of them made, as a UNet's are: its last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mixing() for _ in range(3))
        self.time = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = self.time(x)
        for layer in self.layers:
            x = layer(x, time)
        return x


class Mixing(nn.Module):
    """One of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return x + self.up(functional.silu(time)).tanh()


def test_blocks_that_are_given_lazy_logits_can_be_recomputed() -> None:
    """They were made whole in the first block's forward pass, and were whole when it was computed
    again: then it saves other tensors."""
    losses = []
    for checkpointing in (False, True):
        torch.manual_seed(3)
        engine = start(Timed(), evener={"loss": "fused", "checkpointing": checkpointing})
        for _ in range(3):
            loss = engine(torch.ones(4, 8)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.close()
    assert losses[:3] == losses[3:] and losses[0] > losses[2]


def test_memory_without_logits() -> None:
    class Large(Model):
        def __init__(self) -> None:
            super().__init__(width=32, blocks=2)
            self.embed = nn.Embedding(5000, 32)
            self.head = nn.Linear(32, 5000, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits = super().forward(tokens)
            return functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())

    def peak(loss: str, part: int) -> int:
        tiles.PART, before = part, tiles.PART
        try:
            torch.manual_seed(0)
            with engine_of(
                Large(), example=batches(1, rows=32)[0], evener={"loss": loss}
            ) as engine:
                train(engine, 1, rows=32)
                found = engine.memory()
        finally:
            tiles.PART = before
        assert 0.97 < found["gpu planned"] / found["gpu peak"] < 1.03, found
        return found["gpu peak"]

    logits = 32 * 16 * 5000 * 4
    assert peak("plain", 1 << 25) - peak("fused", 32 * 16 * 256) > 2 * logits


def test_an_unused_part_of_the_head_costs_no_gradient() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 40)
    linear.weight.requires_grad = False
    lazy = Head(linear).forward(torch.randn(6, 8, requires_grad=True))
    assert isinstance(lazy, LazyLogits)
    linear_cross_entropy(lazy, torch.zeros(6, dtype=torch.int64)).backward()
    assert linear.weight.grad is None and linear.bias.grad is not None


class Own(torch.autograd.Function):
    """A cross-entropy with a backward pass of its own, as fused kernels have."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        found = logits.float().log_softmax(-1)
        ctx.save_for_backward(found.exp(), targets)
        return -found.gather(1, targets[:, None]).mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        found, targets = ctx.saved_tensors
        found[torch.arange(len(targets)), targets] -= 1
        return gradient * found / len(targets), None


def _masked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x[..., :3] = -1e4
    return functional.cross_entropy(x.view(-1, 40), y)


def _cooled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.div_(2.0)
    return functional.cross_entropy(x.view(-1, 40), y)


def _through_a_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows = x.view(-1, 40)
    rows[0] *= 3.0
    return functional.cross_entropy(x.float().view(-1, 40), y)


def _before_a_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows = x.view(-1, 40)
    x.mul_(torch.linspace(0.5, 1.5, 40))
    return functional.cross_entropy(rows, y)


def _cast_before(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    x.mul_(2.0)
    return functional.cross_entropy(wide.view(-1, 40), y) + x.float().logsumexp(-1).mean()


def _hooked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.register_hook(lambda gradient: 2 * gradient)
    return functional.cross_entropy(x.view(-1, 40), y)


def _by_data(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.data.mul_(0.5)
    return functional.cross_entropy(x.view(-1, 40), y)


@pytest.mark.parametrize(
    "loss",
    [_masked, _cooled, _through_a_view, _before_a_view, _cast_before, _hooked, _by_data,
     lambda x, y: Own.apply(x.view(-1, 40), y),
     lambda x, y: Own.apply(x[:, :-1].contiguous().view(-1, 40), y[:8]),
     lambda x, y: functional.cross_entropy(x.view(-1, 40), y) + 0.1 * Own.apply(x.view(-1, 40), y),
     lambda x, y: torch.utils.checkpoint.checkpoint(
         lambda x: functional.cross_entropy(x.view(-1, 40), y), x, use_reentrant=True)],
)  # fmt: skip
def test_what_is_done_to_lazy_logits_is_done_to_logits(loss: Any) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(8, 40)
    hidden = torch.randn(2, 5, 8, requires_grad=True)
    targets = torch.randint(0, 40, (10,))
    given = [hidden, linear.weight, linear.bias]
    plain = loss(linear(hidden), targets)
    expected = torch.autograd.grad(plain, given) if plain.grad_fn.name() != (
        "CheckpointFunctionBackward") else None  # fmt: skip
    if expected is None:
        plain.backward()
        expected = [x.grad.clone() for x in given]
        for x in given:
            x.grad = None
    head = Head(linear)
    lazy = head.forward(hidden)
    assert lazy.requires_grad
    found = loss(lazy, targets)
    torch.testing.assert_close(found, plain)
    found.backward()
    for x, gradient in zip(given, expected, strict=True):
        torch.testing.assert_close(x.grad, gradient)
    head.close()


@pytest.mark.parametrize("label", [-1, 40, -7])
def test_labels_outside_of_the_vocabulary_raise(label: int) -> None:
    head = Head(nn.Linear(8, 40))
    hidden = torch.randn(3, 8, requires_grad=True)
    targets = torch.tensor([1, label, -100])
    for call in (functional.cross_entropy, zero.cross_entropy):
        with pytest.raises(IndexError, match="out of bounds"):
            call(head.forward(hidden), targets)
    with pytest.raises(IndexError, match="out of bounds"):
        zero.cross_entropy(torch.randn(3, 40), targets)


def test_a_function_of_ones_own_after_a_write_is_refused() -> None:
    head = Head(nn.Linear(8, 40))
    logits = head.forward(torch.randn(3, 8, requires_grad=True))
    logits.mul_(2.0)
    with pytest.raises(UsageError, match="write to a copy"):
        Own.apply(logits, torch.zeros(3, dtype=torch.int64)).backward()


def _capped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Gemma 2's logits."""
    x = torch.tanh(x / 3.0) * 3.0
    return functional.cross_entropy(x[:, :-1].float().reshape(-1, 40), y[:8])


def _smoothed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(0.5 * x.view(-1, 40), y, label_smoothing=0.1, ignore_index=3)


def _label_smoother(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As transformers' Trainer has it."""
    logs = -functional.log_softmax(x, dim=-1)
    at = y.view(2, 5, 1)
    first = logs.gather(dim=-1, index=at).masked_fill_(at == 3, 0.0)
    even = logs.sum(dim=-1, keepdim=True, dtype=torch.float32).masked_fill_(at == 3, 0.0)
    return 0.9 * first.sum() / 10 + 0.1 * even.sum() / 400


def _of_zloss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (
        functional.nll_loss(wide.view(-1, 40).log_softmax(-1), y)
        + 1e-2 * torch.logsumexp(wide, dim=-1, keepdim=True).square().mean()
    )


def _preferred(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The better of two answers, as DPO has it, and what its metrics read."""
    x = x / 0.7
    at = y.view(2, 5)
    norms = torch.stack([torch.logsumexp(row, dim=-1) for row in x])
    logs = torch.gather(x, dim=-1, index=at.unsqueeze(-1)).squeeze(-1) - norms
    with torch.no_grad():
        entropy = 0.0
        for part in x.reshape(-1, 40).split(3, dim=0):
            own = functional.log_softmax(part, dim=-1)
            entropy += -(torch.exp(own) * own).sum(-1).sum()
        right = (x.argmax(dim=-1) == at).float().mean()
        assert x.max() > 0
    better, worse = logs.sum(-1)
    return -functional.logsigmoid(better - worse) + 0.0 * entropy + 0.0 * right


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", [20, 1 << 25])
@pytest.mark.parametrize(
    "loss", [_capped, _smoothed, _label_smoother, _of_zloss, _preferred], ids=lambda f: f.__name__
)
def test_losses_of_others_need_no_whole_logits(
    loss: Any, part: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiles, "PART", part)
    monkeypatch.setattr(tiles, "LEAST", 7)
    torch.manual_seed(0)
    linear = nn.Linear(8, 40).to(dtype)
    hidden = torch.randn(2, 5, 8).mul(3).to(dtype).requires_grad_()
    targets = torch.randint(0, 40, (10,))
    given = [hidden, linear.weight, linear.bias]
    # Torch rounds log-probabilities of bfloat16 logits to bfloat16: the reference does not.
    wide = [x.detach().float().requires_grad_() for x in given]
    plain = loss(functional.linear(wide[0], wide[1], wide[2]), targets)
    expected = torch.autograd.grad(plain, wide)
    lazy = Head(linear).forward(hidden)
    found = loss(lazy, targets)
    assert lazy.parts
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 2e-2}
    torch.testing.assert_close(found.float(), plain, **close)
    for mine, theirs in zip(torch.autograd.grad(found, given), expected, strict=True):
        torch.testing.assert_close(mine.float(), theirs, **close)


_STEPS: list[Any] = [
    lambda x: x * 1.5,
    lambda x: 0.5 * x,
    lambda x: x / 3,
    lambda x: -x,
    torch.tanh,
    lambda x: x.float(),
    lambda x: x.to(torch.float64),
    lambda x: x.contiguous(),
    lambda x: x[1:],
    lambda x: x[:, 1:],
    lambda x: x.unbind(0)[-1][None],
    lambda x: x.split(2)[0],
    lambda x: x.log_softmax(-1),
    lambda x: x.flatten(0, 1)[None],
    lambda x: x.log_softmax(-1).neg(),
    lambda x: x.exp().clamp(max=9),
    lambda x: x.mul_(0.75),
]
_ENDS: list[Any] = [
    lambda x: x.logsumexp(-1).sum(),
    lambda x: x.sum(-1).square().mean(),
    lambda x: x.gather(-1, x.argmax(-1, keepdim=True)).sum(),
    lambda x: x.gather(-1, torch.tensor([3, 3, 0]).expand(*x.shape[:-1], 3)).tanh().sum(),
    lambda x: functional.cross_entropy(
        x.reshape(-1, 12), torch.arange(x[..., 0].numel()) % 12, label_smoothing=0.2
    ),
    lambda x: functional.nll_loss(
        functional.log_softmax(x, -1).view(-1, 12), torch.arange(x[..., 0].numel()) % 12
    ),
    lambda x: x.softmax(-1).square().sum(),
]


def _program(seed: int, lazily: bool) -> tuple[list[torch.Tensor] | None, bool]:
    """Its loss and gradients, or None where torch refuses; and whether logits stayed lazy."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    linear = nn.Linear(4, 12, dtype=torch.float64)
    hidden = torch.randn(3, 4, 4, dtype=torch.float64, requires_grad=True)
    logits = Head(linear).forward(hidden) if lazily else linear(hidden)
    known, total = [logits], torch.zeros((), dtype=torch.float64)
    try:
        for _ in range(draw.randint(2, 7)):
            before = known[-1] if draw.random() < 0.7 else draw.choice(known)
            known.append(draw.choice(_STEPS)(before))
        for _ in range(draw.randint(1, 3)):
            last = draw.choice(known[-3:])
            total = total + draw.choice(_ENDS)(last)
        found = torch.autograd.grad(total, [hidden, linear.weight, linear.bias])
    except RuntimeError:  # what `unbind` and `split` gave is written to
        return None, False
    return [total.detach(), *found], lazily and logits.parts


def test_random_programs_give_what_whole_logits_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views, copies, writes and ends in any order, from seeds; several of them stay in use."""
    monkeypatch.setattr(tiles, "PART", 1)
    monkeypatch.setattr(tiles, "LEAST", 5)
    lazy = finite = 0
    for seed in range(300):
        expected, _ = _program(seed, False)
        found, stayed = _program(seed, True)
        if expected is None:
            continue
        assert found is not None, seed
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(
                mine, theirs, rtol=1e-5, atol=1e-5, equal_nan=True, msg=f"seed {seed}"
            )
        lazy += stayed
        finite += bool(expected[0].isfinite())
    assert lazy > 10 and finite > 250, (lazy, finite)
