"""Experts over ranks: real processes, real Gloo; 2 x 2 of them are two nodes of two."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from evener import moe
from evener.comm import total_norm
from evener.errors import UsageError
from tests import worlds

WIDTH, EXPERTS = 16, 8


def layer(shared: int = 0, dtype: torch.dtype = torch.float64) -> moe.MoE:
    torch.manual_seed(5)
    made = moe.MoE(WIDTH, 24, EXPERTS, 3, shared=shared)
    return made.to(dtype)


def inputs(rank: int, tokens: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    x, seed = torch.randn(2, tokens + 7 * rank, WIDTH, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), seed


def wanted(rank: int, size: int, shared: int = 0) -> Any:
    """The plain layer's output and gradients; those of experts over all ranks' tokens."""
    plain, out, to_x = layer(shared), None, None
    for other in range(size):
        x, seed = inputs(other)
        given = plain(x)
        (given * seed).sum().backward()
        if other == rank:
            out, to_x = given.detach(), x.grad
    return out, to_x, {n: p.grad for n, p in plain.experts.named_parameters()}


def own_gradients(rank: int) -> dict[str, torch.Tensor]:
    """Gradients of what is not spread: from this rank's tokens alone."""
    plain = layer(16)
    x, seed = inputs(rank)
    (plain(x) * seed).sum().backward()
    return {n: p.grad for n, p in plain.named_parameters() if "experts." not in n[:8]}


def same(rank: int, size: int, routes: list[str], chunks: list[int]) -> None:
    out, to_x, of_experts = wanted(rank, size, 16)
    for route in routes:
        for count in chunks:
            ours = moe.spread(layer(16), size, route=route, chunks=count, mean=False)
            x, seed = inputs(rank)
            given = ours(x)
            torch.testing.assert_close(given, out)
            (given * seed).sum().backward()
            torch.testing.assert_close(x.grad, to_x)
            mine = ours.experts.parallel.mine
            for name, parameter in ours.experts.named_parameters():
                torch.testing.assert_close(parameter.grad, of_experts[name][mine], msg=name)
            named = dict(ours.named_parameters())
            for name, gradient in own_gradients(rank).items():
                torch.testing.assert_close(named[name].grad, gradient, msg=name)
            # A second step, and a rank without tokens.
            x = x.detach()[: 0 if rank == 1 else None].requires_grad_()
            given = ours(x)
            torch.testing.assert_close(given, out[: len(x)])
            given.sum().backward()
            assert int(ours.experts.load.sum()) == 3 * (30 + 7 * rank + len(x))


@pytest.mark.parametrize(
    ("shape", "routes"),
    [([2, 2], ["two", "flat", "pairs", "auto"]), ([2], ["auto"]), ([1, 1], ["flat", "pairs"])],
)
def test_outputs_and_gradients_are_the_plain_layers(shape: list[int], routes: list[str]) -> None:
    worlds.run(shape, same, routes, [1, 3])


def recomputed(rank: int, size: int) -> None:
    out, to_x, of_experts = wanted(rank, size, 16)
    ours = moe.spread(layer(16), size, mean=False)
    x, seed = inputs(rank)
    given = checkpoint(ours, x, use_reentrant=False)
    torch.testing.assert_close(given, out)
    (given * seed).sum().backward()
    torch.testing.assert_close(x.grad, to_x)
    mine = ours.experts.parallel.mine
    for name, parameter in ours.experts.named_parameters():
        torch.testing.assert_close(parameter.grad, of_experts[name][mine], msg=name)


def test_activation_checkpointing_gives_the_same() -> None:
    worlds.run([1, 1], recomputed)


def tried(rank: int, size: int) -> int:
    out, *_ = wanted(rank, size)
    ours = moe.spread(layer(), size, chunks="auto")
    x, _ = inputs(rank)
    shared, seen = ours.experts.parallel.shared, []
    while shared.trial is not None and len(seen) < 20:
        given = ours(x)
        torch.testing.assert_close(given, out)
        given.sum().backward()
        seen.append(shared.chunks)
    assert seen[:6] == [1, 1, 2, 4, 1, 2] and len(seen) == 7, seen
    return shared.chunks


def test_the_number_of_chunks_is_tried_and_agreed() -> None:
    one, other = worlds.run([1, 1], tried)
    assert one == other and one in (1, 2, 4)


