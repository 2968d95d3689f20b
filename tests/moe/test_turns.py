"""Halves of a batch that take turns: the same results, and while one travels the other computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from evener import moe
from evener.errors import UsageError
from evener.moe import parallel
from tests import worlds

WIDTH, LENGTH = 8, 5


class Block(nn.Module):
    """Mixes the places of a row, as attention does, then has experts."""

    def __init__(self, shared: int, drop: float = 0.0, again: bool = False) -> None:
        super().__init__()
        self.mix, self.drop, self.again = nn.Linear(LENGTH, LENGTH), drop, again
        self.moe = moe.MoE(WIDTH, 12, 4, 2, shared=shared)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(x + self.mix(x.transpose(1, 2)).transpose(1, 2), self.drop)
        return nn.functional.dropout(x + self.moe(x), self.drop)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.again:
            out: torch.Tensor = checkpoint(self.through, x, use_reentrant=False)
            return out
        return self.through(x)


def stack(shared: int = 6, **more: Any) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*(Block(shared, **more) for _ in range(3))).double()


def inputs(rank: int, rows: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 + rank)
    x, seed = torch.randn(2, rows, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), seed


def step(model: nn.Module, rank: int, aux: bool = False) -> Any:
    """Output and all gradients of a step."""
    model.zero_grad()
    x, seed = inputs(rank)
    out = model(x)
    loss = (out * seed).sum()
    if aux:
        loss = loss + sum(m.aux_loss for m in model.modules() if isinstance(m, moe.MoE))
    loss.backward()
    return out.detach(), x.grad, {n: p.grad for n, p in model.named_parameters()}


def same(rank: int, size: int, ahead: bool, parts: int, route: str) -> None:
    for shared in (6, 0):
        out, to_x, wanted = step(moe.spread(stack(shared), size, route=route), rank)
        model = moe.spread(stack(shared), size, route=route)
        model = moe.interleave(model, parts)
        for road in model[0].moe.experts.parallel.shared.roads:
            road.lane.ahead = ahead
        for _ in range(2):
            given, given_x, gradients = step(model, rank)
            torch.testing.assert_close(given, out)
            torch.testing.assert_close(given_x, to_x)
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, wanted[name], msg=name)
        model.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(inputs(rank, 1)[0]), out[:1])
        assert list(model.state_dict()) == list(stack(shared).state_dict())


@pytest.mark.parametrize(
    ("shape", "ahead", "parts", "route"),
    [([1, 1], False, 2, "flat"), ([1, 1], True, 3, "flat"), ([2, 2], True, 2, "two")],
)
def test_outputs_and_gradients_are_those_of_the_whole_batch(
    shape: list[int], ahead: bool, parts: int, route: str
) -> None:
    worlds.run(shape, same, ahead, parts, route)


def order(rank: int, size: int) -> list[str]:
    """What the backward pass did, in order: the step, and the part that it was of."""
    model = moe.interleave(moe.spread(stack(), size))
    roads = model[0].moe.experts.parallel.shared.roads
    # Autograd's numbers are those of one thread: the caller's, the parts', the caller's.
    x, _ = inputs(rank)
    for _ in range(500):
        before = x * 1
    out = model(before)
    ends = [node._sequence_nr() for node, _ in out.grad_fn.next_functions]
    assert before.grad_fn._sequence_nr() < min(ends)
    assert max(ends) < out.grad_fn._sequence_nr()
    seen: list[str] = []
    for kind in (parallel._End, parallel._Through, parallel._Begin):
        plain = kind.backward

        def noted(ctx: Any, *gradients: Any, plain: Any = plain, kind: Any = kind) -> Any:
            at = next(i for i, road in enumerate(roads) if road is ctx.state.road)
            seen.append(f"{kind.__name__[1]}{at}")
            return plain(ctx, *gradients)

        kind.backward = staticmethod(noted)
    step(model, rank)
    return seen


def test_backward_takes_turns_in_the_reversed_order() -> None:
    # E: gradients leave; T: experts; B: those of the tokens have come, attention follows.
    for seen in worlds.run([1, 1], order):
        assert seen == ["E1", "E0", *["T1", "T0", "B1", "E1", "B0", "E0"] * 2,
                        "T1", "T0", "B1", "B0"]  # fmt: skip


def drawn(rank: int, size: int) -> None:
    """Dropout is drawn again as it was; so gradients are those without checkpoints."""
    found = []
    for again in (False, True):
        model = moe.interleave(moe.spread(stack(drop=0.3, again=again), size))
        torch.manual_seed(rank)
        first = step(model, rank, aux=True)
        second = step(model, rank, aux=True)
        assert not torch.equal(first[0], second[0])
        # The two halves draw different numbers.
        found.append(second)
    for (one, other), names in zip(
        zip(found[0][:2], found[1][:2], strict=True), ("out", "x"), strict=True
    ):
        torch.testing.assert_close(one, other, msg=names)
    for name, gradient in found[0][2].items():
        torch.testing.assert_close(found[1][2][name], gradient, msg=name)


def test_checkpoints_and_dropout() -> None:
    worlds.run([1, 1], drawn)


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("the mask is of the wrong kind")


class Summed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).sum()


def refused(rank: int, size: int) -> str:
    with pytest.raises(UsageError) as caught:
        moe.interleave(stack())
    assert "no experts that are spread" in caught.value.problem
    model = moe.spread(stack(), size)
    for parts, said in ((1, "parts=1"), ("two", "'two' (a str) as parts")):
        with pytest.raises(UsageError) as caught:
            moe.interleave(model, parts)  # type: ignore[arg-type]
        assert said in caught.value.problem
    moe.interleave(model)
    with pytest.raises(UsageError) as caught:
        moe.interleave(model)
    assert "takes turns already" in caught.value.problem
    summed = moe.interleave(moe.spread(Summed(*stack()), size))
    with pytest.raises(UsageError) as caught:
        summed(inputs(rank)[0])
    assert "gives one value for its whole batch" in caught.value.problem
    # A batch that is too small on one rank: both hear of it, and one that computes meanwhile too.
    with pytest.raises(moe.MoEError) as failed:
        model(inputs(rank, 1 if rank else 4)[0])
    assert failed.value.rank == 1 and "1 rows for 2 parts" in failed.value.problem
    # So with a bug outside of the experts.
    model = moe.interleave(moe.spread(stack(), size))
    if rank:
        model[1].mix = Broken()
    with pytest.raises(moe.MoEError) as failed:
        step(model, rank)
    return str(failed.value)


def test_errors_are_named_on_every_rank() -> None:
    for said in worlds.run([1, 1], refused):
        assert "on rank 1 failed: ValueError: the mask is of the wrong kind" in said