def whole(rank: int, size: int) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer(16, torch.float32)).double()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    moe.spread(model, size)
    assert model[1].experts.gate_up_proj.shape[0] == EXPERTS // size
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, _ = inputs(rank)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (model(x).square().sum() * 0.01).backward()
        for parameter in model[0].parameters():  # as DDP would
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= size
        moe.average_gradients(model)
        optimizer.step()

    step(model, optimizer, x)
    saved = {k: v.clone() for k, v in model.state_dict().items()}
    states = moe.optimizer_state(model, optimizer)
    # Into a model that is spread over half as many ranks, and a plain one.
    torch.manual_seed(rank)
    other = nn.Sequential(nn.Linear(WIDTH, WIDTH), moe.MoE(WIDTH, 24, EXPERTS, 3, shared=16))
    moe.spread(other.double(), size // 2)
    other.load_state_dict(saved)
    again = torch.optim.AdamW(other.parameters(), lr=0.5)
    moe.load_optimizer_state(other, again, states)
    step(model, optimizer, x)
    step(other, again, x)
    # The gates saw other gradients: they are not averaged here, but are their own rank's in both.
    one, two = model.state_dict(), other.state_dict()
    for name in one:
        torch.testing.assert_close(one[name], two[name], msg=name)
    # torch's own takes the same norm: by this rank's part of it ranks would run apart.
    of_all = moe.clip_gradients(model, 1e9)
    torch.testing.assert_close(nn.utils.clip_grad_norm_(model.parameters(), 1e9), of_all)
    norm = moe.clip_gradients(model, 1e-3)
    squares = model[1].experts.gate_up_proj.grad.square().sum()
    assert norm > squares.sqrt() and norm > 1e-3


def test_checkpoints_have_the_original_names_for_any_number_of_ranks() -> None:
    worlds.run([2, 2], whole)


def refused(rank: int, size: int) -> None:
    for options, said in (
        ({"ep": 3}, "ep=3 does not divide the 2 ranks"),
        ({"ep": 2, "route": "two"}, "needs two nodes or more"),
        ({"ep": 2, "route": "north"}, "'north'"),
        ({"ep": 2, "chunks": 0}, "chunks=0"),
        ({"ep": 2, "dispatch": "int2"}, "'int2'"),
    ):
        with pytest.raises(UsageError) as caught:
            moe.spread(layer(), **options)  # type: ignore[arg-type]
        assert said in caught.value.problem
    with pytest.raises(UsageError):
        moe.spread(nn.Linear(2, 2), 2)
    odd = moe.MoE(8, 8, 5, 2)
    with pytest.raises(UsageError) as caught:
        moe.spread(odd, 2)
    assert "5 experts of experts" in caught.value.problem
    spread = moe.spread(layer(), 2)
    with pytest.raises(UsageError):
        moe.spread(spread, 2)
    # What is not finite is named on every rank, and the job goes on.
    x, _ = inputs(rank)
    bad = x.detach().clone()
    if rank == 1:
        bad[3, 2] = torch.nan
    with pytest.raises(moe.MoEError) as failed:
        spread(bad)
    assert failed.value.rank == 1 and "not finite" in failed.value.problem
    assert spread(x.detach()).isfinite().all()


def test_bad_arguments_and_bad_values_are_named() -> None:
    worlds.run([2], refused)


def test_without_a_process_group() -> None:
    with pytest.raises(UsageError) as caught:
        moe.spread(layer(), 2)
    assert "init_process_group" in caught.value.fix


def narrow(rank: int, size: int, form: str) -> None:
    out, *_ = wanted(rank, size)
    ours = moe.spread(layer(), size, dispatch=form)  # type: ignore[arg-type]
    x, seed = inputs(rank)
    given = ours(x)
    error = float((given - out).norm() / out.norm())
    assert 1e-4 < error < (0.03 if form == "int8" else 0.08), error
    (given * seed).sum().backward()
    # The guard: what would lose too much goes as it is, on all ranks.
    wire = ours.experts.parallel.shared.wire
    assert wire.fell_back == 0
    if rank == 1:
        wire.limit = 1e-6
    torch.testing.assert_close(ours(x), out)
    assert wire.fell_back == 1


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_eight_bits_are_near(form: str) -> None:
    worlds.run([1, 1], narrow, form)


def test_a_torch_that_takes_the_norm_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(total_norm._asked)
    monkeypatch.delattr(nn.utils.clip_grad, "_get_total_norm")
    with pytest.raises(UsageError, match="keeps what clip_grad_norm_ takes the norm by"):
        total_norm.ask(lambda *_: None)
    assert total_norm._asked == before
